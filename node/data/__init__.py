"""Text to tokens to batches, for the servers of stage 0. NumPy, no torch."""
