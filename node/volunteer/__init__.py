"""The volunteer role, as a machine: leases in, results and contributions out."""
