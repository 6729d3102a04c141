"""One node as a process: the daemon, the driver of effects, journal, tensors, counters."""
