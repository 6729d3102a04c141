"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """Memory for every microbatch, no other idea needed."""
    return Design.of(stages, microbatches).order("forward").warm_up(lambda node: microbatches)
