"""Looped breadth-first: a stage runs all its forwards before the node's next stage (Lamy-Poirier 2023)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int, chunks: int = 2) -> Design:
    """GPipe's memory with the smaller bubble of several stages per node."""
    return (
        Design.of(stages, microbatches)
        .place("circular", chunks)
        .order("forward")
        .traverse("breadth", "depth")
        .warm_up(lambda node: chunks * microbatches)
    )
