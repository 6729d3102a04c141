"""The node's side of the simulated world that measures (`protocol/world`): its machine, and lanes without tensors."""
