"""What the operator changes counts from a step on that stage 0 decides; while the run is paused no step opens."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.numbers import learning_rate
from node.machine.records import StageKeyKnown, StepDecided, StepDone
from node.server.bounds import check_bounds
from protocol.base.errors import RemoteProtocolError
from protocol.messages import Commit, Decision, StepOpened, StepReport
from protocol.run.changes import RunChange, changed
from protocol.run.plan import Plan
from tests.node.server.test_decider import Desk
from tests.node.setting import make_config, make_context, make_plan

RATE = RunChange("optimizer.learning_rate", "0.5")
CLIP = RunChange("optimizer.clip_norm", "0.01")


def tell(desk: Desk, *changes: RunChange, paused: bool = False, held: bool = False) -> Plan:
    """The coordinator's plan with these changes."""
    plan = desk.context.plan
    desk.context.take_plan(
        msgspec.structs.replace(plan, generation=plan.generation + 1, changes=changes, paused=paused, held=held)
    )
    desk.decider.plan_changed(1.0)
    return desk.context.plan


def test_a_change_counts_for_the_first_step_that_is_not_decided() -> None:
    """Its rate travels in the decision, and the report says that it was in force; earlier steps are as in the file."""
    desk = Desk(delay=1)
    config = desk.context.config
    first = desk.decide(0)
    tell(desk, RATE, CLIP)
    second = desk.decide(1)
    new = changed(config, (RATE, CLIP))
    assert (first.learning_rate, first.changes) == (learning_rate(config, 0), 0)
    assert (second.learning_rate, second.changes) == (learning_rate(new, 1), 2)
    assert second.learning_rate != learning_rate(config, 1) and second.clip_factor < first.clip_factor
    for step in (0, 1):
        (record,) = desk.commit(step).records(StepDone)
        desk.decider.done(record, 5.0)
    desk.decider.coordinator_here()
    reports = desk.take().sent(StepReport)
    assert [(report.changes, report.learning_rate) for report in reports] == [
        (0, first.learning_rate),
        (2, second.learning_rate),
    ]


def test_a_step_decided_after_a_later_one_goes_without_what_came_between() -> None:
    """With a delayed update step 1 may be decided first; then the change counts from step 2 on, in every record."""
    desk = Desk(delay=1)
    desk.decide(1)
    tell(desk, RATE)
    assert desk.decide(0).changes == 0
    for step in (0, 1):
        (record,) = desk.commit(step).records(StepDone)
        desk.decider.done(record, 5.0)
    desk.take()
    assert desk.decide(2).changes == 1


def test_going_back_repeats_a_change_at_its_own_step() -> None:
    """The list with its steps gives every step what it had before."""
    desk = Desk(delay=0)
    tell(desk, msgspec.structs.replace(RATE, from_step=1))
    rates = []
    for step in (0, 1):
        rates.append(desk.decide(step).learning_rate)
        (record,) = desk.commit(step).records(StepDone)
        desk.decider.done(record, 5.0)
        desk.take()
    config = desk.context.written
    assert rates == [learning_rate(config, 0), learning_rate(changed(config, (RATE,)), 1)]


def test_a_restart_says_the_same_of_a_decided_step() -> None:
    """What was decided is in the record: another rate in the plan changes nothing of it."""
    desk = Desk()
    record = desk.decide(0)
    again = Desk([record])
    tell(again, RATE)
    (decision,) = [message for message in _sync(again) if message.step == 0]
    assert decision.learning_rate == record.learning_rate


def _sync(desk: Desk) -> list[Decision]:
    desk.decider.sync(desk.context.plan.ledger_of(1))
    return desk.take().sent(Decision, desk.context.plan.ledger_of(1))


def test_a_paused_run_ends_open_steps_and_opens_none() -> None:
    """After going on it opens as many as always; a pause that is told twice is one."""
    desk = Desk(delay=0)
    tell(desk, paused=True)
    assert desk.close(0).sent(StepOpened) == []
    tell(desk, paused=True)
    assert desk.take().sent(StepOpened) == []
    tell(desk)
    assert [message.step for message in desk.take().sent(StepOpened, "f1")] == [1]


def test_a_held_run_opens_the_step_that_all_servers_know_of_and_no_other() -> None:
    """The steps that a run is to have are not what a decider heard first: until then it ends what is open."""
    desk = Desk(delay=0)
    shorter = RunChange("steps", "2")
    tell(desk, shorter, held=True)
    assert desk.context.config.steps == desk.context.written.steps != 2
    assert desk.close(0).sent(StepOpened) == []
    assert desk.decider.counters()["opened"] == 0
    begun = msgspec.structs.replace(shorter, from_step=1)
    tell(desk, begun, held=True)
    assert desk.take().sent(StepOpened) == [] and desk.context.config.steps == 2
    tell(desk, begun)
    assert [message.step for message in desk.take().sent(StepOpened, "f1")] == [1]
    assert desk.close(1).sent(StepOpened) == [], "the run has no third step"


def test_a_run_that_starts_paused_waits() -> None:
    """The kept plan says so after a restart."""
    context = make_context("f0", make_config(), msgspec.structs.replace(make_plan(), paused=True))
    desk = Desk()
    again = Desk.__new__(Desk)
    again.context = context
    again.decider = type(desk.decider)(context, desk.context.plan.decider)
    again.decider.start([], 0.0)
    again.decider.begin(0.0)
    assert again.take().sent(StepOpened) == []


@pytest.mark.parametrize("rate", [-0.5, 101.0, float("nan"), float("inf")])
def test_a_rate_that_no_run_can_have_is_refused(rate: float) -> None:
    """By ledgers and by shards, before it reaches the weights."""
    context = make_context("f0", make_config(), make_plan())
    for message in (
        Decision(ledger_generation=1, step=0, clip_factor=1.0, skipped=False, learning_rate=rate),
        Commit(ledger_generation=1, step=0, contributions=(), clip_factor=1.0, skipped=False, learning_rate=rate),
    ):
        with pytest.raises(RemoteProtocolError, match="learning rate"):
            check_bounds(context, message)


def test_each_step_is_decided_with_the_microbatches_that_it_has() -> None:
    """Its loss is the mean of its own tokens, its samples follow on those of the step before, and its gradient's norm
    is that of the mean: sums are in the unit of the file."""
    desk = Desk(delay=0)
    tell(desk, RunChange("batch.microbatches", "1", 1), RunChange("batch.microbatches", "4", 2))
    records = []
    for step in range(3):
        records.append(desk.decide(step))
        (record,) = desk.commit(step).records(StepDone)
        desk.decider.done(record, 5.0)
        desk.take()
    assert [record.data_cursor for record in records] == [(0, 4), (4, 6), (6, 14)]
    assert [record.loss for record in records] == [4.0, 8.0, 2.0]
    norm = records[0].gradient_norm
    assert [record.gradient_norm for record in records] == pytest.approx([norm, 2 * norm, norm / 2])
    desk.decider.coordinator_here()
    assert [report.tokens for report in desk.take().sent(StepReport)] == [16, 8, 32]


def test_the_mean_is_what_is_clipped() -> None:
    """Where a step has a quarter of the file's microbatches, its sum is a quarter of what the gradient is."""
    desk = Desk(delay=0)
    clip, fewer = RunChange("optimizer.clip_norm", "0.4", 0), RunChange("batch.microbatches", "1", 1)
    tell(desk, clip, fewer)
    assert desk.close(0) and desk.decide(1).clip_factor == pytest.approx(0.4 / (2 * 0.4), rel=1e-4)


def test_a_decider_that_starts_anew_says_how_far_its_life_before_may_have_been() -> None:
    """Others may have these steps open; it opens none while it is held."""
    first = Desk(delay=1)
    assert first.decider.counters()["reached"] == 1.0
    first.close(0)
    again = Desk.__new__(Desk)
    plan = msgspec.structs.replace(make_plan(), held=True)
    again.context = make_context("f0", make_config(delay=1), plan)
    again.decider = type(first.decider)(again.context, plan.decider)
    again.decider.start([StageKeyKnown(ledger_generation=1, step=0, key=b"k")], 0.0)
    again.decider.begin(0.0)
    assert again.take().sent(StepOpened) == []
    assert (again.decider.counters()["opened"], again.decider.counters()["reached"]) == (-1.0, 1.0)


def test_what_stages_have_done_of_a_step_is_heard_before_a_held_decider_opens_it_again() -> None:
    """They say it once: when it goes on it decides at once, and does not wait for it for ever."""
    desk = Desk(delay=0)
    tell(desk, paused=True)
    desk.close(0)
    effects = desk.freeze(1)
    assert effects.records(StepDecided) == [] and effects.sent(StepOpened) == []
    tell(desk)
    effects = desk.take()
    assert [message.step for message in effects.sent(StepOpened, "f1")] == [1]
    assert [record.step for record in effects.records(StepDecided)] == [1]
