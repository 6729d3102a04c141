"""Contributions count whole or not at all, once, and in the order in which they became durable."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.records import ContributionAccepted, StepSealed
from node.server.ledger import LedgerRole
from protocol.base.ids import NodeId, TaskId
from protocol.base.machine import Count
from protocol.messages import (
    Commit,
    Committed,
    Decision,
    Freeze,
    PartialNorm,
    Share,
    StageCommitted,
    StageFrozen,
    StepOpened,
    Verdict,
)
from protocol.run.run import RunConfig, ValidationSection
from tests.node.setting import Effects, backward, contribution, make_config, make_context, stored

B0 = NodeId("b0")
LOSS = (backward(0, 0, 1), TaskId(0, 0, 2, "L"))
"""A route's end on the last stage."""


class Desk:
    """A ledger of stage 0 (servers f0 and b0, tasks 0:B0@0 and 0:B1@0), with steps 0 and 1 open."""

    def __init__(self, node: str = "f0", opened: tuple[int, ...] = (0, 1), config: RunConfig | None = None) -> None:
        self.context = make_context(node, config)
        self.ledger = LedgerRole(self.context)
        for step in opened:
            self.ledger.on_step_opened(StepOpened(ledger_generation=1, step=step, closed=-1))
        Effects(self.context.out)

    def take(self) -> Effects:
        self.ledger.check()
        return Effects(self.context.out)

    def store(self, number: int, tasks: tuple[TaskId, ...], step: int = 0, shards: tuple[int, ...] = (0, 1)) -> Effects:
        """Shards say that they have a contribution; what that orders."""
        for shard in shards:
            self.ledger.on_stored(stored(number, step, tasks, shard))
        return self.take()

    def accept(self, number: int, tasks: tuple[TaskId, ...], step: int = 0) -> Effects:
        """The same, and its acceptance becomes durable."""
        (record,) = self.store(number, tasks, step).records(ContributionAccepted)
        self.ledger.accepted(record)
        return self.take()

    def freeze(self) -> None:
        """All of step 0 is covered and summed up."""
        self.accept(1, (backward(0, 0), backward(0, 1)))
        for shard in (0, 1):
            norm = PartialNorm(ledger_generation=1, step=0, shard=shard, square_norm=4.0, finite=True)
            self.ledger.on_partial_norm(norm)


def test_one_shard_is_not_enough() -> None:
    """Nothing is written before every shard has its part."""
    desk = Desk()
    assert desk.store(1, (backward(0, 0),), shards=(1,)).all == []
    assert len(desk.store(1, (backward(0, 0),), shards=(0,)).records(ContributionAccepted)) == 1


def test_nothing_is_told_before_it_is_durable() -> None:
    """The verdict goes out when the record is on the disk, to the sender and to every server of the stage."""
    desk = Desk()
    effects = desk.store(1, (backward(0, 0),))
    assert effects.sent(Verdict) == []
    desk.ledger.accepted(effects.records(ContributionAccepted)[0])
    told = desk.take()
    assert told.peers(Verdict) == ["v1", "b0", "f0"]
    assert all(verdict.accepted for verdict in told.sent(Verdict))


def test_a_task_counts_once() -> None:
    """A contribution that overlaps an accepted one is refused whole, also while that one is being written."""
    desk = Desk()
    desk.store(1, (backward(0, 0),))
    (refused, *_) = desk.store(2, (backward(0, 0), backward(0, 1))).sent(Verdict)
    assert not refused.accepted and "covered already" in refused.reason
    assert len(desk.store(3, (backward(0, 1),)).records(ContributionAccepted)) == 1


@pytest.mark.parametrize(
    ("tasks", "version", "reason"),
    [
        ((backward(0, 0),), 3, "another version"),
        ((backward(0, 0), backward(0, 0)), 0, "twice"),
        ((backward(0, 0, 1),), 0, "not of this stage"),
    ],
)
def test_what_cannot_count_is_refused(tasks: tuple[TaskId, ...], version: int, reason: str) -> None:
    """Another version, a task twice, a foreign task: refused with the reason."""
    desk = Desk()
    for shard in (0, 1):
        desk.ledger.on_stored(stored(1, 0, tasks, shard, version))
    (verdict, *_) = desk.take().sent(Verdict)
    assert not verdict.accepted and reason in verdict.reason


def test_what_became_of_a_contribution_is_counted_by_its_kind() -> None:
    """One that counts, one that comes late, one that is beyond all that is usual, one of a banned member, and one that
    an audit has shown to be false."""
    desk = Desk()
    first, overlap = desk.accept(1, (backward(0, 0),)), desk.store(2, (backward(0, 0),))
    infinite = stored(3, 0, (backward(0, 1),), 0, square_norm=float("inf"))
    for shard in (0, 1):
        desk.ledger.on_stored(msgspec.structs.replace(infinite, shard=shard))
    doubted = desk.take()
    desk.ledger._void(stored(4, 0, (backward(0, 1),), 0), "an audit finds another gradient", (NodeId("v1"),))
    false = desk.take()
    desk.ledger.ban({NodeId("v1")})
    found = [first, overlap, doubted, false, desk.store(5, (backward(0, 1),))]
    counted = [effect for effects in found for effect in effects.all if isinstance(effect, Count)]
    outcomes = [dict(count.labels)["outcome"] for count in counted if count.metric == "barnraise_server_updates_total"]
    assert outcomes == ["applied", "duplicate", "doubted", "false", "banned"]


def test_shards_agree_on_a_loss_that_is_not_a_number() -> None:
    """One NaN is as good as another: what two nodes say of a run that diverges counts, and its step is skipped."""
    desk = Desk("f1")
    for number, node in ((1, NodeId("v1")), (2, NodeId("v2"))):
        for shard in (0, 1):
            brought = contribution(number, node)
            desk.ledger.on_stored(stored(number, 0, LOSS, shard, contribution=brought, losses=(float("nan"),)))
        effects = desk.take()
        if number == 1:
            assert effects.sent(Verdict)[0].doubted
    assert len(effects.records(ContributionAccepted)) == 1


def test_losses_must_fit_the_tasks() -> None:
    """A route's end brings one loss for each L among its tasks."""
    desk = Desk("f1")
    for shard in (0, 1):
        desk.ledger.on_stored(stored(1, 0, LOSS, shard, losses=()))
    assert desk.take().sent(Verdict)[0].reason == "losses and tasks disagree"


def test_shards_that_name_different_tasks_make_a_refusal() -> None:
    """A sender that tells each shard something else gets nothing."""
    desk = Desk()
    desk.ledger.on_stored(stored(1, 0, (backward(0, 0),), 0))
    desk.ledger.on_stored(stored(1, 0, (backward(0, 1),), 1))
    assert desk.take().sent(Verdict)[0].reason == "its shards name different tasks"


def test_a_contribution_to_a_step_that_is_not_open_waits() -> None:
    """Anybody can name a step that is to come; only the decider's word opens it, and nobody is told before."""
    desk = Desk(opened=(0,))
    assert desk.store(1, (backward(1, 0),), step=1).records(ContributionAccepted) == []
    desk.ledger.sync(desk.context.plan.stages[0].servers[1].node)
    assert [message.step for message in desk.take().sent(StepOpened)] == [0]
    desk.ledger.on_stored(stored(1, 1, (backward(1, 0),), 1))  # it has heard that the ledger is there
    desk.ledger.on_step_opened(StepOpened(ledger_generation=1, step=1, closed=-1))
    assert len(desk.take().records(ContributionAccepted)) == 1


def test_what_a_shard_had_before_it_started_anew_counts_when_it_says_so_again() -> None:
    """Its disk may have lost it: what counted then would send the run back, where the sender still has it."""
    desk = Desk()
    assert desk.store(1, (backward(0, 0),), shards=(1,)).records(ContributionAccepted) == []
    desk.ledger.sync(B0)
    assert desk.store(1, (backward(0, 0),), shards=(0,)).records(ContributionAccepted) == []
    assert len(desk.store(1, (backward(0, 0),), shards=(1,)).records(ContributionAccepted)) == 1


def test_a_step_is_over_when_who_started_anew_has_said_again_that_it_has_committed_it() -> None:
    """A fellow's word beside one from before would close a step that is just being made again."""
    desk = Desk()
    desk.freeze()
    desk.ledger.on_decision(Decision(ledger_generation=1, step=0, clip_factor=0.5, skipped=False))
    (seal,) = desk.take().records(StepSealed)
    desk.ledger.sealed(seal)
    desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=1, digest=b""))
    desk.take()
    desk.ledger.sync(B0)
    assert len(desk.take().sent(Commit, B0)) == 1
    desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=0, digest=b""))
    assert desk.take().sent(StageCommitted) == []
    desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=1, digest=b""))
    assert len(desk.take().sent(StageCommitted)) == 1


def test_who_comes_late_hears_of_a_step_that_only_validates() -> None:
    """Nothing else opens it at a server of stage 0, and the run ends when it is over."""
    config = msgspec.structs.replace(make_config(), validation=ValidationSection(every_steps=2))
    desk = Desk(opened=(), config=config)
    (final,) = config.final_steps
    desk.context.closed, desk.context.opened = config.steps - 1, final
    desk.ledger.on_step_opened(StepOpened(ledger_generation=1, step=final, closed=config.steps - 1))
    desk.take()
    desk.ledger.sync(B0)
    assert [message.step for message in desk.take().sent(StepOpened, B0)] == [final]
    desk.context.closed = final
    desk.ledger.sync(B0)
    assert desk.take().sent(StepOpened) == []


def test_another_ledger_that_starts_anew_hears_what_the_stage_came_to() -> None:
    """It holds the decider to that, also when the step is decided here already."""
    desk = Desk()
    desk.freeze()
    desk.ledger.on_decision(Decision(ledger_generation=1, step=0, clip_factor=0.5, skipped=False))
    desk.take()
    desk.ledger.sync(NodeId("f1"))
    assert [message.stage for message in desk.take().sent(StageFrozen, NodeId("f1"))] == [0]


def test_a_word_that_comes_again_gets_the_same_verdict() -> None:
    """A shard that repeats itself hears the verdict again and nothing is written."""
    desk = Desk()
    desk.accept(1, (backward(0, 0),))
    again = desk.store(1, (backward(0, 0),), shards=(1,))
    assert again.records(ContributionAccepted) == [] and again.sent(Verdict)[0].accepted


def test_it_freezes_when_all_is_covered_and_durable() -> None:
    """The freeze names the contributions in the order of their records."""
    desk = Desk()
    first = desk.store(2, (backward(0, 1),)).records(ContributionAccepted)[0]
    second = desk.store(1, (backward(0, 0),)).records(ContributionAccepted)[0]
    desk.ledger.accepted(first)
    assert desk.take().sent(Freeze) == []
    desk.ledger.accepted(second)
    freezes = desk.take().sent(Freeze)
    assert [freeze.contributions for freeze in freezes] == [(contribution(2), contribution(1))] * 2


def test_the_seal_is_durable_before_the_commit_is_told() -> None:
    """Norms go to the decider; its decision is written once; the commit follows the record."""
    desk = Desk()
    desk.freeze()
    effects = desk.take()
    assert sorted(effects.peers(StageFrozen)) == ["f0", "f1"], "the decider, and who will hold it to this"
    frozen = effects.sent(StageFrozen)[0]
    assert (frozen.square_norm, frozen.finite) == (8.0, True)
    decision = Decision(ledger_generation=1, step=0, clip_factor=0.5, skipped=False)
    desk.ledger.on_decision(decision)
    desk.ledger.on_decision(decision)
    effects = desk.take()
    (seal,) = effects.records(StepSealed)
    assert effects.sent(Commit) == []
    desk.ledger.sealed(seal)
    commits = desk.take().sent(Commit)
    assert [commit.clip_factor for commit in commits] == [0.5, 0.5]


def test_the_stage_has_committed_when_every_shard_has() -> None:
    """Two words of one shard are not two shards."""
    desk = Desk()
    desk.freeze()
    for shard in (0, 0):
        desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=shard, digest=b""))
    assert desk.take().sent(StageCommitted) == []
    desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=1, digest=b""))
    assert len(desk.take().sent(StageCommitted)) == 1


def test_it_says_whom_the_oldest_step_waits_for() -> None:
    """Weight gradients, then servers of the stage by name; the decider on the same server says the rest itself."""
    desk = Desk(opened=(0,))
    assert desk.ledger.waiting_for() == (0, "2 weight gradients")
    desk.accept(1, (backward(0, 0),))
    assert desk.ledger.waiting_for() == (0, "1 weight gradient")
    desk.accept(2, (backward(0, 1),))
    assert desk.ledger.waiting_for() == (0, "back 0 to sum up gradients")
    for shard, waits in ((1, (0, "its own sum of gradients")), (0, None)):
        norm = PartialNorm(ledger_generation=1, step=0, shard=shard, square_norm=4.0, finite=True)
        desk.ledger.on_partial_norm(norm)
        assert desk.ledger.waiting_for() == waits
    desk.ledger.on_decision(Decision(ledger_generation=1, step=0, clip_factor=0.5, skipped=False))
    (seal,) = desk.take().records(StepSealed)
    desk.ledger.sealed(seal)
    for shard, waits in ((0, (0, "back 0 to save the update")), (1, None)):
        assert desk.ledger.waiting_for() == (0, "back 0 to save the update")
        desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=shard, digest=b""))
        assert desk.ledger.waiting_for() == waits


def test_a_stage_that_has_saved_a_step_waits_for_the_others() -> None:
    """Not for no server of its own."""
    desk = Desk("f1", opened=())
    desk.ledger.start(
        [
            ContributionAccepted(
                ledger_generation=1,
                step=0,
                contribution=contribution(1),
                tasks=(*LOSS, backward(0, 1, 1), TaskId(0, 1, 2, "L")),
                losses=(1.0, 1.0),
            ),
            StepSealed(ledger_generation=1, step=0, contributions=(contribution(1),), clip_factor=0.5, skipped=False),
        ]
    )
    for shard in (0, 1):
        desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=shard, digest=b""))
    assert desk.ledger.waiting_for() == (0, "the other stages to save the update")


def test_a_restart_reads_coverage_and_seals_back() -> None:
    """A new process with the same records refuses what is covered and repeats what a shard still lacks."""
    desk = Desk()
    records = []
    for number in (0, 1):
        records += desk.store(number, (backward(0, number),)).records(ContributionAccepted)
        desk.ledger.accepted(records[-1])
    seal = StepSealed(
        ledger_generation=1,
        step=0,
        contributions=(contribution(0), contribution(1)),
        clip_factor=1.0,
        skipped=True,
    )
    again = Desk(opened=())
    again.ledger.start([*records, seal])
    again.ledger.sync(again.context.node)
    assert [commit.skipped for commit in again.take().sent(Commit)] == [True]
    assert not again.store(5, (backward(0, 0),)).sent(Verdict)[0].accepted


def test_what_is_closed_is_forgotten() -> None:
    """Words about a closed step, or one too far ahead, change nothing."""
    desk = Desk()
    desk.context.closed = 0
    desk.ledger.close_step(0)
    assert desk.store(1, (backward(0, 0),)).all == []
    assert desk.store(1, (backward(3, 0),), step=90).all == []


def test_a_committed_stage_names_who_computed_it() -> None:
    """By the contributions that were accepted, however many a node brought; what was refused counts for nobody."""
    desk = Desk()
    desk.store(7, (backward(0, 0), backward(0, 0)))
    desk.freeze()
    desk.ledger.desk._right[contribution(1).node] = 3
    desk.ledger.on_decision(Decision(ledger_generation=1, step=0, clip_factor=1.0, skipped=False))
    (seal,) = desk.take().records(StepSealed)
    desk.ledger.sealed(seal)
    for shard in (0, 1):
        desk.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=shard, digest=b"d" * 32))
    (told,) = desk.take().sent(StageCommitted)
    assert told.shares == (Share(contribution(1).node, 2, 3),)


def test_an_audit_holds_up_no_sum_that_waits_for_its_verdict() -> None:
    """v1 has brought one of two tasks, which is held; the other one lies in its next sum, which it sends when it has
    heard of the first. While the stage has something to give, that may take as long as it likes; from then on a tenth
    of the step's time, and not until clocks of weight gradients take the other one back (at 20 Mbit/s: ten minutes)."""
    desk = Desk()
    audits = desk.ledger.desk
    audits.auditor_here(NodeId("b0"))
    audits.clock(1.0)
    assert desk.store(1, (backward(0, 0),)).records(ContributionAccepted) == []
    answer_by = audits.wake_at()
    assert answer_by is not None and answer_by > 10.0, "only the opinion itself has a time so far"
    audits.wake(4.0)
    audits.tail(0)
    assert audits.wake_at() == pytest.approx(4.4)
    audits.wake(4.3)
    assert desk.take().records(ContributionAccepted) == []
    audits.wake(4.5)
    (record,) = desk.take().records(ContributionAccepted)
    desk.ledger.accepted(record)
    assert all(verdict.accepted for verdict in desk.take().sent(Verdict))


def test_what_no_audit_can_be_over_with_in_time_is_not_held() -> None:
    """Servers that compute a hundred times slower than members cannot audit them all. What waits for its turn counted a
    tenth of a step later, and that was all that came of the wait: at 1.1 B parameters 20 s of every step of 105."""
    desk = Desk()
    audits = desk.ledger.desk
    audits.auditor_here(NodeId("b0"))
    audits._step_s = 10.0
    audits.audits._task_s = 300.0
    audits.clock(1.0)
    assert desk.store(1, (backward(0, 0),)).records(ContributionAccepted) == []
    assert audits.wake_at() == 1.0
    audits.wake(1.0)
    (record,) = desk.take().records(ContributionAccepted)
    assert record.contribution == contribution(1) and audits.audits.has(contribution(1)), "and its audit goes on"


def test_what_an_unknown_member_brings_is_held_if_its_audit_may_still_be_in_time() -> None:
    """Within one more step than what others bring is held: it may all be false, and steps sometimes take longer."""
    desk = Desk()
    audits = desk.ledger.desk
    audits.auditor_here(NodeId("b0"))
    audits._step_s, audits.audits._task_s = 10.0, 15.0
    audits.clock(1.0)
    assert desk.store(1, (backward(0, 0),)).records(ContributionAccepted) == []
    audits.wake(1.0)
    assert desk.take().records(ContributionAccepted) == [] and audits.is_held(0, contribution(1))
    audits.audits._of(contribution(1).node).passed = 1
    audits.wake(1.0)
    (record,) = desk.take().records(ContributionAccepted)
    assert record.contribution == contribution(1)
