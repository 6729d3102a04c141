"""A ledger whose disk has lost the seal of a step seals it again as it was, also where a fellow has committed it; and a
fellow whose disk has lost the commit hears of it again."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import Apply, Fold, Reduce
from node.machine.records import (
    ContributionAccepted,
    ContributionStored,
    Record,
    ShardStarted,
    StepCommitted,
    StepSealed,
)
from node.server.buddy import BuddyRole, Copies
from node.server.ledger import LedgerRole
from node.server.recovery import StateLostError
from node.server.shard import Phase, ShardRole
from protocol.base.ids import ContributionId
from protocol.base.machine import Effect
from protocol.messages import Commit, Committed, Decision, Freeze, PartialNorm, StageFrozen, StepOpened
from tests.node.setting import (
    ELEMENTS,
    VOLUNTEER,
    Effects,
    backward,
    contribution,
    make_context,
    part,
    same_list,
    stored,
)

CONTRIBUTIONS = (contribution(1), contribution(0))
"""As they were accepted."""
DECISION = Decision(ledger_generation=1, step=0, clip_factor=0.5, skipped=False, learning_rate=0.25)
OWN_NORM = PartialNorm(ledger_generation=1, step=0, shard=0, square_norm=4.0, finite=True)
"""Of the shard beside the ledger."""


class Fellow:
    """The shard of b0 (shard 1 of stage 0), with a lane and a disk that do at once what they are given."""

    def __init__(self, records: list[Record] | None = None) -> None:
        self.context = make_context("b0")
        self.disk: list[Record] = list(records or [])
        self.shard = ShardRole(self.context, BuddyRole(self.context, Copies(self.context.out)))
        self.shard.start(self.disk)
        self.shard.set_elements(ELEMENTS)
        self.shard.base_loaded(b"digest 0")
        self.take()

    def take(self) -> Effects:
        """All that it does, until nothing is left to do."""
        done: list[Effect] = []
        while (effects := Effects(self.context.out)).all:
            self.shard.check()
            done += effects.all
            for fold in effects.jobs(Fold):
                self.shard.folded(fold)
            for reduce in effects.jobs(Reduce):
                self.shard.reduced(reduce, 9.0, True)
            for apply in effects.jobs(Apply):
                self.shard.applied(apply, b"digest %d" % (apply.step + 1))
            self.disk += effects.records(ShardStarted)
            for written in effects.records(ContributionStored):
                self.disk.append(written)
                self.shard.stored(written)
            for committed in effects.records(StepCommitted):
                self.disk.append(committed)
                self.shard.committed(committed)
        effects.all = done
        return effects

    def freeze(self, contributions: tuple[ContributionId, ...] = CONTRIBUTIONS, step: int = 0) -> list[PartialNorm]:
        """What it says that the step came to."""
        self.shard.on_freeze(Freeze(ledger_generation=1, step=step, contributions=contributions))
        return self.take().sent(PartialNorm)

    def commit(self, step: int) -> None:
        contributions = (contribution(2 * step + 1), contribution(2 * step))
        for microbatch, one in enumerate(reversed(contributions)):
            version = self.context.config.version_of(step)
            tasks = (backward(step, microbatch),)
            self.shard.on_contribute(VOLUNTEER, part(one.number, step, tasks, 1, 100 + one.number, version))
            self.take()
        assert len(self.freeze(contributions, step)) == 1
        self.shard.on_commit(
            Commit(ledger_generation=1, step=step, contributions=contributions, clip_factor=0.5, skipped=False)
        )
        assert self.take().sent(Committed) == []
        self.shard.on_frozen_list(same_list(0, step, contributions))
        assert len(self.take().sent(Committed)) == 1


class Ledger:
    """The ledger of stage 0, on f0."""

    def __init__(self, records: list[Record] | None = None) -> None:
        self.context = make_context("f0")
        self.ledger = LedgerRole(self.context)
        self.ledger.start(records or [])
        self.ledger.on_step_opened(StepOpened(ledger_generation=1, step=0, closed=-1))
        self.take()

    def take(self) -> Effects:
        self.ledger.check()
        return Effects(self.context.out)

    def accept(self) -> list[Record]:
        """Both contributions of step 0; what is on the disk then."""
        records: list[Record] = []
        for one in CONTRIBUTIONS:
            for shard in (0, 1):
                self.ledger.on_stored(stored(one.number, 0, (backward(0, one.number),), shard))
            (record,) = self.take().records(ContributionAccepted)
            self.ledger.accepted(record)
            records.append(record)
        return records

    def seal(self, norms: list[PartialNorm]) -> StepSealed:
        """Hears what the shards came to, and the decision."""
        for norm in norms:
            self.ledger.on_partial_norm(norm)
        assert len(self.take().sent(StageFrozen, "f1")) == 1
        self.ledger.on_decision(DECISION)
        (seal,) = self.take().records(StepSealed)
        return seal


def test_a_lost_seal_is_made_again_with_a_fellow_that_has_committed_the_step() -> None:
    """Seed 81: the fellow said nothing to the freeze of a step behind it, and the stage waited for its sum for ever."""
    fellow = Fellow()
    fellow.commit(0)
    first = Ledger()
    accepted = first.accept()
    lost = first.seal([OWN_NORM, msgspec.structs.replace(OWN_NORM, shard=1, square_norm=9.0)])

    again = Ledger(accepted)
    again.ledger.sync(fellow.context.node)
    (freeze,) = again.take().sent(Freeze, "b0")
    seal = again.seal([OWN_NORM, *fellow.freeze(freeze.contributions)])
    assert seal == lost
    again.ledger.sealed(seal)
    (commit,) = again.take().sent(Commit, "b0")
    fellow.shard.on_commit(commit)
    effects = fellow.take()
    assert len(effects.sent(Committed)) == 1 and not effects.jobs(Apply) and fellow.shard.version == 1


@pytest.mark.parametrize("kind", [StepCommitted, ContributionStored])
def test_who_lost_a_commit_hears_of_it_again(kind: type[Record]) -> None:
    """Seed 404195: the ledger had its word and said nothing more, and the stage's others waited for its list for ever.
    Where what the step counts is whole, it is committed once more; where a part is lost, too, the state is given up."""
    fellow, first = Fellow(), Ledger()
    fellow.commit(0)
    first.accept()
    first.ledger.sealed(first.seal([OWN_NORM, msgspec.structs.replace(OWN_NORM, shard=1, square_norm=9.0)]))
    first.ledger.on_committed(Committed(ledger_generation=1, step=0, shard=1, digest=b"digest 1"))
    first.take()
    lost = max(place for place, record in enumerate(fellow.disk) if isinstance(record, kind))
    again = Fellow([*fellow.disk[:lost], *fellow.disk[lost + 1 :]])
    assert again.shard.version == 0
    first.ledger.sync(again.context.node)
    (commit,) = first.take().sent(Commit, "b0")
    if kind is ContributionStored:
        with pytest.raises(StateLostError, match="not on this disk"):
            again.shard.on_commit(commit)
        return
    again.shard.on_commit(commit)
    again.shard.on_frozen_list(same_list(0, 0, CONTRIBUTIONS))
    assert len(again.take().sent(Committed)) == 1 and again.shard.version == 1


def test_the_sum_of_a_committed_step_is_known_after_a_restart_too() -> None:
    """The step is made again from the disk, and its sum with it."""
    fellow = Fellow()
    fellow.commit(0)
    again = Fellow(fellow.disk)
    assert (again.shard.phase, again.shard.version) == (Phase.READY, 1)
    assert [norm.square_norm for norm in again.freeze()] == [9.0]


def test_a_committed_step_that_is_frozen_with_another_list_means_that_state_is_lost() -> None:
    """The ledger's disk has lost acceptances besides, and others did their tasks anew: the step cannot count twice."""
    fellow = Fellow()
    fellow.commit(0)
    with pytest.raises(StateLostError, match="T-I9"):
        fellow.freeze((contribution(0), contribution(1)))


def test_sums_are_kept_of_steps_that_may_not_be_closed_only() -> None:
    """Step 2 opened when step 0 was closed (the update is delayed by one), so nobody asks for that one again."""
    fellow = Fellow()
    for step in range(3):
        fellow.commit(step)
    assert [len(fellow.freeze((contribution(2 * step + 1), contribution(2 * step)), step)) for step in range(3)] == [
        0, 1, 1,
    ]  # fmt: skip
