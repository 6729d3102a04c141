"""From servers in their slots to the plan of a generation: pure, and with a sentence that explains it.

The door that planners come in by: what partitions or routes better gives another course here, and nothing else of the
coordinator changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from protocol.run.changes import RunChange
from protocol.run.course import EVEN, Course, course_of
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import TUNED, ModelSection, RunConfig
from protocol.schedule.policies import First, Policy

ROUTES_NAMED = 8
"""Routes that the plan's sentence names; more are counted."""


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


@lru_cache(maxsize=16)
def model_work(model: ModelSection, vocabulary: int) -> float:
    """Multiply-adds per token of the whole model's forward; asked for each of thousands of members."""
    config = RunConfig(model=model)
    return sum(block_work(config, block, vocabulary) for block in range(config.block_count))


IN_FLIGHT_MIN = 4
IN_FLIGHT_A_STAGE = 4
"""Forwards that a volunteer may have open for each stage of the run. From a forward at the first of P stages to its
backward lie 2 P - 1 others, each about as long as one of its own two halves where a line is what limits: P keep a line
busy if nothing ever waits for anything. Half as many again, since who sends one tensor a microbatch (the first stage)
gets fewer volunteers than who sends two; and more than twice that for what waits behind others on the way. Simulated
at 1.1 B parameters, 8 stages, 24 volunteers at 20/200 Mbit/s: with 8 their lines were half idle, with 16 a quarter,
with 32 hardly. Devices with less memory keep inputs only, or take fewer (`node.volunteer.room`)."""
IN_FLIGHT_MOST = 64
"""Four a stage of 16. With 32 there, a step of 7 B parameters with four volunteers a stage took 1.27 times what its
uplinks need: from a forward of the first stage to its backward lie 31 transfers of 1.7 s each, with a device, a server
and a downlink between any two of them 90 s, and twice as long where a volunteer sends to two servers at once; in 90 s a
stage does 104 microbatches, and four volunteers could hold 128. Of 8 B parameters (4,096 wide, 2,048 tokens, fp32, two
layers a stage) 64 inputs-only graphs take 64 * 5 * 34 MB = 10.7 GB; a device with less takes fewer."""


class Guidance(msgspec.Struct, frozen=True):
    """What a planner says beside seats and cut, and a plan hands on to the next. It changes no weight."""

    order: Policy
    """Counts where the run's file leaves it to the planner."""
    in_flight_max: int = 0
    """At least; 0: nothing is said of it."""

    @classmethod
    def of(cls, plan: Plan | None) -> Guidance | None:
        return None if plan is None else cls(plan.order, plan.in_flight_max)

    @classmethod
    def for_other_stages(cls, plan: Plan | None) -> Guidance | None:
        """What of a plan's counts for another layout: how much is in flight was for its stages."""
        return None if plan is None else cls(plan.order)


def order_of(config: RunConfig) -> Policy:
    """What nodes do first as the run's file says; backwards, where it leaves that to a planner and there was none."""
    return Policy(first=First.BACKWARD if config.stages.order == TUNED else First(config.stages.order))


def in_flight_of(stage_count: int) -> int:
    """Forwards that a volunteer may have open where no planner has looked at the lines."""
    return min(IN_FLIGHT_MOST, max(IN_FLIGHT_MIN, IN_FLIGHT_A_STAGE * stage_count))


def stage_blocks(config: RunConfig, course: Course, stage: int) -> str:
    """The blocks of a stage as people say it, chunk by chunk: `embed, 0a-1f + head`."""
    chunks = [course.chunks[number] for number in course.chunks_of(stage)]
    return " + ".join(block_names(config, chunk.first_block, chunk.end_block) for chunk in chunks)


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
    continues: int = -1,
    changes: tuple[RunChange, ...] = (),
    paused: bool = False,
    held: bool = False,
    undone: bool = False,
    save: int = -1,
    why: str = "",
    guidance: Guidance | None = None,
) -> tuple[Plan, str]:
    """The plan with these servers (a sequence per stage, in shard order), and why it cuts the model as it does: `why`
    is what a planner has to say of it, or that there was none; `guidance` is its, or that of the plan before."""
    assert len(servers) == config.stages.count, "one list of servers per stage"
    course = course_of(config)
    plan = Plan(
        generation=generation,
        ledger_generation=ledger_generation,
        restore_step=restore_step,
        continues=continues,
        stages=tuple(StagePlan(servers=tuple(placed)) for placed in servers),
        course=course,
        in_flight_max=max(in_flight_of(len(servers)), 0 if guidance is None else guidance.in_flight_max),
        order=order_of(config) if guidance is None or config.stages.order != TUNED else guidance.order,
        changes=changes,
        paused=paused,
        held=held,
        undone=undone,
        save=save,
    )
    parts = "stages" if len(course.chunks) == len(servers) else f"chunks on {len(servers)} stages"
    cut = "; ".join(f"stage {stage}: {stage_blocks(config, course, stage)}" for stage in range(len(servers)))
    how = "evenly" if config.stages.cut == EVEN else f"at {config.stages.cut}"
    sentence = f"{config.block_count} sub-layer blocks cut {how} into {len(course.chunks)} {parts} ({cut})"
    if len(course.routes) > 1 or course.routes[0] != tuple(range(len(course.chunks))):
        shown = ", ".join("-".join(map(str, course.stages_of(route))) for route in course.routes[:ROUTES_NAMED])
        more = f" and {len(course.routes) - ROUTES_NAMED} more" if len(course.routes) > ROUTES_NAMED else ""
        sentence += f"; routes by stage, in turns: {shown}{more}"
    return plan, f"{sentence}; {why}" if why else sentence
