"""The command line: `barnraise server`, `join`, `netcheck`, `export`."""
