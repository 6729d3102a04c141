"""V-shape with split backwards: down the nodes and up again, so that the first loss is soon back (Qi et al. 2024)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """Two stages per node share the memory of 1F1B's first node; W fills what bubbles are left.

    The way down may take all places of a node but one, or the way up could never free them; W goes before a backward
    while memory holds up a forward.
    """
    return (
        Design.of(stages, microbatches)
        .place("V-shape")
        .order("forward")
        .traverse("depth", "depth")
        .in_flight(lambda node: (max(1, 2 * stages - 1 - node), stages))
        .in_flight_total(lambda node: max(2, 2 * stages))
        .split_backward(free_first=True)
    )
