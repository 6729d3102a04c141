"""One event-driven judge for every plan: what a schedule costs in time and memory, and why."""
