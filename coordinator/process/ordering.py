"""What an operator orders of the run, until it is done: whoever asks hears of it when no crash can undo it."""

from __future__ import annotations

import trio

from coordinator.live.core import CoordinatorMachine
from coordinator.live.first_plan import problem_now, why_planned
from coordinator.live.orders import ChangeRun, Order, PauseRun, RollBack
from coordinator.live.plan_builder import Guidance
from coordinator.live.records import Voiding
from coordinator.live.replanning import why_no_layout
from coordinator.process.planner import ask_planner
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.drive.pump import Pump
from protocol.run.changes import (
    LAYOUT,
    RunChange,
    changed,
    first_layout,
    layout_change,
    make_change,
    running,
    wanted_layout,
)
from protocol.run.run import RunConfig

ORDER_S = 8.0
"""For a plan to be written, or all servers to look for a checkpoint and say so; whoever asks gives up after ten."""
LOOK_S = 0.05


def why_too_late(machine: CoordinatorMachine) -> str:
    """Why no order can change a step any more; empty while there is one to come. Behind the last step stage 0 opens
    numbers that only validate what the run ends with, and the order would wait for a boundary that never comes."""
    steps = running(machine.config, machine.placement.wishes.changes).steps
    reports = [member.report for member in machine.roster.servers()]
    if max((report.counters.get("opened", -1.0) for report in reports if report is not None), default=-1.0) < steps:
        return ""
    return (
        f"all {steps} steps are done, and the run ends when what it came to is validated: nothing was changed. `run"
        " branch` with more `steps` goes on from its newest checkpoint"
    )


async def change_run(machine: CoordinatorMachine, pump: Pump, key: str, value: str) -> RunChange:
    """Orders another value of a key; returns when the plan with it is durable. Raises `BadInputError`."""
    change = make_change(machine.config, machine.placement.wishes.changes, key, value)
    if late := why_too_late(machine):
        raise BadInputError(late)
    if key == "steps" and int(change.value) <= machine.history.newest_step + 1 + machine.config.batch.delay:
        raise BadInputError(f"steps: step {machine.history.newest_step + 1} is done, and the one after it is open")
    await _durable(machine, pump, ChangeRun(change))
    return change


async def replan_run(machine: CoordinatorMachine, pump: Pump, settings: list[str]) -> tuple[RunChange, str]:
    """Orders another layout; returns when the plan that holds the run for it is durable, and why it is so where a
    planner has chosen it. Raises `BadInputError`."""
    placement, changes = machine.placement, machine.placement.wishes.changes
    wanted, guidance, reason = wanted_layout(machine.config, changes, settings), None, ""
    _check_layout(machine, wanted)
    if wanted.is_open:
        wanted, guidance, reason = await _planned(machine, wanted)
        if placement.wishes.changes != changes:
            raise BadInputError(f"{LAYOUT}: the run was changed while the planner worked; order it again")
        _check_layout(machine, wanted)
        if wanted.stages == changed(machine.config, changes).stages:
            raise BadInputError(f"{LAYOUT}: the planner finds the layout that the run has: {reason}")
    change = layout_change(machine.config, changes, wanted)
    await _durable(machine, pump, ChangeRun(change, guidance, reason))
    return change, reason


def _check_layout(machine: CoordinatorMachine, wanted: RunConfig) -> None:
    placement = machine.placement
    if late := why_too_late(machine):
        raise BadInputError(late)
    changes = placement.wishes.changes
    first = changes[0] if changes else first_layout(machine.config)
    if placement.left_open and (first is None or (first.key, first.from_step) != (LAYOUT, 0)):
        raise BadInputError(
            "stages.cut: RUN.toml leaves the layout to the planner, and what it settled is not at the head of the run's"
            " changes (an older version wrote none, and one of more than 600 characters has no place there); `run"
            " branch` with `stages` as the plan has them begins a run that can be laid out anew"
        )
    linked = {member.peer: member for member in machine.roster.servers()}
    if why := why_no_layout(machine.config, wanted, placement.table, linked, placement.wishes.lays_out):
        raise BadInputError(why)


async def _planned(machine: CoordinatorMachine, wanted: RunConfig) -> tuple[RunConfig, Guidance, str]:
    """What the planner makes of the layout, for those who are here: the run with it, its guidance, and why it is so.
    Servers stay where they are, with the data that they have."""
    table, here = machine.placement.table, {member.peer: member for member in machine.roster.servers()}
    known = machine.network.directions(trio.current_time())
    if len(here) > 1 and not any(a in here and b in here for a, b in known):
        raise BadInputError(f"{LAYOUT}: no line is measured yet; servers say what theirs carry within half a minute")
    order = dict.fromkeys([*(table.holder[slot] for slot in table.slots if slot in table.holder), *here])
    problem = problem_now(
        wanted, [here[node] for node in order if node in here], machine.roster.volunteers(), machine.network,
        machine.flops_per_s, trio.current_time(), keeps_seats=True,
    )  # fmt: skip
    answer = await ask_planner(problem)
    found = answer.proposal
    if fault := answer.sentence if found is None else found.fault(problem):
        raise BadInputError(fault)
    assert found is not None, "a planner without a proposal says why"
    return wanted.settled(len(found.servers), found.edges), found.guidance, why_planned(found)


async def pause_run(machine: CoordinatorMachine, pump: Pump, paused: bool) -> None:
    """Orders that no step is opened, or that they are again; returns when that is durable. Raises `BadInputError`."""
    await _durable(machine, pump, PauseRun(paused))


async def order_durably(machine: CoordinatorMachine, pump: Pump, order: Order) -> None:
    """Orders what no plan has to tell; returns when all that it changes survives a crash. Raises `BadInputError`."""
    pump.put(Ordered(order))
    with trio.move_on_after(ORDER_S):
        await pump.handled()
        count = machine.outbox.written_count
        while machine.outbox.durable_count < count:
            await trio.sleep(LOOK_S)
        return
    raise BadInputError(f"the order is not on the coordinator's disk within {ORDER_S:.0f} s; it may be done later")


async def _durable(machine: CoordinatorMachine, pump: Pump, order: ChangeRun | PauseRun) -> None:
    placement = machine.placement
    before = placement.wishes.order_count
    pump.put(Ordered(order))
    with trio.move_on_after(ORDER_S):
        while placement.wishes.order_count == before or not placement.is_ordered:
            await trio.sleep(LOOK_S)
        return
    raise BadInputError(f"the order is not on the coordinator's disk within {ORDER_S:.0f} s; `run changes` will tell")


def voiding_of(
    machine: CoordinatorMachine, nodes: tuple[NodeId, ...], reason: str, from_start: bool, wall_s: float
) -> RollBack:
    """What voiding these members comes to. Raises `BadInputError` where it cannot be, with what can be done instead."""
    placement, plan = machine.placement, machine.placement.plan
    servers = () if plan is None else plan.server_nodes()
    for node in nodes:
        if node in servers:
            raise BadInputError(f"{node[:8]} is a server: what it made is the run itself; see `run rollback`")
    given = [credit.first_step for credit in map(machine.giving.of, nodes) if credit is not None]
    known = [step for step in (*map(machine.admission.since, nodes), *given) if step >= 0]
    if not known:
        raise BadInputError(f"{nodes[0][:8]}: nobody knows since when it takes part; `run rollback STEP` goes back")
    if refusal := placement.why_no_rollback(-1):
        raise BadInputError(refusal)
    if placement.review.unread and not from_start:
        raise BadInputError(placement.review.sentence)
    first, readable = min(known), placement.readable_steps()
    before = [step for step in readable if step <= first]
    if not before and not from_start:
        oldest = f"the oldest is of step {min(readable)}" if readable else "there is none"
        raise BadInputError(
            f"no checkpoint is kept from before step {first}, when {nodes[0][:8]} came: {oldest}. `run void"
            " --from-start` begins the run anew, `run ban` keeps what was trained so far. Nothing was changed"
        )
    voiding = Voiding(nodes=nodes, reason=reason, first_step=first, wall_s=wall_s)
    return RollBack(max(before, default=-1), voiding)


async def roll_back(machine: CoordinatorMachine, pump: Pump, step: int) -> int:
    """Returns how many closed steps that threw away. Raises `BadInputError` where nothing was, with the reason.

    Step 0, which nothing was written after, is the run's beginning.
    """
    checkpoint_step = step or -1
    if refusal := machine.placement.why_no_rollback(checkpoint_step):
        raise BadInputError(refusal)
    return await go_back(machine, pump, RollBack(checkpoint_step))


async def go_back(machine: CoordinatorMachine, pump: Pump, order: RollBack) -> int:
    """As `roll_back`, with what else is ordered."""
    placement, history = machine.placement, machine.history
    before, lost = history.rollback_count, history.lost_steps
    pump.put(Ordered(order))
    with trio.move_on_after(ORDER_S):
        while history.rollback_count == before:
            await trio.sleep(LOOK_S)
            if placement.rollback is None and not placement.going_back and placement.rollback_refusal:
                raise BadInputError(placement.rollback_refusal)
        return history.lost_steps - lost
    raise BadInputError(
        f"not every server has said within {ORDER_S:.0f} s that it can read checkpoint {order.step}; the run goes back"
        " when they have"
    )
