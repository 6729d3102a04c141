"""A simulated world for the production machines: time, lines and links, and no judgement of what they do."""
