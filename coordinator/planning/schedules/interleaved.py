"""Interleaved 1F1B: every node holds several stages, so that the pipeline fills sooner (Narayanan et al.
2021)."""

from __future__ import annotations

from coordinator.planning.schedules.design import Design
from protocol.base.errors import BadInputError


def design(stages: int, microbatches: int, chunks: int = 2) -> Design:
    """`chunks` stages per node, microbatches in groups of `stages` (the nodes).

    Raises:
        BadInputError: when the microbatches do not fill their groups.
    """
    if microbatches % stages:
        raise BadInputError(f"microbatches: interleaved 1F1B needs a multiple of {stages}, got {microbatches}")
    return (
        Design.of(stages, microbatches)
        .place("circular", chunks)
        .order("interleaved", wait_turn=True)
        .traverse("breadth", "depth", forward_interval=stages, backward_interval=stages)
        .warm_up(lambda node: 2 * (stages - 1 - node) + (chunks - 1) * stages)
    )
