"""1F1B: as many microbatches in flight as stages follow, then one backward per forward (PipeDream-Flush)."""

from __future__ import annotations

from coordinator.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """The same bubble as GPipe, a stage's depth of memory."""
    return Design.of(stages, microbatches).order("backward").in_flight(lambda node: stages - node)
