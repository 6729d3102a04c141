"""What crosses the wire, and nothing else: imports neither `coordinator` nor `node`."""
