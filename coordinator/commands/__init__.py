"""The command line: each file reads its words, calls one planner or the daemon, and prints."""
