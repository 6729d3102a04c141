"""Random damage to everything that others write; see `__main__.py`."""
