"""1F1B: as many microbatches in flight as stages follow, then one backward per forward (PipeDream-Flush)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """The same bubble as GPipe, a stage's depth of memory; strict turns make the order the same for any times."""
    return Design.of(stages, microbatches).order("interleaved", wait_turn=True).warm_up(lambda node: stages - 1 - node)
