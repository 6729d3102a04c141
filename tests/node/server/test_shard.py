"""A shard acknowledges what is durable, grows by one version per commit, and comes back from its journal the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from node.machine.jobs import (
    Apply,
    DropVersions,
    Fold,
    LoadSnapshot,
    Reduce,
    ServeParameters,
    StartShard,
    WriteCheckpoint,
)
from node.machine.jobs import WriteSnapshot as WriteSnapshotJob
from node.machine.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.buddy import BuddyRole, Copies
from node.server.recovery import StateLostError
from node.server.shard import Phase, ShardRole
from protocol.base.ids import NodeId, Ticket
from protocol.base.machine import Prune
from protocol.messages import (
    Commit,
    Committed,
    Contribute,
    FetchParameters,
    Freeze,
    Parameters,
    PartialNorm,
    Stored,
    Verdict,
    VersionReady,
)
from protocol.run.plan import Plan
from tests.node.setting import (
    ELEMENTS,
    TICKET,
    VOLUNTEER,
    Effects,
    backward,
    contribution,
    make_config,
    make_context,
    make_plan,
    part,
    same_list,
    shard_tensor,
)

BOTH = (backward(0, 0), backward(0, 1))


class Desk:
    """The shard of b0 (shard 1 of stage 0), READY at version 0 unless it has records to begin from."""

    def __init__(
        self, records: list[Record] | None = None, restore_step: int = -1, plan: Plan | None = None, **config: Any
    ) -> None:
        plan = plan or make_plan(restore_step=restore_step)
        self.context = make_context("b0", make_config(**config), plan)
        self.shard = ShardRole(self.context, BuddyRole(self.context, Copies(self.context.out)))
        self.shard.start(records or [])
        self.shard.set_elements(ELEMENTS)
        self.begun = self.take()
        if not records:
            self.shard.base_loaded(b"digest 0")
            self.take()

    def take(self) -> Effects:
        self.shard.check()
        return Effects(self.context.out)

    def contribute(self, number: int, step: int = 0, key: int = 0) -> Effects:
        tasks = (backward(step, 0), backward(step, 1))
        version = self.context.config.version_of(step)
        self.shard.on_contribute(VOLUNTEER, part(number, step, tasks, 1, key or 100 + number, version))
        return self.take()

    def sum_up(self) -> tuple[list[int], list[Reduce]]:
        """The lane folds what it is given: the tensors' keys in order, and the sums that are then to be ended."""
        folded, reduces = [], []
        effects = self.take()
        while (folds := effects.jobs(Fold)) + (sums := effects.jobs(Reduce)):
            reduces += sums
            for job in folds:
                folded.append(job.part.key)
                assert job.part.key in effects.dropped
                self.shard.folded(job)
            effects = self.take()
        return folded, reduces

    def commit(self, step: int) -> StepCommitted:
        """One whole step, until its record is about to be written."""
        (record,) = self.contribute(step, step).records(ContributionStored)
        self.shard.stored(record)
        contributions = (contribution(step),)
        self.shard.on_freeze(Freeze(ledger_generation=1, step=step, contributions=contributions))
        _, (reduce,) = self.sum_up()
        self.shard.reduced(reduce, 1.0, True)
        self.take()
        commit = Commit(ledger_generation=1, step=step, contributions=contributions, clip_factor=1.0, skipped=False)
        self.shard.on_commit(commit)
        self.shard.on_frozen_list(same_list(0, step, contributions))
        (apply,) = self.take().jobs(Apply)
        self.shard.applied(apply, b"digest %d" % (step + 1))
        (committed,) = self.take().records(StepCommitted)
        return committed


def test_a_part_is_acknowledged_when_it_is_durable() -> None:
    """The ledger hears of it after the record, not before."""
    desk = Desk()
    effects = desk.contribute(1)
    assert effects.sent(Stored) == []
    desk.shard.stored(effects.records(ContributionStored)[0])
    assert desk.take().peers(Stored) == ["f0"]


def test_a_part_that_comes_again_is_not_stored_again() -> None:
    """The copy's tensor is dropped, and a durable one is announced again."""
    desk = Desk()
    desk.shard.stored(desk.contribute(1, key=100).records(ContributionStored)[0])
    desk.take()
    again = desk.contribute(1, key=200)
    assert again.records(ContributionStored) == [] and again.dropped == [200]
    assert len(again.sent(Stored)) == 1


def test_a_part_of_a_run_that_diverges_may_come_again_too() -> None:
    """Its loss is not a number, which equals nothing, not even itself; another loss is another contribution."""
    desk = Desk()
    for key, loss, reason in ((100, "nan", ""), (200, "nan", ""), (300, "1", "replay: another contribution")):
        first = part(1, 0, (backward(0, 0), backward(0, 1)), 1, key)
        found = desk.shard.on_contribute(VOLUNTEER, msgspec.structs.replace(first, losses=(float(loss),)))
        assert found.startswith(reason) and bool(found) is bool(reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shard": 0}, "shape"),
        ({"tensors": ()}, "shape"),
        ({"tensors": (shard_tensor(5, ELEMENTS + 1),)}, "shape"),
        ({"version": 3}, "version"),
        ({"tasks": (backward(1, 0),)}, "decode"),
        ({"tasks": ()}, "decode"),
        ({"tasks": (backward(0, 0), backward(0, 0))}, "decode"),
    ],
)
def test_what_no_honest_volunteer_sends_is_refused(changes: dict[str, Any], reason: str) -> None:
    """The reason names what is wrong, the tensor is dropped, nothing is written."""
    desk = Desk()
    honest = part(1, 0, BOTH, 1, 100)
    fields = {name: getattr(honest, name) for name in honest.__struct_fields__}
    message = Contribute(**{**fields, **changes})
    assert desk.shard.on_contribute(VOLUNTEER, message).startswith(reason)
    effects = desk.take()
    assert effects.records(ContributionStored) == []
    assert effects.dropped == [ref.key for ref in message.tensors]


def test_a_refused_contribution_lets_go_of_its_tensor() -> None:
    """The ledger's no ends it."""
    desk = Desk()
    desk.contribute(1)
    verdict = Verdict(
        ledger_generation=1, contribution=contribution(1), step=0, tasks=BOTH, accepted=False, number=-1, reason="late"
    )
    desk.shard.on_verdict(verdict)
    assert desk.take().dropped == [101]


def test_a_freeze_is_summed_up_once_in_the_ledgers_order() -> None:
    """The lane gets the tensors in the order of the freeze; a second freeze repeats the norm."""
    desk = Desk()
    for number in (1, 2):
        desk.shard.stored(desk.contribute(number).records(ContributionStored)[0])
    desk.take()
    freeze = Freeze(ledger_generation=1, step=0, contributions=(contribution(2), contribution(1)))
    desk.shard.on_freeze(freeze)
    folded, (reduce,) = desk.sum_up()
    assert folded == [102, 101]
    desk.shard.reduced(reduce, 9.0, True)
    assert desk.take().sent(PartialNorm)[0].square_norm == 9.0
    desk.shard.on_freeze(freeze)
    again = desk.take()
    assert again.jobs(Reduce) == [] and len(again.sent(PartialNorm)) == 1


def test_a_sum_is_ended_when_the_version_that_it_was_computed_on_is_here() -> None:
    """A disk that has forgotten a commit makes that version once more, though the ledger has frozen what was computed
    on it: a sum on a grid is read by its averages (seed 128821: the server died of it, again after each restart)."""
    begun = Desk(delay=0).begun.records(ShardStarted)
    desk = Desk([*begun, _record(0), msgspec.structs.replace(_record(1), version=1)], delay=0)
    desk.shard.base_loaded(b"digest 0")
    desk.take()
    desk.shard.on_freeze(Freeze(ledger_generation=1, step=1, contributions=(contribution(1),)))
    assert desk.sum_up() == ([101], [])
    seal = Commit(ledger_generation=1, step=0, contributions=(contribution(0),), clip_factor=1.0, skipped=False)
    desk.shard.on_commit(seal)
    desk.shard.on_frozen_list(same_list(0, 0, seal.contributions))
    folded, (reduce,) = desk.sum_up()
    assert (folded, reduce.step) == ([100], 0)
    desk.shard.reduced(reduce, 1.0, True)
    (apply,) = desk.take().jobs(Apply)
    desk.shard.applied(apply, b"digest 1")
    desk.shard.committed(desk.take().records(StepCommitted)[0])
    folded, (reduce,) = desk.sum_up()
    assert (folded, reduce.step) == ([], 1)


def test_a_freeze_of_what_was_never_acknowledged_means_that_the_state_is_lost() -> None:
    """T-I2 is broken somewhere: a disk has lost what it had acknowledged, and nothing is guessed."""
    desk = Desk()
    desk.contribute(1)
    with pytest.raises(StateLostError, match="T-I2"):
        desk.shard.on_freeze(Freeze(ledger_generation=1, step=0, contributions=(contribution(1),)))
    assert desk.take().jobs(Reduce) == []


def test_a_seal_with_another_list_than_its_freeze_is_refused() -> None:
    """The sum that was reported is not the one that would be applied: nothing is applied (T-I9)."""
    desk = Desk()
    for number in (1, 2):
        desk.shard.stored(desk.contribute(number).records(ContributionStored)[0])
    desk.shard.on_freeze(Freeze(ledger_generation=1, step=0, contributions=(contribution(1),)))
    desk.take()
    seal = Commit(ledger_generation=1, step=0, contributions=(contribution(2),), clip_factor=1.0, skipped=False)
    with pytest.raises(StateLostError, match="T-I9"):
        desk.shard.on_commit(seal)
    assert desk.take().jobs(Apply) == []


def reused(number: int, *, step: int, fence: int, key: int) -> Contribute:
    """A contribution of one task, whose lease had a fence of its own."""
    contribute = part(number, step, (backward(step, 0),), 1, key, step)
    return msgspec.structs.replace(contribute, tickets=(Ticket(fence, TICKET.mac),))


def test_a_number_that_is_used_in_two_steps_is_refused() -> None:
    """Its second part would take the place of the first after a restart, and the version would come out otherwise."""
    desk = Desk(delay=0, steps=8)
    assert desk.shard.on_contribute(VOLUNTEER, reused(1, step=0, fence=1, key=100)) == ""
    desk.take()
    assert desk.shard.on_contribute(VOLUNTEER, reused(1, step=1, fence=2, key=101)).startswith("replay")
    assert desk.take().dropped == [101]


def test_a_number_that_was_used_before_a_restart_changes_no_version() -> None:
    """The journal may hold a refused part of an earlier step under a number that counted in a later one."""
    counted = _record(0)
    committed = StepCommitted(
        ledger_generation=1, step=0, contributions=(counted.contribution,), clip_factor=1.0, skipped=False, digest=b""
    )
    later = msgspec.structs.replace(counted, step=1, version=1, tensors=(shard_tensor(77),))
    again = Desk([_started(), counted, committed, later], delay=0, steps=8)
    again.shard.base_loaded(b"digest 0")
    (fold,) = again.take().jobs(Fold)
    assert (fold.step, fold.part) == (0, counted.tensors[0])


def test_a_lease_pays_for_one_contribution() -> None:
    """A second one with the same ticket is refused, also after a restart: refused parts cannot swell the journal."""
    desk = Desk()
    desk.shard.on_contribute(VOLUNTEER, reused(1, step=0, fence=5, key=100))
    (record,) = desk.take().records(ContributionStored)
    assert desk.shard.on_contribute(VOLUNTEER, reused(2, step=0, fence=5, key=101)).startswith("replay")
    again = Desk([_started(), record])
    again.shard.base_loaded(b"digest 0")
    again.take()
    assert again.shard.on_contribute(VOLUNTEER, reused(2, step=0, fence=5, key=102)).startswith("replay")
    assert again.shard.on_contribute(VOLUNTEER, reused(2, step=0, fence=6, key=103)) == ""


def accepted(number: int, place: int, step: int = 0) -> Verdict:
    """The ledger's yes to a contribution, as the one with this place among the accepted."""
    return Verdict(
        ledger_generation=1,
        contribution=contribution(number),
        step=step,
        tasks=(backward(step, 0), backward(step, 1)),
        accepted=True,
        number=place,
        reason="",
    )


def test_accepted_parts_are_folded_at_once_in_the_ledgers_order_and_forgotten() -> None:
    """The second's verdict comes first, by another link: it waits for the first. Nothing is left for the freeze."""
    desk = Desk()
    for number in (1, 2):
        desk.shard.stored(desk.contribute(number).records(ContributionStored)[0])
    desk.take()
    desk.shard.on_verdict(accepted(1, 1))
    assert desk.sum_up() == ([], [])
    desk.shard.on_verdict(accepted(2, 0))
    assert desk.sum_up() == ([102, 101], [])
    desk.shard.on_freeze(Freeze(ledger_generation=1, step=0, contributions=(contribution(2), contribution(1))))
    folded, (reduce,) = desk.sum_up()
    assert (folded, reduce.contribution_count) == ([], 2)


def test_a_verdict_that_comes_again_folds_nothing_again() -> None:
    """The ledger repeats its verdicts to a server whose link was down (C10)."""
    desk = Desk()
    desk.shard.stored(desk.contribute(1).records(ContributionStored)[0])
    desk.take()
    desk.shard.on_verdict(accepted(1, 0))
    assert desk.sum_up()[0] == [101]
    desk.shard.on_verdict(accepted(1, 0))
    assert desk.contribute(1, key=201).dropped == [201]
    desk.shard.on_freeze(Freeze(ledger_generation=1, step=0, contributions=(contribution(1),)))
    assert desk.sum_up()[0] == []


def test_what_was_folded_before_a_restart_is_folded_once_after_it() -> None:
    """The sum died with the process, the part did not: the repeated verdict, or the freeze alone, folds it anew."""
    for heard in (True, False):
        desk = Desk([_started(), _record(0)])
        desk.shard.base_loaded(b"digest 0")
        desk.take()
        if heard:
            desk.shard.on_verdict(accepted(0, 0))
            assert desk.sum_up()[0] == [100]
        desk.shard.on_freeze(Freeze(ledger_generation=1, step=0, contributions=(contribution(0),)))
        folded, reduces = desk.sum_up()
        assert (folded, len(reduces)) == ([] if heard else [100], 1)


def test_a_snapshot_is_due_when_the_parts_on_the_disk_outweigh_the_state() -> None:
    """However rarely the run takes snapshots: what the journal holds is bounded by bytes, not by steps."""
    desk = Desk(snapshot_steps=1000, steps=200)
    due = []
    for step in range(70):  # parts of 4 bytes an element; 4 states of 16
        desk.shard.committed(desk.commit(step))
        due += [job.version for job in desk.take().jobs(WriteSnapshotJob)]
    assert due == [17, 34, 51, 68]


def test_a_version_is_served_and_told_when_its_commit_is_durable() -> None:
    """Before the record nobody gets version 1; with it the ledger hears, workers hear, and who waited is served."""
    desk = Desk()
    desk.shard.worker_here(VOLUNTEER)
    record = desk.commit(0)
    desk.shard.on_fetch(VOLUNTEER, FetchParameters(ledger_generation=1, version=1))
    assert desk.take().all == []
    desk.shard.committed(record)
    effects = desk.take()
    assert effects.sent(Committed)[0].digest == b"digest 1"
    assert effects.peers(VersionReady) == ["v1"]
    assert [job.version for job in effects.jobs(ServeParameters)] == [1]
    assert effects.dropped == []  # folded long ago


def test_a_commit_that_comes_again_changes_nothing() -> None:
    """It is acknowledged again."""
    desk = Desk()
    desk.shard.committed(desk.commit(0))
    desk.take()
    commit = Commit(ledger_generation=1, step=0, contributions=(contribution(0),), clip_factor=1.0, skipped=False)
    desk.shard.on_commit(commit)
    effects = desk.take()
    assert len(effects.sent(Committed)) == 1 and effects.jobs(Reduce) == [] and effects.jobs(Apply) == []


def test_a_version_is_put_into_wire_form_once_whoever_asks() -> None:
    """Two ask, the first leaves while the lane works, a third asks: one job, one tensor kept, the rest are served."""
    desk = Desk()
    nodes = [NodeId(name) for name in ("v1", "v2", "v3")]
    for node in nodes:
        desk.shard.worker_here(node)
    fetch = FetchParameters(ledger_generation=1, version=0)
    desk.shard.on_fetch(nodes[0], fetch)
    desk.shard.worker_gone(nodes[0])
    for node in nodes[1:]:
        desk.shard.on_fetch(node, fetch)
    (job,) = desk.take().jobs(ServeParameters)
    desk.shard.served(job, (shard_tensor(job.key),))
    assert desk.take().peers(Parameters) == ["v2", "v3"]


def test_who_asks_for_what_is_not_there_hears_so() -> None:
    """Versions that are gone or far away are answered without tensors."""
    desk = Desk()
    desk.shard.on_fetch(VOLUNTEER, FetchParameters(ledger_generation=1, version=2**40))
    assert desk.take().sent(Parameters)[0].tensors == ()


def test_a_restart_makes_the_same_versions_again() -> None:
    """From the seed, with the journal's contributions in the journal's order; it serves only afterwards."""
    desk = Desk()
    records: list[Record] = list(desk.begun.records(ShardStarted))
    for step in (0, 1):
        (stored,) = [part for part in [_record(step)] if part]
        records.append(stored)
        record = desk.commit(step)
        records.append(record)
        desk.shard.committed(record)
        desk.take()
    again = Desk(records)
    assert len(again.begun.jobs(StartShard)) == 1 and again.begun.records(ShardStarted) == []
    again.shard.base_loaded(b"digest 0")
    for step in (0, 1):
        folded, (reduce,) = again.sum_up()
        assert folded == [100 + step]
        assert again.shard.phase is Phase.RESTORING
        again.shard.reduced(reduce, 1.0, True)
        (apply,) = again.take().jobs(Apply)
        again.shard.applied(apply, b"digest %d" % (step + 1))
    assert again.shard.phase is Phase.READY and again.shard.version == 2


def test_another_digest_than_before_the_restart_means_that_the_state_is_lost() -> None:
    """The disk or the arithmetic is damaged: nothing is guessed."""
    record = StepCommitted(
        ledger_generation=1, step=0, contributions=(contribution(0),), clip_factor=1.0, skipped=False, digest=b"right"
    )
    desk = Desk([_started(), _record(0), record])
    desk.shard.base_loaded(b"digest 0")
    _, (reduce,) = desk.sum_up()
    desk.shard.reduced(reduce, 1.0, True)
    (apply,) = desk.take().jobs(Apply)
    with pytest.raises(StateLostError):
        desk.shard.applied(apply, b"wrong")
    assert desk.take().jobs(DropVersions) == [DropVersions(2, 2)], "ledgers that go on from version 1 must not find it"


def test_a_snapshot_with_other_numbers_is_forgotten_where_it_was_read() -> None:
    """The lane had it in memory, and gave it to the ledgers that began afterwards with the same version: parameters
    that nobody had ever computed were served."""
    snapshot = SnapshotWritten(ledger_generation=1, step=0, file="snapshot-0", digest=b"right")
    desk = Desk([_started(), snapshot])
    assert [job.file for job in desk.begun.jobs(LoadSnapshot)] == ["snapshot-0"]
    with pytest.raises(StateLostError, match="version 0"):
        desk.shard.base_loaded(b"wrong")
    assert desk.take().jobs(DropVersions) == [DropVersions(1, 1)]


def test_versions_are_not_dropped_while_the_journal_is_replayed() -> None:
    """A neighbour's word that a step is closed, in the middle of a replay, must not take a version that it needs."""
    commits = [
        StepCommitted(
            ledger_generation=1,
            step=step,
            contributions=(contribution(step),),
            clip_factor=1.0,
            skipped=False,
            digest=b"digest %d" % (step + 1),
        )
        for step in (0, 1)
    ]
    desk = Desk([_started(), _record(0), commits[0], _record(1), commits[1]], delay=0)
    desk.shard.base_loaded(b"digest 0")
    desk.context.closed = 1
    desk.shard.close_step(1)
    assert desk.take().jobs(DropVersions) == []


def test_pruning_keeps_the_snapshot_that_a_restart_needs() -> None:
    """The newest snapshot may be newer than the oldest version that is still asked for: then the one before stays."""
    desk = Desk(snapshot_steps=1)
    pruned = []
    for step in range(3):
        desk.shard.committed(desk.commit(step))
        (job,) = desk.take().jobs(WriteSnapshotJob)
        desk.shard.snapshot_written(job, f"snapshot-{job.version}")
        (record,) = desk.take().records(SnapshotWritten)
        desk.shard.snapshot_durable(record)
        pruned += [effect.step for effect in desk.take().all if isinstance(effect, Prune)]
    # At version 3 step 1 may still be open elsewhere, and runs on version 0: only at version 4 snapshot 1 is the base.
    assert pruned == []
    desk.shard.committed(desk.commit(3))
    (job,) = desk.take().jobs(WriteSnapshotJob)
    desk.shard.snapshot_written(job, "snapshot-4")
    desk.shard.snapshot_durable(desk.take().records(SnapshotWritten)[0])
    assert [effect.step for effect in desk.take().all if isinstance(effect, Prune)] == [1]


def test_a_restart_begins_from_the_newest_snapshot_that_is_old_enough() -> None:
    """Newer snapshots lie on the disk, but step t - 1 - delay may still be open and its version asked for."""
    commits: list[Record] = [
        StepCommitted(
            ledger_generation=1,
            step=step,
            contributions=(contribution(step),),
            clip_factor=1.0,
            skipped=False,
            digest=b"",
        )
        for step in range(4)
    ]
    snapshots: list[Record] = [
        SnapshotWritten(ledger_generation=1, step=version, file=f"snapshot-{version}", digest=b"")
        for version in (1, 2, 3, 4)
    ]
    desk = Desk([_started(), *(_record(step) for step in range(4)), *commits, *snapshots])
    assert [job.file for job in desk.begun.jobs(LoadSnapshot)] == ["snapshot-1"]


def test_ledgers_that_begin_from_a_checkpoint_keep_a_copy_of_it_at_once() -> None:
    """The checkpoint may be thinned out before there is another snapshot; those that begin from the seed need none."""
    begun = msgspec.structs.replace(_started(), checkpoint_step=4)
    desk = Desk([begun], restore_step=4)
    desk.shard.base_loaded(b"digest 4")
    (job,) = desk.take().jobs(WriteSnapshotJob)
    assert job.version == 4
    desk = Desk([_started()])
    desk.shard.base_loaded(b"digest 0")
    assert desk.take().jobs(WriteSnapshotJob) == []


def test_the_last_checkpoint_is_written_after_a_crash_between_commit_and_checkpoint() -> None:
    """A restart at the last version writes it, as if the commit had just been."""
    commits = [
        StepCommitted(
            ledger_generation=1,
            step=step,
            contributions=(contribution(step),),
            clip_factor=1.0,
            skipped=False,
            digest=b"",
        )
        for step in range(2)
    ]
    desk = Desk([_started(), _record(0), commits[0], _record(1), commits[1]], steps=2)
    desk.shard.base_loaded(b"digest 0")
    jobs: list[WriteCheckpoint] = []
    for _ in range(2):
        _, (reduce,) = desk.sum_up()
        desk.shard.reduced(reduce, 1.0, True)
        (apply,) = desk.take().jobs(Apply)
        desk.shard.applied(apply, b"")
        jobs += (effects := desk.take()).jobs(WriteCheckpoint)
        for job in effects.jobs(Fold):
            desk.shard.folded(job)
    assert [job.step for job in jobs] == [2]


def test_the_end_lets_go_of_every_tensor() -> None:
    """Other ledgers begin: parts and served versions are dropped, each once."""
    desk = Desk()
    desk.contribute(1)
    desk.shard.on_fetch(VOLUNTEER, FetchParameters(ledger_generation=1, version=0))
    (job,) = desk.take().jobs(ServeParameters)
    desk.shard.served(job, (shard_tensor(job.key),))
    desk.take()
    desk.shard.end()
    assert sorted(desk.take().dropped) == sorted([101, job.key])


def _started() -> ShardStarted:
    return ShardStarted(
        ledger_generation=1, step=0, stage=0, shard=1, shard_count=2, checkpoint_step=-1, config_hash=b""
    )


def _record(step: int) -> ContributionStored:
    """What `Desk.commit` stores for a step."""
    return ContributionStored(
        ledger_generation=1,
        step=step,
        contribution=contribution(step),
        version=max(0, step - 1),
        tasks=(backward(step, 0), backward(step, 1)),
        losses=(),
        tensors=(shard_tensor(100 + step),),
    )
