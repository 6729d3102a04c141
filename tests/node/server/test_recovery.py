"""What a disk gives back after a crash, also after it has lost something that it had acknowledged."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import Apply, DropVersions, Fold, Reduce, StartShard, WriteSnapshot
from node.machine.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StateLost, StepCommitted
from node.server.recovery import beginning, held, needed_in_replay, oldest_needed, recovery, restored, still_closed
from node.server.shard import Phase
from tests.node.server.test_shard import Desk
from tests.node.setting import backward, contribution, make_plan, shard_tensor


def started(checkpoint_step: int = -1, generation: int = 1, continues: int = -1) -> ShardStarted:
    return ShardStarted(
        ledger_generation=generation, step=0, stage=0, shard=1, shard_count=2, checkpoint_step=checkpoint_step,
        config_hash=b"h", continues=continues,
    )  # fmt: skip


def step(number: int) -> list[Record]:
    """A committed step with its one contribution."""
    part = ContributionStored(
        ledger_generation=1, step=number, contribution=contribution(number), version=number,
        tasks=(backward(number, 0),), losses=(), tensors=(shard_tensor(number),),
    )  # fmt: skip
    done = StepCommitted(
        ledger_generation=1, step=number, contributions=(contribution(number),), clip_factor=1.0, skipped=False,
        digest=b"d",
    )  # fmt: skip
    return [part, done]


def snapshot(version: int) -> SnapshotWritten:
    return SnapshotWritten(ledger_generation=1, step=version, file=f"snapshot-{version}", digest=b"d")


WHOLE: list[Record] = [started(), *step(0), *step(1), *step(2), *step(3), snapshot(2), *step(4), *step(5)]


def test_a_whole_disk_begins_at_its_newest_usable_snapshot() -> None:
    """Version 2 of 6 is old enough with delay 1; a snapshot of version 5 would be too new for who works on step 3."""
    found = recovery([*WHOLE, snapshot(5)], 1, 1, ())
    assert found is not None
    assert (found.base, found.snapshot, found.version, oldest_needed(6, 1)) == (2, "snapshot-2", 6, 3)


@pytest.mark.parametrize(
    ("lost", "version"),
    [
        (WHOLE.index(snapshot(2)), 6),  # the seed and all steps are still there
        (WHOLE.index(step(5)[1]), 5),
        (WHOLE.index(step(5)[0]), 5),
        (WHOLE.index(step(4)[0]), 4),
        (WHOLE.index(step(2)[1]), 2),
    ],
)
def test_one_lost_record_is_an_older_version_and_never_a_gap(lost: int, version: int) -> None:
    """Whatever one record is missing: what comes out is a prefix of what was committed."""
    found = recovery(WHOLE[:lost] + WHOLE[lost + 1 :], 1, 1, ())
    assert found is not None and found.version == version
    assert [record.step for record in found.replay] == list(range(found.base, version))


def test_ledgers_that_began_from_a_checkpoint_need_it_no_more_once_they_have_a_copy() -> None:
    """The copy is of their first version, before which nobody asks for anything: it is old enough from the start."""
    copied: list[Record] = [started(checkpoint_step=4), snapshot(4), *step(4), *step(5)]
    for readable in ((), (4, 2), None):
        found = recovery(copied, 1, 1, readable)
        assert found is not None and (found.base, found.snapshot, found.version) == (4, "snapshot-4", 6)


def test_a_disk_whose_beginning_is_gone_holds_nothing() -> None:
    """Pruned up to a snapshot whose file is missing, or begun from a checkpoint that nobody can read any more."""
    pruned: list[Record] = [started(), *step(4), *step(5)]
    assert recovery(pruned, 1, 1, ()) is not None and recovery(pruned, 1, 1, ()).version == 0  # type: ignore[union-attr]
    from_checkpoint: list[Record] = [started(checkpoint_step=4), *step(4), *step(5)]
    assert recovery(from_checkpoint, 1, 1, (2,)) is None
    assert recovery(from_checkpoint, 1, 1, (4, 2)).version == 6  # type: ignore[union-attr]
    assert recovery(step(0), 1, 1, ()) is None  # its ledgers never began here


def of(generation: int, records: list[Record]) -> list[Record]:
    """The same of other ledgers."""
    return [msgspec.structs.replace(record, ledger_generation=generation) for record in records]


def test_ledgers_that_went_on_begin_from_the_disk_of_those_before_until_they_have_a_snapshot() -> None:
    """Their first version, and what they made of it; a restart needs nobody's memory."""
    went_on = started(5, 2, continues=1)
    for since, version in (([], 5), (of(2, step(5)), 6), ([*of(2, step(5)), *of(2, step(6))], 7)):
        records = [*WHOLE, went_on, *since]
        for readable in ((), None):
            found = recovery(records, 2, 1, readable)
            assert found is not None and (found.base, found.snapshot, found.version) == (2, "snapshot-2", version)
            assert [record.step for record in found.replay] == list(range(2, version))
            assert found.earlier == 1 and found.started == went_on
            assert [found.sums(part) for part in [step(3)[0], of(2, step(3))[0]]] == [True, False]  # type: ignore[arg-type]
        assert held(records, 1, ()) == (0, 1, version, 2)
    written: Record = SnapshotWritten(ledger_generation=2, step=5, file="snapshot-5", digest=b"d")
    found = recovery([*WHOLE, went_on, written], 2, 1, ())
    assert found is not None and (found.base, found.snapshot, found.earlier) == (5, "snapshot-5", -1)


def test_a_server_that_never_heard_of_the_new_ledgers_begins_them_from_its_disk() -> None:
    """It was away when they began."""
    found = restored(WHOLE, 2, 1, (0, 1), 1, 5)
    assert found is not None and (found.base, found.version, found.earlier) == (2, 5, 1)
    seed = restored([started(), *step(0)], 2, 1, (0, 1), 1, 1)
    assert seed is not None and (seed.base, seed.snapshot, seed.version, seed.earlier) == (0, "", 1, 1)
    assert restored(WHOLE, 2, 1, (0, 1), -1, 5) is None


@pytest.mark.parametrize(
    ("records", "place", "version"),
    [
        (WHOLE, (0, 0), 5),  # another shard's disk
        (WHOLE, (0, 1), 7),  # which it never had
        ([started(), snapshot(4), *step(4), *step(5)], (0, 1), 3),  # what led there is pruned
        ([*WHOLE, StateLost(ledger_generation=1, step=0, reason="")], (0, 1), 5),
        (of(3, WHOLE), (0, 1), 5),  # of other ledgers
        ([started(checkpoint_step=4), *step(4)], (0, 1), 5),  # from a checkpoint, which may be gone
    ],
)
def test_a_disk_that_has_not_what_ledgers_go_on_from_is_not_taken(
    records: list[Record], place: tuple[int, int], version: int
) -> None:
    """Neither of another shard, nor of another version, nor what was given up."""
    assert beginning(records, place, 1, version) is None


def test_of_a_state_that_is_given_up_what_closed_steps_came_to_still_holds() -> None:
    """New ledgers go on from it, and from nothing after it; the old ones never go on."""
    lost = StateLost(ledger_generation=1, step=0, reason="", closed_version=5)
    records: list[Record] = [*WHOLE, lost]
    assert still_closed(records) == ((0, 1, 5, 1),)
    assert beginning(records, (0, 1), 1, 5) is not None and beginning(records, (0, 1), 1, 6) is None
    assert recovery(records, 1, 1, None) is None and held(records, 1, ()) is None
    went_on = [*records, started(5, 2, continues=1)]
    found = recovery(went_on, 2, 1, ())
    assert found is not None and found.version == 5 and still_closed(went_on) == ()
    assert still_closed(WHOLE) == () == still_closed([*records[-2:], started()]), "pruned: the disk cannot show it"


def test_ledgers_that_began_with_the_same_are_as_good_and_a_chain_is_followed() -> None:
    """What was before may be pruned when the second ones have their snapshot; and third ones go on from the second."""
    went_on = started(5, 2, continues=1)
    written: Record = SnapshotWritten(ledger_generation=2, step=5, file="snapshot-5", digest=b"d")
    found = beginning([started(), went_on, written], (0, 1), 1, 5)
    assert found is not None and (found.base, found.snapshot, found.version, found.earlier) == (5, "snapshot-5", 5, 2)
    chain = [*WHOLE, went_on, *of(2, step(5)), started(6, 3, continues=2)]
    found = recovery(chain, 3, 1, ())
    assert found is not None and (found.base, found.version, found.earlier) == (2, 6, 1)
    assert [record.ledger_generation for record in found.replay] == [1, 1, 1, 2]


def test_ledgers_that_go_on_from_others_begin_from_what_those_left_on_the_disk() -> None:
    """As far as they go on from, and no further; the first record of their own is that they have begun."""
    plan = msgspec.structs.replace(make_plan(generation=2, ledgers=2, restore_step=1), continues=1)
    desk = Desk([started(), *step(0), step(1)[0]], plan=plan)
    (begun,) = desk.begun.records(ShardStarted)
    assert (begun.ledger_generation, begun.checkpoint_step, begun.continues) == (2, 1, 1)
    assert desk.begun.jobs(StartShard) == [StartShard(-1)] and desk.begun.dropped == [1]
    desk.shard.base_loaded(b"digest 0")
    folded, (reduce,) = desk.sum_up()
    desk.shard.reduced(reduce, 1.0, True)
    (apply,) = desk.take().jobs(Apply)
    desk.shard.applied(apply, b"d")
    assert folded == [0] and (desk.shard.phase, desk.shard.version) == (Phase.READY, 1)
    assert [job.version for job in desk.take().jobs(WriteSnapshot)] == [1]
    assert desk.contribute(2, step=1, key=300).records(ContributionStored)[0].ledger_generation == 2


@pytest.mark.parametrize(
    ("version", "closed", "expected"),
    [
        (1, -1, (0, 1)),
        (10, -1, (9, 10)),  # far from the newest: nobody asks for any of these
        (19, -1, (17, 18)),  # near it: what may be asked for stays, and what a run may go on from
        (20, -1, (17, 18)),
        (20, 19, (17, 20)),  # all have it
    ],
)
def test_what_a_replay_up_to_version_20_still_needs(version: int, closed: int, expected: tuple[int, int]) -> None:
    """The oldest version that is kept, and the oldest with its moments."""
    assert needed_in_replay(version, 20, closed, 1) == expected


@pytest.mark.parametrize("delay", [0, 1])
def test_a_replay_of_many_steps_holds_few_versions(delay: int) -> None:
    """A restart makes up to twenty steps again; it held all their versions with moments until the last one was there,
    twelve bytes a parameter each. What the next step runs on stays, and at the end all that may still be asked for."""
    steps = 12
    commits = [
        StepCommitted(
            ledger_generation=1, step=step, contributions=(contribution(step),), clip_factor=1.0, skipped=False,
            digest=b"digest %d" % (step + 1),
        )
        for step in range(steps)
    ]  # fmt: skip
    parts = [
        ContributionStored(
            ledger_generation=1, step=step, contribution=contribution(step), version=max(0, step - delay),
            tasks=(backward(step, 0), backward(step, 1)), losses=(), tensors=(shard_tensor(200 + step),),
        )
        for step in range(steps)
    ]  # fmt: skip
    records: list[Record] = [started()]
    for stored, commit in zip(parts, commits, strict=True):
        records += [stored, commit]
    desk = Desk(records, delay=delay, steps=2 * steps)
    held, whole = {0}, {0}
    desk.shard.base_loaded(b"digest 0")
    for step in range(steps):
        (fold,) = (effects := desk.take()).jobs(Fold)
        for drop in effects.jobs(DropVersions):
            held, whole = (
                {v for v in each if v >= bound} for each, bound in ((held, drop.version), (whole, drop.closed))
            )
        assert step in whole and max(0, step - delay) in held
        assert len(held) <= 4 and len(whole) <= 3
        desk.shard.folded(fold)
        (reduce,) = desk.take().jobs(Reduce)
        desk.shard.reduced(reduce, 1.0, True)
        (apply,) = desk.take().jobs(Apply)
        desk.shard.applied(apply, b"digest %d" % (step + 1))
        held, whole = held | {step + 1}, whole | {step + 1}
    assert desk.shard.phase is Phase.READY
    for drop in desk.take().jobs(DropVersions):
        held = {v for v in held if v >= drop.version}
    assert set(range(oldest_needed(steps, delay), steps + 1)) <= held


def test_who_has_nothing_of_what_ledgers_go_on_from_says_so() -> None:
    """Until it is fetched: a coordinator that counted on it threw closed steps away."""
    plan = msgspec.structs.replace(make_plan(generation=2, ledgers=2, restore_step=3), continues=1)
    desk = Desk(step(0)[:1], plan=plan)  # of other ledgers
    assert desk.shard.phase is Phase.RESTORING and desk.shard.held_version == -1
    desk.shard.base_loaded(b"digest 3")
    assert desk.shard.held_version == 3
