"""Which way each microbatch goes: SkipPipe's route search, its bounds, its baselines, and repair after a
change.
"""
