"""Measure, place, partition, schedule, route, simulate, choose. Never imports `node` or torch."""
