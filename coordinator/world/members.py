"""The node's side of the simulated world, which this package may not import."""

from __future__ import annotations

from importlib.metadata import entry_points

from coordinator.world.swarm import MakeMembers
from protocol.base.errors import BadInputError

WORLD_GROUP = "barnraise.world"
"""What the node's side gives to the simulated world: it makes machines."""


def members() -> MakeMembers:
    """The node's side. Raises `BadInputError` where it is not installed."""
    for point in entry_points(group=WORLD_GROUP):
        found: MakeMembers = point.load()
        return found
    raise BadInputError("the node's side of Barnraise is not installed here: its machines cannot be simulated")
