"""Who keeps a copy of whose shard, and whether that is worth its bytes.

A shard's *buddy* is the next server of its stage, in a ring; of a stage with one server the next stage's. It holds in
memory what the shard has committed, so that a disk that is lost for ever costs open steps and no committed one.

What it costs: 12 bytes a parameter and step (weights and two moments in fp32), 16 with a delayed update, over one
server's line. 1.1 B parameters on 8 stages of two servers are 69 M a shard: 0.8 to 1.1 GB, 7 to 9 s at 1 Gbit/s, where
a step of a million tokens sends 4.4 GB of boundaries from a front server anyway. 8 B on as many servers are 6 to 8 GB,
48 to 64 s, and more than a buddy's memory is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.run.run import RunConfig

COPY_BYTES_MAX = 3 << 29
"""A larger copy is not kept, whatever the run says: a buddy holds up to three, beside all else that its tensor store
(8 GiB) has to hold."""
COPY_SHARE = 0.5
""""auto" keeps copies that take at most so much of what a front server sends of a step's boundaries."""
_FORM_BYTES = {"fp32": 4.0, "bf16": 2.0, "q8": 1.02}


def buddy_place(stage: int, shard: int, shard_counts: Sequence[int]) -> tuple[int, int] | None:
    """(stage, shard) of the server that keeps copies of a shard, or None where it is the only server of the run."""
    if shard_counts[stage] > 1:
        return stage, (shard + 1) % shard_counts[stage]
    return ((stage + 1) % len(shard_counts), 0) if len(shard_counts) > 1 else None


def copy_bytes(config: RunConfig, elements: int) -> int:
    """Bytes of a copy of a shard of so many parameters, but for some thousandths."""
    return elements * (16 if config.batch.delay else 12)


def boundary_bytes(config: RunConfig) -> float:
    """What a front server sends of a step: each microbatch's activation and its gradient."""
    batch, model = config.batch, config.model
    values = batch.microbatches * batch.samples * model.context * model.hidden
    return 2 * values * _FORM_BYTES[config.wire.activations_down] / config.stages.front_servers


def keeps_copies(config: RunConfig, elements: int) -> bool:
    """Whether a shard of so many parameters is copied to its buddy with each step."""
    wanted, size = config.checkpoint.buddy, copy_bytes(config, elements)
    if wanted == "never" or size > COPY_BYTES_MAX:
        return False
    return wanted == "always" or size <= COPY_SHARE * boundary_bytes(config)
