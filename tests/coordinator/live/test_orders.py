"""What an operator changes in a run: durable in the plan, told to everybody, with the step that it counts from."""

from __future__ import annotations

import msgspec

from coordinator.live.orders import ChangeRun, PauseRun
from coordinator.live.records import DataRow, PlanRow, StepRow, StoredState
from coordinator.live.status import run_state
from protocol.base.machine import Ordered
from protocol.messages import PlanChanged
from protocol.run.changes import RunChange, changes_hash
from tests.coordinator.live.desk import Desk

RATE = RunChange("optimizer.learning_rate", "0.5")
CLIP = RunChange("optimizer.clip_norm", "2.0")


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
