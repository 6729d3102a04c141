"""V-shape with split backwards: down the nodes and up again, so that the first loss is soon back (Qi et al.
2024)."""

from __future__ import annotations

from coordinator.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """Two stages per node share the memory of 1F1B's first node; W fills what bubbles are left."""
    return (
        Design.of(stages, microbatches)
        .place("V-shape")
        .order("backward")
        .traverse("depth", "breadth")
        .in_flight(lambda node: (max(1, 2 * stages - 1), stages + 1))  # the way up always keeps a place
        .in_flight_total(lambda node: 2 * stages)
        .split_backward()
    )
