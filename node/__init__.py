"""Servers, volunteers, their links, and what they compute with. Never imports `coordinator`."""
