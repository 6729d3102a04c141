"""The owner's page: one HTML file, one script, one style; no build step."""
