"""What a plan gives a stage, in the words of a shard and of a checkpoint: ranges of blocks."""

from __future__ import annotations

from protocol.run.plan import Plan


def chunks_of(plan: Plan, stage: int) -> list[tuple[int, int]]:
    """(first block, end block) of each chunk of a stage, as they lie in its vector."""
    chunks = [plan.course.chunks[number] for number in plan.course.chunks_of(stage)]
    return [(chunk.first_block, chunk.end_block) for chunk in chunks]


def partition_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """What a checkpoint's parts depend on, as `Manifest.partition` has it."""
    rows = []
    for stage, placed in enumerate(plan.stages):
        first, *further = chunks_of(plan, stage)
        rows.append((*first, len(placed.servers), *(block for chunk in further for block in chunk)))
    return tuple(rows)
