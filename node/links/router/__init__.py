"""A port forwarded by the home router, where the owner allows it."""
