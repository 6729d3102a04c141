"""Chimera: two copies of the model, and every other microbatch goes the other way (Li & Hoefler 2021)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design
from protocol.base.errors import BadInputError


def design(stages: int, microbatches: int) -> Design:
    """A node holds stage d for one direction and its mirror for the other; stage s is limited as in 1F1B.

    Raises:
        BadInputError: when there is no second microbatch to go the other way.
    """
    if microbatches < 2:
        raise BadInputError(
            f"microbatches: Chimera sends one down and one up, so it needs at least 2, got {microbatches}"
        )
    return (
        Design.of(stages, microbatches)
        .place("bidirectional")
        .order("backward")
        .traverse("depth", "breadth")
        .in_flight(lambda node: tuple(stages - s for s in sorted({node, stages - 1 - node})))
    )
