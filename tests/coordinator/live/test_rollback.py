"""An operator, or the run's guard, sends the run back to a checkpoint: never to one that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.live.orders import ChangeRun, PauseRun, RollBack
from coordinator.live.records import Banned, GoBackRefused, GoBackWish, StepRow, Voiding
from coordinator.live.rollback import SPIKE_STEPS, guarded
from coordinator.process.store import Store
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered
from protocol.messages import PlanChanged
from protocol.run.changes import RunChange
from protocol.run.run import AuditSection, CheckpointSection, GuardSection
from tests.coordinator.live.desk import CONFIG, Desk, join

RUN = msgspec.structs.replace(
    CONFIG, steps=100, checkpoint=CheckpointSection(every_steps=10, keep=2), audit=AuditSection(rate=0.0)
)
NODES = ("s0", "s1", "s2", "s3")


def trained(guard: GuardSection = GuardSection(), steps: int = 34) -> Desk:  # noqa: B008
    """A run with checkpoints 10 to 30, of which the newest two are kept."""
    desk = Desk(msgspec.structs.replace(RUN, guard=guard))
    plan = desk.train()
    for node in NODES:
        told(desk, node, 30, 20, 10)
    for step in range(steps):
        desk.report(step)
    assert desk.plan == plan
    return desk


def told(desk: Desk, node: str, *checkpoints: int) -> None:
    place = {"s0": (0, 0), "s1": (0, 1), "s2": (1, 0), "s3": (1, 1)}[node]
    facts = {"stage": place[0], "shard": place[1], "version": 30, "held_generation": 1}
    desk.say(node, join(addresses=(f"{node}:1",), checkpoints=checkpoints, **facts))


def test_the_run_goes_back_where_the_operator_says() -> None:
    """New ledgers begin from the checkpoint, everybody is told, the history ends there, and it stands in the events."""
    desk = trained()
    desk.feed(Ordered(PauseRun(True)))
    before = desk.plan
    effects = desk.feed(Ordered(RollBack(20)))
    assert desk.plan.restore_step == 20 and desk.plan.ledger_generation > before.ledger_generation and desk.plan.paused
    assert all(desk.sent(node, PlanChanged, effects) for node in NODES)
    assert desk.machine.history.newest_step == 19 and desk.machine.history.lost_steps == 14
    assert desk.logged("run goes back")[-1]["cause"] == "the operator goes back"


def test_changes_of_steps_that_are_thrown_away_go_with_them() -> None:
    """One that was in force before stays; the list that the reference reads is that of the steps that count."""
    desk = trained(steps=0)
    early, late = RunChange("optimizer.learning_rate", "0.01"), RunChange("optimizer.clip_norm", "0.5")
    desk.feed(Ordered(ChangeRun(early)))
    for step in range(25):
        desk.report(step, changes=int(step >= 15))
    desk.feed(Ordered(ChangeRun(late)))
    desk.report(25, changes=2)
    desk.feed(Ordered(RollBack(20)))
    assert desk.plan.changes == (msgspec.structs.replace(early, from_step=15),)
    assert [event["detail"] for event in desk.logged("change undone")] == ["optimizer.clip_norm = 0.5"]


@pytest.mark.parametrize(
    ("step", "sentence"),
    [(25, "no checkpoint has step 25; there are those of steps 20 and 30"), (10, "steps 20 and 30")],
)
def test_a_step_without_a_checkpoint_is_refused_and_nothing_is_lost(step: int, sentence: str) -> None:
    """One that is not kept any more is none, though servers once named it."""
    desk = trained()
    assert sentence in desk.machine.placement.why_no_rollback(step)
    plan = desk.plan
    desk.feed(Ordered(RollBack(step)))
    assert desk.plan == plan and desk.machine.history.newest_step == 33


def test_nobody_goes_back_while_a_server_is_away() -> None:
    """It could not say what it can read."""
    desk = trained()
    desk.drop("s3")
    assert "not while servers are missed: stage 1 back 0" in desk.machine.placement.why_no_rollback(20)


def test_a_checkpoint_that_is_gone_when_all_look_is_not_gone_back_to() -> None:
    """Servers look before anything is thrown away: what one does not find, nobody goes back to."""
    desk = trained()
    desk.answers = False
    plan = desk.plan
    desk.feed(Ordered(RollBack(20)))
    told(desk, "s2", 30)
    desk._answer(0)
    assert desk.plan == plan and desk.machine.placement.rollback is None
    assert "there is one of step 30" in desk.machine.placement.rollback_refusal


def test_a_wish_to_go_back_outlives_the_coordinator(tmp_path: Path) -> None:
    """It is killed while a server still looks for the checkpoint: the liar is banned by then, and what it gave is
    undone as soon as all servers are back; no later start goes back once more."""
    desk = trained()
    desk.answers = False
    voiding = Voiding(nodes=(NodeId("v0"),), reason="it lies", first_step=21, wall_s=1.0)
    desk.feed(Ordered(RollBack(20, voiding)))
    wished = next(number for number, one in enumerate(desk.records) if isinstance(one, GoBackWish))
    banned = next(number for number, one in enumerate(desk.records) if isinstance(one, Banned))
    assert wished < banned, "a crash between the two must not leave a ban without what it is for"
    store = Store(tmp_path, RUN)
    store.write(desk.records[:banned])

    def again(held: int) -> Desk:
        """The next start, all servers linked and looking."""
        store.close()
        store.__init__(tmp_path, RUN)  # type: ignore[misc]
        desk = Desk(RUN, stored=store.load(), generation=store.generation)
        for number, node in enumerate(NODES):
            facts: dict[str, Any] = {"stage": number // 2, "shard": number % 2}
            facts |= {"version": 34, "held_generation": held}
            desk.server(node, checkpoints=(30, 20, 10), **facts)
        store.write(desk.records)
        return desk

    after = again(1)
    assert after.plan.restore_step == 20 and after.machine.admission.ban_reason(NodeId("v0")) == "it lies"
    assert [row.nodes for row in store.voided()] == [(NodeId("v0"),)]
    ledgers = after.plan.ledger_generation
    assert again(ledgers).plan.ledger_generation == ledgers and len(store.voided()) == 1
    store.close()


def test_a_wish_that_came_to_nothing_is_forgotten(tmp_path: Path) -> None:
    """The next start does not try what its operator was told cannot be."""
    desk = trained()
    desk.answers = False
    desk.feed(Ordered(RollBack(20)))
    told(desk, "s2", 30)
    desk._answer(0)
    store = Store(tmp_path, RUN)
    store.write(desk.records)
    assert [type(one) for one in desk.records[-2:]] == [GoBackWish, GoBackRefused] and store.load().wish is None
    store.close()


def row(step: int, loss: float = 4.0, skipped: bool = False) -> StepRow:
    return StepRow(
        ledger_generation=1, step=step, loss=loss, tokens=1, gradient_norm=1.0, clip_factor=1.0, skipped=skipped,
        learning_rate=1e-3, duration_s=1.0, wall_s=float(step),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("guard", "last", "wanted"),
    [
        (GuardSection(), row(50, 400.0), ""),
        (GuardSection(spike=2.0), row(50, 8.1), "pause"),
        (GuardSection(spike=2.0), row(50, 7.9), ""),
        (GuardSection(spike=2.0, on_spike="rollback"), row(50, 9.0), "rollback"),
        (GuardSection(), row(50, skipped=True), ""),
        (GuardSection(not_finite="pause"), row(50, skipped=True), "pause"),
        (GuardSection(not_finite="rollback"), row(50, skipped=True), "rollback"),
    ],
)
def test_the_guard_does_what_the_operator_chose(guard: GuardSection, last: StepRow, wanted: str) -> None:
    """Nothing by default; a loss is a spike against the mean of the steps before it alone."""
    assert guarded(guard, last, [row(step) for step in range(50)])[0] == wanted
    assert wanted == "" or guarded(guard, last, [row(step) for step in range(SPIKE_STEPS - 1)])[0] in ("", wanted)


def test_a_spike_sends_the_run_back_and_leaves_it_paused() -> None:
    """Its operator reads why, also after the coordinator has started again; left alone it would do the same steps."""
    desk = trained(GuardSection(spike=3.0, on_spike="rollback"))
    desk.report(34, loss=50.0)
    assert desk.plan.restore_step == 30 and desk.plan.paused
    status = desk.machine.status(desk.now)["run"]
    assert status["state"] == "paused" and "the loss of step 35, 50.000, is over 3 times" in status["waiting_for"]
    assert "paused: the loss of step 35" in desk.machine.placement.sentence


def test_a_guard_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"guard.spike"):
        msgspec.structs.replace(RUN, guard=GuardSection(spike=0.5)).validate()


def test_checkpoints_of_what_was_undone_are_none() -> None:
    """A lost shard sends the run back to what the steps since the operator's order have made, never to what was there
    before; when the same step is reached again, its checkpoint counts."""
    desk = trained()
    assert not desk.plan.undone
    desk.feed(Ordered(RollBack(20)))
    assert desk.plan.undone and desk.machine.placement.readable_steps() == (20,)
    for node in NODES:  # one that had no time to look at its disk still names it
        told(desk, node, 30, 20, 10)
    assert desk.machine.placement.readable_steps() == (20,)
    for step in range(20, 30):
        desk.report(step)
    assert desk.machine.placement.readable_steps() == (30, 20)
