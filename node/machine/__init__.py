"""What the parts of one node's machine share: effects, jobs, records, waits, numbers."""
