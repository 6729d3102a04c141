"""Seq1F1B-I: interleaved 1F1B over segments of tokens, with the warm-up that also holds for many segments."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design
from protocol.base.errors import BadInputError


def design(stages: int, microbatches: int, segments: int = 4, chunks: int = 2) -> Design:
    """`chunks` stages per node; segments go through them in groups of `stages` (the nodes).

    The paper's Eq. 6 deadlocks for more segments than nodes; this warm-up does not.

    Raises:
        BadInputError: when groups of segments and microbatches do not fit each other.
    """
    if (stages % segments and segments % stages) or (microbatches * segments) % stages:
        raise BadInputError(
            f"segments: {segments} neither divides the {stages} nodes nor is a multiple of them"
            f" with {microbatches} microbatches filling groups of {stages} segments"
        )
    group = (segments - 1) // stages * chunks * stages + (segments - 1) % stages
    return (
        Design.of(stages, microbatches)
        .place("circular", chunks)
        .cut(segments)
        .order("interleaved", wait_turn=True)
        .traverse("breadth", "depth", forward_interval=stages, backward_interval=stages)
        .warm_up(lambda node: 2 * (stages - 1 - node) + (chunks - 1) * stages + group)
    )
