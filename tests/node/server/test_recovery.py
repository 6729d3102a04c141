"""What a disk gives back after a crash, also after it has lost something that it had acknowledged."""

from __future__ import annotations

import pytest

from node.machine.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.recovery import oldest_needed, recovery
from tests.node.setting import backward, contribution, shard_tensor


def started(checkpoint_step: int = -1, generation: int = 1) -> ShardStarted:
    return ShardStarted(
        ledger_generation=generation, step=0, stage=0, shard=1, shard_count=2, checkpoint_step=checkpoint_step,
        config_hash=b"h",
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
