"""From servers in their slots to the plan of a generation: pure, and with a sentence that explains it.

The door that planners come in by: what partitions, orders or routes better replaces `even_partition` here, and nothing
else of the coordinator changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from protocol.plan import Plan, ServerPlan, StagePlan
from protocol.run import RunConfig


def even_partition(block_count: int, stage_count: int) -> tuple[tuple[int, int], ...]:
    """(first, end) blocks of each stage; sizes differ by one at most, later stages get the larger ones.

    The late ones, because the first stage has the embedding, which costs next to nothing.
    """
    cuts = [block_count * stage // stage_count for stage in range(stage_count + 1)]
    return tuple(pairwise(cuts))


def block_work(config: RunConfig, block: int, vocabulary: int) -> float:
    """Multiply-adds per token of one sub-layer block's forward: its matrices, and attention's scores and mixing.

    Blocks count as `RunConfig.block_count` says: embedding, (attention, feed-forward) a layer, head.
    """
    model = config.model
    if block == 0:
        return float(model.hidden)
    if block == config.block_count - 1:
        return float(model.hidden * vocabulary)
    if block % 2:
        kv_width = model.hidden // model.heads * model.kv_heads
        projections = model.hidden * (2 * model.hidden + 2 * kv_width)
        return float(projections + model.context * model.hidden)
    return float(3 * model.hidden * model.feed_forward)


def stage_work(config: RunConfig, stage: StagePlan, vocabulary: int) -> float:
    """Multiply-adds per token of a stage's forward."""
    return sum(block_work(config, block, vocabulary) for block in range(stage.first_block, stage.end_block))


def block_names(config: RunConfig, first: int, end: int) -> str:
    """A range of blocks as people say it: `embed, 0a-1f, head` (layer number, a attention half, f feed-forward)."""
    names = []
    low, high = max(first, 1), min(end, config.block_count - 1)
    if first == 0:
        names.append("embed")
    if low < high:
        halves = [f"{(block - 1) // 2}{'a' if block % 2 else 'f'}" for block in (low, high - 1)]
        names.append(halves[0] if low == high - 1 else "-".join(halves))
    if end == config.block_count:
        names.append("head")
    return ", ".join(names)


def build_plan(
    config: RunConfig,
    servers: Sequence[Sequence[ServerPlan]],
    *,
    generation: int,
    ledger_generation: int,
    restore_step: int,
) -> tuple[Plan, str]:
    """The plan with these servers (a sequence per stage, in shard order), and why it cuts the model as it does."""
    assert len(servers) == config.stages.count, "one list of servers per stage"
    ranges = even_partition(config.block_count, config.stages.count)
    stages = tuple(
        StagePlan(first_block=first, end_block=end, servers=tuple(placed))
        for (first, end), placed in zip(ranges, servers, strict=True)
    )
    plan = Plan(generation=generation, ledger_generation=ledger_generation, restore_step=restore_step, stages=stages)
    cut = "; ".join(f"stage {index}: {block_names(config, *bounds)}" for index, bounds in enumerate(ranges))
    return plan, f"{config.block_count} sub-layer blocks cut evenly into {len(stages)} stages ({cut})"
