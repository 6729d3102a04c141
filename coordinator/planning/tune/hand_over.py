"""From a choice of the tuner to the run that nodes do: its keys in RUN.toml, or a sentence why there are none."""

from __future__ import annotations

import msgspec

from coordinator.planning.tune.case import Choice
from protocol.base.errors import BadInputError
from protocol.run.course import PLANNED
from protocol.run.run import RunConfig

_PLACEMENTS = {"one-to-one": ("line", 1), "circular": ("interleaved", 2), "V-shape": ("v", 2)}
"""(placement, chunks) in RUN.toml; each stage of a bidirectional pipeline stands twice, and a run has each once."""
NOT_FOLLOWED = (
    "nodes follow which kind goes first; a warm-up, limits on each node and turns that are waited for are made for a"
    " whole step, of which a pool does not know what is still to come"
)


def run_of(config: RunConfig, choice: Choice, edges: list[int]) -> RunConfig:
    """The run with the choice's sizes, cut, placement and order. Raises `BadInputError` for what nodes do not do.

    Args:
        edges: the first block of every part, and the number of blocks.
    """
    if choice.placement not in _PLACEMENTS:
        raise BadInputError(f"stages.placement: {choice.placement} has each stage on two nodes, and a run has it once")
    if choice.slices:
        raise BadInputError("batch.samples: microbatches of a run are equal, and slices halve some of them")
    placement, chunks = _PLACEMENTS[choice.placement]
    first = choice.order.split()[0]
    stages = msgspec.structs.replace(
        config.stages,
        count=choice.nodes,
        chunks=chunks,
        placement=placement,
        cut=PLANNED,
        order=first if first in ("forward", "backward", "interleaved") else "backward",
    )
    samples = config.batch.samples * config.batch.microbatches
    batch = msgspec.structs.replace(
        config.batch,
        samples=choice.microbatch_samples,
        microbatches=samples // choice.microbatch_samples,
        segments=choice.segments,
    )
    compute = msgspec.structs.replace(config.compute, split_backward=choice.split)
    run = msgspec.structs.replace(config, stages=stages, batch=batch, compute=compute)
    run = run.settled(choice.nodes, tuple(edges[1:-1]))
    run.validate()
    return run
