"""What an operator changes in a run: durable in the plan, told to everybody, with the step that it counts from."""

from __future__ import annotations

import msgspec

from coordinator.live.draining import why_no_drain
from coordinator.live.orders import ChangeRun, DrainNode, PauseRun
from coordinator.live.records import DataRow, PlanRow, StepRow, StoredState
from coordinator.live.status import run_state
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.messages import DrainOrder, NodeReport, PlanChanged
from protocol.run.changes import RunChange, changes_hash
from tests.coordinator.live.desk import Desk

RATE = RunChange("optimizer.learning_rate", "0.5")
CLIP = RunChange("optimizer.clip_norm", "2.0")
STEPS = RunChange("steps", "700")


def test_a_change_is_a_plan_with_the_same_ledgers() -> None:
    """Durable first, then told to all; nothing is thrown away."""
    desk = Desk()
    before = desk.train()
    desk.durable = False
    assert desk.sent("s0", PlanChanged, desk.feed(Ordered(ChangeRun(RATE)))) == []
    effects = desk.settle()
    for node in ("s0", "s1", "s2", "s3"):
        (told,) = desk.sent(node, PlanChanged, effects)
        assert told.plan.changes == (RATE,) and told.plan.ledger_generation == before.ledger_generation
    assert desk.plan.generation > before.generation and desk.plan.stages == before.stages


def test_the_reports_tell_from_which_step_a_change_counts() -> None:
    """The first step that had it; the next plan carries it, and status shows it with a hash of file and list."""
    desk = Desk()
    desk.train()
    desk.report(0)
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.report(1)
    desk.report(2, changes=1)
    desk.feed(Ordered(ChangeRun(CLIP)))
    known = msgspec.structs.replace(RATE, from_step=2)
    assert desk.plan.changes == (known, CLIP)
    shown = desk.machine.status(desk.now)["run"]
    assert [(one["key"], one["from_step"]) for one in shown["changes"]] == [(RATE.key, 2), (CLIP.key, -1)]
    assert shown["trains"] == changes_hash(desk.machine.config, (known, CLIP))


def test_an_order_that_the_last_step_has_overtaken_is_named_when_the_run_ends() -> None:
    """Nobody waits for what cannot begin any more: the log says which change came to nothing."""
    desk = Desk()
    desk.train()
    for step in range(4):
        desk.report(step)
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.report(4)
    late = [(line["detail"], line["step"]) for line in desk.logged("change too late")]
    assert late == [("optimizer.learning_rate = 0.5", 4)]


def test_orders_that_come_while_a_plan_is_written_are_not_lost() -> None:
    """The next plan has both."""
    desk = Desk()
    desk.train()
    desk.durable = False
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.feed(Ordered(ChangeRun(CLIP)))
    desk.feed(Ordered(PauseRun(True)))
    desk.settle()
    assert desk.plan.changes == (RATE, CLIP) and desk.plan.paused


def test_a_coordinator_that_comes_back_has_what_was_ordered() -> None:
    """Changes, their steps from the stored reports, and the pause."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.report(0, changes=1)
    desk.feed(Ordered(PauseRun(True)))
    row = desk.written(PlanRow)[-1]
    stored = StoredState(
        plan=msgspec.structs.replace(row.plan, changes=(RATE,)),
        data=DataRow(vocabulary=259, data_hash="d" * 64, token_count=1000),
        steps=tuple(desk.written(StepRow)),
        changed_at=((1, 0),),
        next_serial=100,
    )
    again = Desk(stored=stored, generation=row.plan.generation + 1)
    assert again.plan.paused and again.plan.changes == (msgspec.structs.replace(RATE, from_step=0),)


def test_a_paused_run_says_so() -> None:
    """Not that it waits for somebody; and it goes on when it is told to, once."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(PauseRun(True)))
    state, sentence = run_state(desk.machine, desk.now)
    assert state == "paused" and "run resume" in sentence
    plans = len(desk.written(PlanRow))
    desk.feed(Ordered(PauseRun(True)))
    assert len(desk.written(PlanRow)) == plans
    desk.feed(Ordered(PauseRun(False)))
    assert run_state(desk.machine, desk.now)[0] == "training" and not desk.plan.paused


def test_going_back_keeps_what_was_changed() -> None:
    """The new ledgers begin with the list, each change at the step that it had."""
    desk = Desk()
    plan = desk.train()
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.report(0, changes=1)
    for node in ("s0", "s1", "s2", "s3"):
        desk.drop(node)
    for node in ("s0", "s1", "s2", "s3"):
        desk.server(node)
    assert desk.plan.ledger_generation > plan.ledger_generation
    assert desk.plan.changes == (msgspec.structs.replace(RATE, from_step=0),)


def test_a_report_of_changes_that_nobody_ordered_ends_the_link() -> None:
    """The decider knows the list from the plan alone."""
    desk = Desk()
    desk.train()
    effects = desk.report(0, changes=1)
    assert desk.hung_up(effects) == [("s0", "unexpected")]


def _told(desk: Desk, step: int, opened: int, but: tuple[str, ...] = ()) -> None:
    """Every server of the plan says that it goes by it, and where it stands."""
    for number, node in enumerate(("s0", "s1", "s2", "s3")):
        if node not in but:
            counters = {"step": float(step), "generation": float(desk.plan.generation)}
            desk.say(
                node,
                NodeReport(
                    state="training", waiting_for="", ledger_generation=desk.plan.ledger_generation,
                    counters=counters | ({"opened": float(opened)} if number == 0 else {}),
                ),
            )  # fmt: skip


def test_what_all_servers_must_know_waits_for_the_end_of_a_step() -> None:
    """The run is held from the order on; the step is the first that is not open when all are closed everywhere; and
    no server opens it before all have said that they know."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(ChangeRun(RATE)))
    desk.feed(Ordered(ChangeRun(STEPS)))
    assert desk.plan.held and desk.plan.changes == (RATE, STEPS)
    assert (
        run_state(desk.machine, desk.now)[1] == "waiting at the end of a step for all servers to have what was changed"
    )
    _told(desk, 4, 5)
    assert desk.plan.changes[1].from_step == -1, "step 5 is open"
    desk.now += 1
    _told(desk, 5, 5, but=("s3",))
    assert desk.plan.changes[1].from_step == -1, "a server has not said"
    _told(desk, 5, 5)
    assert [change.from_step for change in desk.plan.changes] == [6, 6] and desk.plan.held
    assert desk.machine.placement.running.steps == 700 and desk.machine.status(desk.now)["run"]["target_steps"] == 700
    _told(desk, 5, 5, but=("s3",))
    assert desk.plan.held
    _told(desk, 5, 5)
    assert not desk.plan.held and desk.plan.changes[1].from_step == 6
    assert desk.machine.config.steps != 700, "the file, which everybody compares by its hash, is as it was"


def test_a_coordinator_that_comes_back_goes_on_with_a_held_run() -> None:
    """The plan says how far it was."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(ChangeRun(STEPS)))
    row = desk.written(PlanRow)[-1]
    stored = StoredState(
        plan=row.plan, data=DataRow(vocabulary=259, data_hash="d" * 64, token_count=1000), next_serial=100
    )
    again = Desk(stored=stored, generation=row.plan.generation + 1)
    for node in ("s0", "s1", "s2", "s3"):
        again.server(node)
    assert again.plan.held
    _told(again, 7, 7)
    _told(again, 7, 7)
    assert not again.plan.held and again.plan.changes == (msgspec.structs.replace(STEPS, from_step=8),)


def test_a_run_that_has_done_its_new_last_step_goes_on_as_it_was() -> None:
    """The order came while that step was under way."""
    desk = Desk()
    desk.train()
    desk.feed(Ordered(ChangeRun(msgspec.structs.replace(STEPS, value="6"))))
    _told(desk, 5, 5)
    _told(desk, 5, 5)
    assert desk.plan.changes == () and not desk.plan.held


def test_a_volunteer_and_a_spare_are_let_go_and_a_server_with_a_place_is_not() -> None:
    """Nobody loses what nobody else has."""
    desk = Desk()
    desk.train()
    desk.server("s4")
    desk.volunteer("v0")
    for node, goes in (("v0", True), ("s4", True), ("s0", False), ("v9", False)):
        effects = desk.feed(Ordered(DrainNode(NodeId(node), "new card")))
        assert [told.reason for told in desk.sent(node, DrainOrder, effects)] == ["new card"] * goes, node
    table = desk.machine.placement.table
    assert why_no_drain(desk.machine.roster, table, NodeId("s0")).startswith("it is stage 0 front 0, whose state")
    assert why_no_drain(desk.machine.roster, table, NodeId("v9")) == "it is not here"
