"""Servers, volunteers, links, the schedule interpreter. Never imports `coordinator`."""
