"""Chimera: two copies of the model, and every other microbatch goes the other way (Li & Hoefler 2021)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """A node holds stage d for one direction and its mirror for the other; stage s is limited as in 1F1B."""
    return (
        Design.of(stages, microbatches)
        .place("bidirectional")
        .order("backward")
        .traverse("depth", "breadth")
        .in_flight(lambda node: tuple(stages - s for s in sorted({node, stages - 1 - node})))
    )
