"""What differs from system to system: idle time, programs, battery, priorities, sockets to a child, services."""
