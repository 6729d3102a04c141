"""Zero-bubble H1: 1F1B whose backwards are split, with W in the gaps and no more memory (Qi et al. 2023)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int) -> Design:
    """1F1B's memory limit on its first node for all nodes, about a third of its bubble."""
    return Design.of(stages, microbatches).order("interleaved").in_flight(lambda node: stages).split_backward()
