"""Seq1F1B: 1F1B over segments of tokens, forward in order and backward in reverse (Sun et al. 2024)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design


def design(stages: int, microbatches: int, segments: int = 4) -> Design:
    """A segment's share of 1F1B's memory. The last node runs a whole microbatch before its first backward."""
    return (
        Design.of(stages, microbatches)
        .cut(segments)
        .order("interleaved", wait_turn=True)
        .warm_up(lambda node: stages - node - 2 + segments)
    )
