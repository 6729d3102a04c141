"""What a run is: its configuration, its model's shape, and the plan in force."""
