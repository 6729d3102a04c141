"""Stage 0 opens steps, decides how each ends, and closes it: each word is durable before it is told."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from node.machine.jobs import WriteManifest
from node.machine.records import CheckpointWritten, Record, StepDecided, StepDone, StepSealed
from node.server.decider import DeciderRole
from protocol.base.ids import NodeId
from protocol.base.machine import Log
from protocol.messages import (
    CheckpointDone,
    CheckpointPart,
    Decision,
    Share,
    StageCommitted,
    StageFrozen,
    StepClosed,
    StepOpened,
    StepReport,
)
from protocol.run.batches import Batches
from tests.node.setting import Effects, make_config, make_context, make_plan

LEDGER = NodeId("f1")


class Desk:
    """The decider on f0, for two stages, begun."""

    def __init__(self, records: list[Record] | None = None, restore_step: int = -1, **config: Any) -> None:
        self.context = make_context("f0", make_config(**config), make_plan(restore_step=restore_step))
        self.decider = DeciderRole(self.context, NodeId("c"))
        self.decider.start(records or [], 0.0)
        self.decider.begin(0.0)
        self.begun = self.take()

    def take(self) -> Effects:
        self.decider.check()
        return Effects(self.context.out)

    def freeze(self, step: int, **changes: Any) -> Effects:
        fields = {"square_norm": 0.08, "finite": True, "loss_sum": 32.0, **changes}
        for stage in (0, 1):
            self.decider.on_stage_frozen(LEDGER, StageFrozen(ledger_generation=1, stage=stage, step=step, **fields))
        return self.take()

    def decide(self, step: int) -> StepDecided:
        (record,) = self.freeze(step).records(StepDecided)
        self.decider.decided(record)
        self.take()
        return record

    def commit(self, step: int) -> Effects:
        for stage in (0, 1):
            self.decider.on_stage_committed(StageCommitted(ledger_generation=1, stage=stage, step=step))
        return self.take()

    def close(self, step: int) -> Effects:
        """A whole step."""
        self.decide(step)
        (record,) = self.commit(step).records(StepDone)
        self.decider.done(record, 5.0)
        return self.take()


def decided(step: int, generation: int = 0) -> StepDecided:
    return StepDecided(
        ledger_generation=generation, step=step, clip_factor=1.0, skipped=False, loss=2.0, gradient_norm=1.0,
        data_cursor=Batches.of(make_config()).samples(step),
    )  # fmt: skip


def test_a_step_that_a_checkpoint_kept_is_reported_though_its_end_was_never_durable() -> None:
    """The manifest of checkpoint 2 was durable before StepDone of step 1, and then the power went: nobody else can
    report step 1."""
    desk = Desk([decided(0), StepDone(ledger_generation=0, step=0), decided(1), decided(2)], restore_step=2)
    desk.decider.coordinator_here()
    assert [report.step for report in desk.take().sent(StepReport)] == [0, 1]


def test_ledgers_that_begin_at_the_last_checkpoint_report_the_last_step_at_once() -> None:
    """There is no later checkpoint that its report could wait for; without it the run would never be finished."""
    last = make_config().steps - 1
    desk = Desk([decided(last)], restore_step=last + 1)
    assert desk.decider.counters()["unreported"] == 1
    desk.decider.coordinator_here()
    assert [report.step for report in desk.take().sent(StepReport)] == [last]
    desk.decider.on_stored(last)
    assert desk.decider.counters()["unreported"] == 0


def test_a_step_decided_but_not_closed_is_handed_on_when_other_ledgers_begin() -> None:
    """The same without a restart: the run goes back to a checkpoint that has the step."""
    desk = Desk()
    desk.close(0)
    desk.decide(1)
    assert [report.step for report in desk.decider.unreported()] == [0, 1]


def seal_of(decision: StepDecided) -> StepSealed:
    """What stage 0's ledger, which is on the same disk, writes when the decision is durable."""
    return StepSealed(
        ledger_generation=decision.ledger_generation, step=decision.step, contributions=(),
        clip_factor=decision.clip_factor, skipped=decision.skipped, learning_rate=decision.learning_rate,
        stages=decision.stages, changes=decision.changed,
    )  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"finite": False}])
def test_a_decision_that_the_disk_has_lost_is_read_from_the_seal(changes: dict[str, Any]) -> None:
    """Seeds 104211, 105222 and 106690: such a server gave its state up, and nobody could report the step any more."""
    desk = Desk()
    (lost,) = desk.freeze(0, **changes).records(StepDecided)
    desk.decider.decided(lost)
    (done,) = desk.commit(0).records(StepDone)
    again = Desk([seal_of(lost), done])
    assert again.begun.records(StepDecided) == [lost]
    assert again.decider.closed == 0
    again.decider.decided(lost)
    assert again.take().sent(Decision) == []
    again.decider.coordinator_here()
    (report,) = again.take().sent(StepReport)
    assert (report.step, report.loss, report.gradient_norm) == (0, lost.loss, lost.gradient_norm)
    third = Desk([seal_of(lost), done, lost])
    assert third.begun.records(StepDecided) == []
    assert [message.step for message in third.begun.sent(StepOpened, "f1")] == [1, 2]


def test_a_sealed_step_whose_decision_is_lost_is_not_decided_once_more() -> None:
    """A stage may have committed it: it ends as it was told."""
    lost = Desk().decide(0)
    again = Desk([seal_of(lost)])
    again.decider.sync(LEDGER)
    (told,) = again.take().sent(Decision)
    assert (told.step, told.stages) == (0, lost.stages)
    (done,) = again.commit(0).records(StepDone)
    assert done.step == 0


def test_a_lost_decision_of_earlier_ledgers_is_read_from_the_seal_too() -> None:
    """The checkpoint has the step. Seals of ledgers that this server did not decide in count for nothing: what they
    say may be undone."""
    one, two = Desk().decide(0), Desk().decide(1)
    desk = Desk([decided(0), seal_of(msgspec.structs.replace(two, ledger_generation=0))], restore_step=2)
    desk.decider.coordinator_here()
    assert [(report.step, report.loss) for report in desk.take().sent(StepReport)] == [(0, 2.0), (1, two.loss)]
    other = Desk([seal_of(msgspec.structs.replace(one, ledger_generation=0))], restore_step=2)
    other.decider.coordinator_here()
    assert other.take().sent(StepReport) == []


def test_a_decision_without_any_trace_costs_no_report_of_other_steps() -> None:
    """The run goes back to a checkpoint that may have those as well, and this server tells what it knows of them."""
    desk = Desk()
    records: list[Record] = []
    for step in range(3):
        decision = desk.decide(step)
        (done,) = desk.commit(step).records(StepDone)
        desk.decider.done(done, 1.0)
        records += [done] if step == 1 else [decision, done]
    again = DeciderRole(make_context("f0", make_config(), make_plan()), NodeId("c"))
    assert again.start(records, 0.0) == "step 1 is closed, and this disk does not say how it was decided"
    assert [report.step for report in again.unreported()] == [0, 2]


@pytest.mark.parametrize(("delay", "opened"), [(0, [0]), (1, [0, 1])])
def test_as_many_steps_are_open_as_the_delay_allows(delay: int, opened: list[int]) -> None:
    """Step t opens when step t - 1 - delay is closed everywhere (T-I8)."""
    desk = Desk(delay=delay)
    assert [message.step for message in desk.begun.sent(StepOpened, "f1")] == opened
    assert [message.step for message in desk.close(0).sent(StepOpened, "f1")] == [opened[-1] + 1]


def test_a_decision_is_durable_before_it_is_told() -> None:
    """Every stage must be frozen; then the record; then the word to every ledger."""
    desk = Desk()
    frozen = StageFrozen(ledger_generation=1, stage=0, step=0, square_norm=0.08, finite=True, loss_sum=32.0)
    desk.decider.on_stage_frozen(LEDGER, frozen)
    assert desk.take().all == []
    effects = desk.freeze(0)
    (record,) = effects.records(StepDecided)
    assert effects.sent(Decision) == []
    assert (record.clip_factor, record.loss, record.data_cursor) == (1.0, 4.0, (0, 4))
    desk.decider.decided(record)
    assert desk.take().peers(Decision) == ["f1", "f0"]


def test_gradients_are_clipped_to_the_global_norm() -> None:
    """The factor comes from the norms of all stages together."""
    (record,) = Desk().freeze(0, square_norm=50.0).records(StepDecided)
    assert record.gradient_norm == 10.0
    assert record.clip_factor == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"finite": False},
        {"square_norm": math.inf},
        {"square_norm": 1.7e308},
        {"loss_sum": math.nan},
        {"loss_sum": math.inf},
    ],
)
def test_a_step_that_is_not_finite_is_skipped(changes: dict[str, Any]) -> None:
    """Whatever is not finite, or does not add up to something finite, the step is skipped and nothing breaks."""
    (record,) = Desk().freeze(0, **changes).records(StepDecided)
    assert record.skipped and record.clip_factor == 0.0


def test_losses_that_cancel_to_nothing_do_not_break_the_decider() -> None:
    """One stage reports inf and another -inf: a volunteer can say so, and the run must live."""
    desk = Desk()
    for stage, loss in ((0, math.inf), (1, -math.inf)):
        desk.decider.on_stage_frozen(
            LEDGER,
            StageFrozen(ledger_generation=1, stage=stage, step=0, square_norm=1.0, finite=True, loss_sum=loss),
        )
    assert desk.take().records(StepDecided)[0].skipped


def test_nobody_hears_that_a_step_is_closed_before_that_is_durable() -> None:
    """A ledger forgets a closed step and could not say again that its stage has committed it."""
    desk = Desk()
    desk.decide(0)
    (record,) = desk.commit(0).records(StepDone)
    desk.decider.sync(LEDGER)
    told = desk.take()
    assert [message.step for message in told.sent(StepClosed)] == [-1]
    assert all(message.closed == -1 for message in told.sent(StepOpened))
    desk.decider.done(record, 1.0)
    assert [message.step for message in desk.take().sent(StepClosed, "f1")] == [0]


def test_steps_close_in_order() -> None:
    """A later step that is committed first waits for the earlier one."""
    desk = Desk()
    desk.decide(0)
    desk.decide(1)
    assert desk.commit(1).records(StepDone) == []
    (record,) = desk.commit(0).records(StepDone)
    assert record.step == 0
    desk.decider.done(record, 1.0)
    assert [done.step for done in desk.take().records(StepDone)] == [1]


def test_it_says_which_other_stages_the_oldest_step_waits_for() -> None:
    """First for their gradients, then for their part of the update; of its own stage the ledger speaks."""
    desk = Desk()
    assert desk.decider.waiting_for() == (0, "stage 1 to finish the gradients")
    record = desk.decide(0)
    assert desk.decider.waiting_for() == (0, "stage 1 to save the update")
    desk.decider.on_stage_committed(StageCommitted(ledger_generation=1, stage=1, step=record.step))
    assert desk.decider.waiting_for() is None


def test_a_restart_goes_on_where_the_records_end() -> None:
    """Done steps stay done and are reported again; decided ones keep their decision and are told to who asks."""
    desk = Desk()
    first = desk.decide(0)
    (done,) = desk.commit(0).records(StepDone)
    desk.decider.done(done, 1.0)
    second = desk.decide(1)
    again = Desk([first, done, second])
    assert [message.step for message in again.begun.sent(StepOpened, "f1")] == [2]
    again.decider.sync(LEDGER)
    effects = again.take()
    assert [message.step for message in effects.sent(Decision)] == [1]
    assert [message.step for message in effects.sent(StepClosed)] == [0]
    again.decider.coordinator_here()
    assert [report.step for report in again.take().sent(StepReport)] == [0]


def test_a_disk_that_decided_what_could_not_be_open_has_lost_something() -> None:
    """Step 2 opens when step 0 is closed: a disk that decided the one and does not know of the other's end is not what
    it was. It says so, and opens nothing on its own."""
    desk = Desk()
    first, done = desk.decide(0), *desk.commit(0).records(StepDone)
    desk.decider.done(done, 1.0)
    records: list[Record] = [first, desk.decide(1), desk.decide(2)]
    decider = DeciderRole(make_context("f0"), NodeId("c"))
    assert decider.start(records[:2], 0.0) == ""
    decider = DeciderRole(make_context("f0"), NodeId("c"))
    assert decider.start(records, 0.0) == "step 2 is decided, and this disk does not say that step 0 is closed"


def test_what_is_told_of_a_step_that_a_lost_end_had_opened_is_kept() -> None:
    """All servers start anew, and the disk has lost that step 0 was closed: a stage tells once that it has all of step
    1, which here may not be open yet. When step 0 is closed again, step 1 is decided."""
    first = Desk(delay=0).decide(0)
    desk = Desk([first], delay=0)
    assert desk.freeze(1).records(StepDecided) == [] and desk.decider.counters()["reached"] == 1.0
    (done,) = desk.commit(0).records(StepDone)
    desk.decider.done(done, 1.0)
    assert [record.step for record in desk.take().records(StepDecided)] == [1]


def test_ledgers_from_a_checkpoint_begin_with_its_step() -> None:
    """Checkpoint 2 holds version 2, so step 2 is the next."""
    assert [m.step for m in Desk(restore_step=2).begun.sent(StepOpened, "f1")] == [2, 3]


def test_reports_are_repeated_until_they_are_stored() -> None:
    """Unacknowledged ones go again when the coordinator is back, acknowledged ones do not."""
    desk = Desk()
    desk.decider.coordinator_here()
    assert [report.step for report in desk.close(0).sent(StepReport)] == [0]
    desk.decider.coordinator_gone()
    assert desk.close(1).sent(StepReport) == []
    desk.decider.coordinator_here()
    assert [report.step for report in desk.take().sent(StepReport)] == [0, 1]
    desk.decider.on_stored(0)
    desk.decider.coordinator_here()
    assert [report.step for report in desk.take().sent(StepReport)] == [1]


def test_the_manifest_comes_last_and_the_last_report_after_it() -> None:
    """All four parts, then the manifest, then the report of the last step: whoever hears it may stop everything."""
    desk = Desk(steps=1)
    desk.decider.coordinator_here()
    assert desk.close(0).sent(StepReport) == []
    for stage, shard in ((1, 1), (0, 0), (1, 0)):
        desk.decider.on_checkpoint_part(_part(stage, shard))
    assert desk.take().jobs(WriteManifest) == []
    desk.decider.on_checkpoint_part(_part(0, 1))
    (job,) = desk.take().jobs(WriteManifest)
    assert [part[:2] for part in job.parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    desk.decider.manifest_written(job, "manifest-1")
    (record,) = desk.take().records(CheckpointWritten)
    desk.decider.manifest_durable(record)
    assert [report.step for report in desk.take().sent(StepReport)] == [0]


@pytest.mark.parametrize("folder", ["checkpoints", "/shared"])
def test_the_last_checkpoint_is_announced_with_the_way_to_its_model(folder: str) -> None:
    """The run ends soon after: whoever reads the log then finds where the model is, and how to get it."""
    desk = Desk(steps=2, folder=folder)
    for step in (1, 2):
        manifest = f"/shared/small-1/step-{step:08d}/manifest.json"
        desk.decider.manifest_durable(CheckpointWritten(ledger_generation=1, step=step, manifest=manifest))
    logs = [effect for effect in desk.take().all if isinstance(effect, Log)]
    assert [log.event for log in logs] == ["checkpoint written"] * 2 + ["the last checkpoint is written"]
    command = "barnraise export OUT /shared/small-1`" if folder == "/shared" else "barnraise export OUT STATE...`"
    assert command in str(logs[-1].fields["detail"])


def _part(stage: int, shard: int) -> CheckpointPart:
    return CheckpointPart(
        ledger_generation=1, step=1, stage=stage, shard=shard, file=f"{stage}-{shard}", byte_count=8, digest=b""
    )


def test_a_server_that_becomes_ready_is_told_the_newest_checkpoint() -> None:
    """Its link was down when the checkpoint was done; unless it names it too, no run can go back to it."""
    desk = Desk()
    desk.decider.manifest_durable(CheckpointWritten(ledger_generation=1, step=2, manifest="m2"))
    desk.decider.manifest_durable(CheckpointWritten(ledger_generation=1, step=4, manifest="m4"))
    desk.take()
    desk.decider.sync(NodeId("b1"))
    assert desk.take().sent(CheckpointDone, "b1") == [CheckpointDone(ledger_generation=1, step=4)]


def test_the_report_names_who_computed_the_step_also_after_a_crash() -> None:
    """The stages' shares are added up, durably: a decider that starts again repeats the report with them."""
    desk = Desk()
    desk.decider.coordinator_here()
    desk.decide(0)
    one, two = NodeId("v" * 52), NodeId("w" * 52)
    for stage, shares in enumerate(((Share(one, 2), Share(two, 1)), (Share(two, 3),))):
        committed = StageCommitted(ledger_generation=1, stage=stage, step=0, shares=shares)
        desk.decider.on_stage_committed(committed)
    (done,) = desk.take().records(StepDone)
    desk.decider.done(done, 5.0)
    (report,) = desk.take().sent(StepReport)
    assert report.shares == (Share(two, 4), Share(one, 2)) == done.shares
    again = Desk([decided(0, generation=1), done])
    again.decider.coordinator_here()
    (repeated,) = again.take().sent(StepReport)
    assert repeated.shares == report.shares
    kept = msgspec.structs.replace(done, ledger_generation=0)
    after = Desk([decided(0), kept], restore_step=2)  # the run has gone back behind the step meanwhile
    after.decider.coordinator_here()
    (told,) = after.take().sent(StepReport)
    assert told.shares == report.shares
