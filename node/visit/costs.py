"""What a run takes of those who serve it and work for it, from its own numbers: for `barnraise run check`."""

from __future__ import annotations

from node.compute.layout import StageLayout
from node.owner.tally import plural
from node.visit.enquiry import EXAMPLE_TOKENS_PER_S, gigabytes_per_hour
from protocol.run.buddies import copy_bytes, keeps_copies
from protocol.run.keeping import kept_steps
from protocol.run.memory import VERSION_BYTES, device_parameter_bytes, own_computing_bytes, server_parameter_bytes
from protocol.run.run import RunConfig

JOURNAL_STATES = 4
"""A snapshot is taken when the journal's gradients weigh four times the state."""
SNAPSHOTS = 2


def describe_costs(config: RunConfig, vocabulary: int) -> list[str]:
    """Lines for the operator: model, servers, their memory and disk, volunteers, what an hour moves, how long."""
    parameters = StageLayout.whole(config, vocabulary).parameter_count
    stages = config.stages
    per_stage = stages.front_servers + stages.back_servers
    # Left open, one stage is what takes most of each.
    one = config if stages.count else config.settled(1)
    count = one.stages.count
    shard = parameters / count / per_stage
    if stages.count:
        where, who = (
            f"in {plural(stages.count, 'stage', 'stages')}",
            f"{stages.count * per_stage} ({per_stage} a stage), each with about",
        )
    else:
        where, who = "in as many stages as the planner chooses", f"{per_stage} a stage, each of one stage with about"
    every = config.checkpoint.every_steps
    kept = len(kept_steps(range(every, config.steps + 1, every), config)) if every else 1
    files = max(kept, config.checkpoint.keep) + 1 + SNAPSHOTS + JOURNAL_STATES
    up, down = _moved(config, parameters)
    tokens = config.steps * config.step_tokens
    helpers = "none are needed, any number helps" if stages.collocated != "never" else "one a stage at least"
    return [
        f"model       {parameters / 1e6:,.1f} M parameters {where}",
        f"servers     {who} {_size(shard * server_parameter_bytes(config))} of memory",
        *_own_computing(config, int(parameters / count)),
        f"            and {_size(shard * VERSION_BYTES * files)} of disk at most ({kept} checkpoints kept at the end)",
        f"            {_copies(one, int(shard))}",
        f"volunteers  {helpers}",
        f"            weights take {_size(parameters / count * device_parameter_bytes(config))} of a device's memory",
        f"            at {EXAMPLE_TOKENS_PER_S:,.0f} tokens/s one moves {up:.1f} GB an hour up and {down:.1f} down,",
        "            the servers of its stage the same",
        f"time        {tokens:,} tokens: {tokens / EXAMPLE_TOKENS_PER_S / 3600:,.1f} hours for each"
        f" {EXAMPLE_TOKENS_PER_S:,.0f} tokens/s",
        "            that the slowest stage makes",
    ]


def _own_computing(config: RunConfig, stage: int) -> list[str]:
    """What servers take beside it where they may compute: with several a stage, more than their shards do."""
    own = own_computing_bytes(config, stage)
    return [f"            (up to {_size(own)} more where it computes for want of volunteers)"] if own else []


def _moved(config: RunConfig, parameters: int) -> tuple[float, float]:
    """GB an hour up and down. Left open, what counts of stages is between one, which moves most gradients and weights,
    and three, whose middle one moves as many activations as any."""
    stages = config.stages
    layouts = [config] if stages.count else [config.settled(1)]
    if not stages.count:
        layouts += [config.settled(count) for count in (2, 3) if count * stages.chunks < config.block_count]
    ups, downs = zip(*(gigabytes_per_hour(each, parameters, EXAMPLE_TOKENS_PER_S) for each in layouts), strict=True)
    return max(ups), max(downs)


def _copies(config: RunConfig, shard: int) -> str:
    """Whether servers keep copies of each other's shards, and what that takes or saves."""
    size, stages = copy_bytes(config, shard), config.stages
    if stages.count * (stages.front_servers + stages.back_servers) < 2 or not keeps_copies(config, shard):
        return "no copies: a lost disk costs all steps since the newest checkpoint"
    versions = 2 + config.batch.delay
    return f"copies of others' parts: {_size(size)} sent a step, {_size(versions * size)} of memory"


def _size(byte_count: float) -> str:
    """In MB below a GB: a small model's 4 MB are not 0.00 GB."""
    return f"{byte_count / 1e9:.2f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:.1f} MB"
