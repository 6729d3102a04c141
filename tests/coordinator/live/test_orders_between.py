"""Orders that are given while something else is on its way: none is lost, and no plan is made for ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.live.orders import Ban, ChangeRun, DrainNode, PauseRun, RollBack
from coordinator.live.outbox import Outbox
from coordinator.live.records import Banned, DataRow, GoBackRefused, GoBackWish, PlanRow, StepRow, StoredState
from coordinator.live.wishes import Wishes
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.messages import NodeReport, PlanChanged, RunFinished
from protocol.run.changes import RunChange
from protocol.run.plan import Plan
from protocol.run.run import AuditSection, CheckpointSection
from tests.coordinator.live.desk import CONFIG, DATA, Desk, join
from tests.layouts import make_layout

PLACES = {"s0": (0, 0), "s1": (0, 1), "s2": (1, 0), "s3": (1, 1)}
SERVERS = tuple(PLACES)
RATE = RunChange("optimizer.learning_rate", "0.5")
SAVES = msgspec.structs.replace(CONFIG, steps=100, checkpoint=CheckpointSection(every_steps=10, folder="/shared"))
GOES_BACK = msgspec.structs.replace(
    CONFIG, steps=35, checkpoint=CheckpointSection(every_steps=10, keep=2), audit=AuditSection(rate=0.0)
)


def row() -> DataRow:
    return DataRow(vocabulary=DATA.vocabulary, data_hash=DATA.data_hash, token_count=DATA.token_count)


def shows(desk: Desk, node: str, plan: Plan, **facts: Any) -> None:
    """A server joins with a whole disk of the plan's ledgers, and shows the plan."""
    stage, shard = PLACES[node]
    own = {
        "stage": stage, "shard": shard, "version": 3, "held_generation": plan.ledger_generation, "plan": plan,
        "config_hash": desk.machine.config.config_hash(),
    }  # fmt: skip
    desk.server(node, **{**own, **facts})


def get_on(desk: Desk, closed: int, unreported: int = 0, but: str = "") -> None:
    """Every server says that it goes by the plan in force, and that the steps up to this one are all that are open."""
    plan = desk.plan
    for node in plan.server_nodes():
        counters = {"step": float(closed), "generation": float(plan.generation)}
        if node == plan.decider:
            counters |= {"opened": float(closed), "unreported": float(unreported)}
        if node != but:
            generation = plan.ledger_generation
            desk.say(
                node, NodeReport(state="training", waiting_for="", ledger_generation=generation, counters=counters)
            )


def can_read(desk: Desk, *steps: int, but: str = "") -> None:
    for node, (stage, shard) in PLACES.items():
        if node != but:
            facts = {"stage": stage, "shard": shard, "version": steps[0], "held_generation": 1}
            desk.say(node, join(addresses=(f"{node}:1",), checkpoints=steps, **facts))


def order(desk: Desk, *orders: RunChange) -> None:
    for change in orders:
        desk.feed(Ordered(ChangeRun(change)))


def plans_made(desk: Desk) -> int:
    """How many are written until nothing is on its way to the disk any more, but sixty turns at most."""
    before = len(desk.written(PlanRow))
    for _ in range(60):
        if desk.waiting:
            desk.settle_one()
    return len(desk.written(PlanRow)) - before


def ready_to_lay_out() -> Desk:
    """A layout for six servers is ordered, and the run is held until all have saved version 8."""
    desk = Desk(SAVES)
    desk.train()
    for node in ("s4", "s5"):
        desk.server(node)
    for step in range(8):
        desk.report(step)
    order(desk, make_layout(SAVES, (), ("stages.count=2", "stages.front_servers=2")))
    get_on(desk, 7)
    get_on(desk, 7)
    assert desk.plan.save == 8 and desk.plan.held
    return desk


def waits_to_go_back() -> tuple[Desk, int]:
    """The last step but one is closed, and the run is to go back to 20 as soon as all have looked (`Desk.answer`)."""
    desk = Desk(GOES_BACK)
    desk.train()
    can_read(desk, 30, 20, 10)
    for step in range(34):
        desk.report(step)
    desk.answers, at = False, len(desk.done)
    desk.feed(Ordered(RollBack(20)))
    return desk, at


# ---- what a server shows that this coordinator has issued -----------------------------------------------------------


def test_a_pause_stays_when_a_server_comes_that_has_not_heard_what_was_dropped_before() -> None:
    """It shows the plan with the change, whose list is longer: that was taken over, and the pause was gone."""
    desk = Desk()
    desk.train()
    for step in range(3):
        desk.report(step)
    order(desk, RunChange("steps", "2"))
    waits = desk.plan
    desk.durable = False
    get_on(desk, 2)  # too late: a plan without it is on its way
    desk.drop("s3")
    desk.durable = True
    desk.settle()
    desk.feed(Ordered(PauseRun(True)))
    shows(desk, "s3", waits)
    assert desk.plan.paused and not desk.plan.changes
    assert desk.sent("s3", PlanChanged)[-1].plan == desk.plan


@pytest.mark.parametrize("comes_back", ["a server", "the coordinator"])
def test_a_layout_that_is_given_up_does_not_come_back_by_who_shows_it(comes_back: str) -> None:
    """A spare is gone when the last server comes that has saved: too few are left. The layout was given up, taken over
    from what that server showed, given up again, and so on: a plan with each write, of which nobody was told."""
    desk = ready_to_lay_out()
    plan = desk.written(PlanRow)[-1]
    if comes_back == "a server":
        can_read(desk, 8, but="s3")
        desk.drop("s3")
        desk.drop("s5")
    else:
        steps = tuple(desk.written(StepRow))
        stored = StoredState(plan=plan.plan, plan_sentence=plan.sentence, data=row(), steps=steps, next_serial=50)
        desk = Desk(SAVES, stored=stored, generation=10**6)
        for node in SERVERS[:3]:
            shows(desk, node, plan.plan, version=8, checkpoints=(8,))
        get_on(desk, 7, but="s3")
    desk.durable = False
    shows(desk, "s3", desk.plan if comes_back == "a server" else plan.plan, version=8, checkpoints=(8,))
    assert plans_made(desk) < 6 and desk.logged("layout given up") and not desk.plan.held


def test_an_order_in_the_place_of_one_that_was_given_up_is_in_no_plan_yet() -> None:
    """The lists are equally long, and the run is held for both."""
    layout = make_layout(SAVES, (), ("stages.count=2", "stages.front_servers=2"))
    plan = msgspec.structs.replace(Desk().train(), changes=(layout,), held=True)
    wishes = Wishes(plan, "", (), Outbox(0.0))
    assert wishes.are_in(plan)
    wishes.give_up_layout("too few servers")
    wishes.change(ChangeRun(RunChange("steps", "9")), None)
    assert not wishes.are_in(plan)


def test_a_pause_stays_though_an_old_database_has_begun_twice() -> None:
    """The first beginning's plan is newer than what servers show, and in the database; theirs is not."""
    old = Desk().train()
    paused = msgspec.structs.replace(old, generation=old.generation + 3, paused=True)
    first = Desk(stored=StoredState(plan=old, generations=(old.generation,), data=row()), generation=10**6)
    for node in SERVERS[:3]:
        shows(first, node, paused)
    plan = first.written(PlanRow)[-1].plan
    generations = (old.generation, plan.generation)
    stored = StoredState(plan=plan, generations=generations, data=row(), next_serial=50)
    desk = Desk(stored=stored, generation=2 * 10**6)
    for node in SERVERS:
        shows(desk, node, paused)
    assert desk.plan.paused


# ---- what is ordered meanwhile --------------------------------------------------------------------------------------


def test_what_is_ordered_while_a_plan_waits_to_be_taken_over_counts_then() -> None:
    """It was taken, and then the plan of the servers stood in its place, without a word."""
    old = Desk().train()
    newer = msgspec.structs.replace(old, generation=old.generation + 3)
    desk = Desk(stored=StoredState(plan=old, data=row()), generation=10**6)
    for node in SERVERS[:3]:
        shows(desk, node, newer)
    desk.feed(Ordered(PauseRun(True)))
    order(desk, RATE)
    shows(desk, "s3", newer)
    assert desk.plan.paused and desk.plan.changes == (RATE,) and desk.machine.placement.is_ordered


@pytest.mark.parametrize(
    "change", [RunChange("steps", "9"), RunChange("optimizer.learning_rate", "0.5")], ids=lambda change: change.key
)
def test_what_was_ordered_of_an_old_database_counts_in_what_is_taken_over(change: RunChange) -> None:
    """One server has joined and goes by the plan of the database, which the order is in: the operator was told that it
    counts. The others show a newer plan, without it and paused."""
    old = Desk().train()
    desk = Desk(stored=StoredState(plan=old, data=row()), generation=1000)
    shows(desk, "s0", old)
    order(desk, change)
    assert [each.key for each in desk.plan.changes] == [change.key]
    for node in SERVERS[1:]:
        shows(desk, node, msgspec.structs.replace(old, generation=7, paused=True))
    assert desk.plan.paused and [(each.key, each.value) for each in desk.plan.changes] == [(change.key, change.value)]
    assert desk.plan.held == (change.key == "steps") and not desk.logged("change undone")


def test_what_cannot_be_in_the_plan_that_is_taken_over_is_named() -> None:
    """Nothing stands in a list that no member would take."""
    old = Desk().train()
    newer = msgspec.structs.replace(old, generation=old.generation + 3)
    desk = Desk(stored=StoredState(plan=old, data=row()), generation=10**6)
    for node in SERVERS[:3]:
        shows(desk, node, newer)
    order(desk, RunChange("optimizer.learning_rate", '"much"'), RATE)
    shows(desk, "s3", newer)
    assert desk.plan.changes == (RATE,) and len(desk.logged("change undone")) == 1


def test_what_is_ordered_after_a_way_back_counts_from_there() -> None:
    """To go back and lower the rate is what one does after a spike; the rate was thrown away with the steps."""
    desk = Desk(GOES_BACK)
    desk.train()
    order(desk, RunChange("optimizer.clip_norm", "2.0"))
    can_read(desk, 30, 20, 10)
    for step in range(34):
        desk.report(step, changes=int(step > 25))
    desk.answers, at = False, len(desk.done)
    desk.feed(Ordered(RollBack(20)))
    order(desk, RATE)
    assert [change.key for change in desk.plan.changes] == ["optimizer.clip_norm", RATE.key]
    desk.answer(at)
    assert desk.plan.restore_step == 20 and desk.plan.changes == (RATE,) and not desk.plan.held


def test_a_way_back_that_the_end_overtakes_is_refused_aloud() -> None:
    """It was forgotten, and the operator had been told that it would come."""
    desk, at = waits_to_go_back()
    desk.report(34)
    desk.answer(at)
    assert desk.machine.placement.rollback_refusal == "the run has done all its steps"
    assert len(desk.written(GoBackRefused)) == 1 and desk.machine.placement.rollback is None


def test_a_way_back_that_servers_have_gone_already_is_not_gone_again() -> None:
    """An older database knows the order, and not that it was granted."""
    old = Desk(GOES_BACK).train()
    back = msgspec.structs.replace(old, generation=9, ledger_generation=9, restore_step=20, undone=True)
    steps = tuple(
        StepRow(
            ledger_generation=1, step=step, loss=4.0, tokens=2048, gradient_norm=1.0, clip_factor=1.0, skipped=False,
            learning_rate=1e-3, duration_s=0.5, wall_s=float(step),
        )
        for step in range(34)
    )  # fmt: skip
    wish = GoBackWish(step=20, cause="the operator goes back")
    stored = StoredState(plan=old, data=row(), steps=steps, tokens=34 * 2048, wish=wish, next_serial=50)
    desk = Desk(GOES_BACK, stored=stored, generation=10**6)
    for node in SERVERS:
        shows(desk, node, back, version=28, checkpoints=(20, 10))
    assert desk.plan.ledger_generation == 9 and len(desk.written(GoBackRefused)) == 1


def test_a_change_before_a_held_one_has_the_step_that_was_decided_with_it() -> None:
    """That step's row was still on its way to the disk: the change seemed to have begun a step later, for good."""
    desk = Desk()
    desk.train()
    desk.report(0)
    order(desk, RATE, RunChange("steps", "20"))
    get_on(desk, 1, but="s3")
    desk.durable = False
    desk.report(1, changes=1)
    get_on(desk, 1, unreported=1)
    desk.durable = True
    desk.settle()
    get_on(desk, 1)
    assert [change.from_step for change in desk.plan.changes] == [1, 2]


# ---- the end --------------------------------------------------------------------------------------------------------


def test_nobody_hears_that_a_run_is_finished_which_is_just_made_longer() -> None:
    """The last step's row and the plan with more steps are on their way to the disk, one behind the other: everybody
    was sent home. When it ends in truth, all hear it."""
    desk = Desk()
    desk.train()
    for step in range(4):
        desk.report(step)
    order(desk, RunChange("steps", "7"))
    get_on(desk, 4, but="s3")
    desk.durable = False
    desk.report(4)
    get_on(desk, 4)
    desk.durable = True
    desk.settle()
    get_on(desk, 4)
    assert not desk.machine.finished and not any(desk.sent(node, RunFinished) for node in SERVERS)
    for step in (5, 6):
        desk.report(step, changes=1)
    assert desk.machine.finished and all(len(desk.sent(node, RunFinished)) == 1 for node in SERVERS)


def test_nobody_hears_that_a_run_is_finished_which_just_goes_back() -> None:
    """The same with a way back."""
    desk, at = waits_to_go_back()
    desk.durable = False
    desk.report(34)
    desk.answer(at)
    desk.durable = True
    desk.settle()
    assert desk.plan.restore_step == 20 and not any(desk.sent(node, RunFinished) for node in SERVERS)


# ---- who is not wanted ----------------------------------------------------------------------------------------------


def test_who_is_banned_has_no_place_after_a_restart() -> None:
    """It stood empty for `server_gone_s`, and who could have had it was a spare."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(Ban(NodeId("s3"), "liar")))
    banned = tuple(desk.written(Banned))
    stored = StoredState(plan=desk.plan, data=row(), banned=banned, ban_number=1, next_serial=50)
    again = Desk(stored=stored, generation=10**6)
    for node in SERVERS[:3]:
        shows(again, node, stored.plan or desk.plan, version=0)
    again.server("s5")
    assert again.machine.placement.table.slot_of(NodeId("s5")) == PLACES["s3"]


def test_who_is_banned_while_a_layout_is_written_has_no_place_in_it() -> None:
    """The ban freed the place of before, and the table of the new layout still had it."""
    desk = Desk(SAVES)
    desk.train()
    for step in range(8):
        desk.report(step)
    order(desk, make_layout(SAVES, (), ("stages.count=1", "stages.front_servers=3")))
    get_on(desk, 7)
    get_on(desk, 7)
    desk.durable = False
    can_read(desk, 8)
    desk.feed(Ordered(Ban(NodeId("s3"), "liar")))
    desk.durable = True
    desk.settle()
    assert len(desk.plan.stages) == 1
    desk.server("s5", checkpoints=(8,))
    assert desk.machine.placement.table.slot_of(NodeId("s5")) is not None


def test_a_plan_is_taken_over_without_who_is_banned() -> None:
    """The run waited for it to be started again, which it could not be."""
    old = Desk().train()
    newer = msgspec.structs.replace(old, generation=old.generation + 3)
    banned = (Banned(node=NodeId("s3"), reason="liar", number=1),)
    desk = Desk(stored=StoredState(plan=old, data=row(), banned=banned, ban_number=1), generation=10**6)
    for node in SERVERS[:3]:
        shows(desk, node, newer)
    assert not desk.machine.placement.adoption.open
    desk.server("s5")
    assert desk.machine.placement.table.slot_of(NodeId("s5")) == PLACES["s3"]


def test_a_spare_that_was_told_to_go_takes_no_place() -> None:
    """Its going would leave the place empty for `server_gone_s` once more."""
    desk = Desk()
    desk.train()
    for node in ("s4", "s5"):
        desk.server(node)
    desk.feed(Ordered(DrainNode(NodeId("s4"), "new card")))
    desk.say("s4", NodeReport(state="draining", ledger_generation=1, waiting_for="", counters={}))
    desk.feed(Ordered(Ban(NodeId("s3"), "liar")))
    assert desk.machine.placement.table.slot_of(NodeId("s5")) == PLACES["s3"]


def test_a_server_with_another_plan_of_the_same_number_waits_with_a_sentence() -> None:
    """Two coordinators have made it. The run said that it waits for that server, which was linked, and nothing more."""
    desk = Desk()
    plan = desk.train()
    desk.drop("s3")
    shows(desk, "s3", msgspec.structs.replace(plan, in_flight_max=9), version=0)
    (line,) = desk.logged("server waits")
    assert line["node"] == "s3" and "other contents" in line["detail"]
