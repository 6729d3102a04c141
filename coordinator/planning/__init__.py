"""The planners: partition, order, placement, routes, schedules, simulator, tuner."""
