"""`barnraise simulate`: the production machines of a whole run in the simulated world of `protocol/world`."""
