"""What runs while a run runs: the coordinator's machine and its parts. Pure, and imports no planning."""
