"""What everything stands on: ids, errors, limits, and what a machine is."""
