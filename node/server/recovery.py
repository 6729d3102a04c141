"""What a server's disk gives back: which version of its shard can be made again, and from what.

A restart begins from the newest snapshot that is old enough to serve whoever may still ask, or from the checkpoint or
seed that the ledgers began with, and makes every committed step since once more. A disk may have lost something in
between (a snapshot's file, a record that it acknowledged and forgot): then the truth is an older version or none, and
it is told before anybody builds on it.

Ledgers that go on from a version of others (`Plan.continues`) begin in memory. Until their first snapshot is written
that version still lies on the disk, as the others left it, and is made again from there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from node.machine.jobs import DropVersions
from node.machine.outbox import Outbox
from node.machine.records import (
    ContributionStored,
    Record,
    ShardStarted,
    SnapshotWritten,
    StateLost,
    StepCommitted,
)


class StateLostError(Exception):
    """What a server has of the present ledgers cannot be what it was: a disk has lost what it had acknowledged, or gave
    back something else. The text says how that shows. Nobody can tell whose disk it was, or what is missing besides; so
    the run goes back to the last closed step where all can show what it came to, else to its newest checkpoint."""


def must_not_be(out: Outbox, version: int, why: str) -> NoReturn:
    """Ends what was just made of a disk as a version that is none. Its lane forgets it, and the older ones: it would
    offer it to ledgers that go on from that version (`StartShard.continues`). Raises `StateLostError`."""
    out.compute(DropVersions(version + 1, version + 1))
    raise StateLostError(f"version {version} {why}")


@dataclass(frozen=True, slots=True)
class Recovery:
    """How the shard of one ledger generation is made again."""

    started: ShardStarted
    base: int
    """The version that is loaded first."""
    snapshot: str
    """The file that it is loaded from; empty: the checkpoint or the seed that the ledgers began with."""
    replay: tuple[StepCommitted, ...]
    """Steps that are made again, from `base` on without a gap."""
    digest: bytes = b""
    """Of the snapshot, as its record says."""
    earlier: int = -1
    """The generation of the ledgers that `base` is of, where it is not those that began with `started`. With them no
    snapshot means the seed."""

    @property
    def version(self) -> int:
        """The newest version that comes out."""
        return self.base + len(self.replay)

    def sums(self, part: ContributionStored) -> bool:
        """Whether a part is in a step that is made again."""
        steps = [each for each in self.replay if each.step == part.step]
        return any(
            each.ledger_generation == part.ledger_generation and part.contribution in each.contributions
            for each in steps
        )


def oldest_needed(newest: int, delay: int) -> int:
    """The oldest version that a shard whose newest is `newest` may still be asked for; it restarts from there."""
    return max(0, newest - 1 - 2 * delay)


def needed_in_replay(version: int, newest: int, closed: int, delay: int) -> tuple[int, int]:
    """While steps are made again up to version `newest`, and `version` has just come out: the oldest version that is
    still needed, and the oldest whose moments are. Twenty steps lie between two snapshots, and a version of 500 M
    parameters is 6 GB.

    Args:
        closed: the newest step that is known to be closed; -1: none. What was committed here had opened, so all steps
            before it but for the delay's were closed.
    """
    oldest = min(version - delay, oldest_needed(newest, delay))
    return max(0, oldest), min(version, max(closed + 1, newest - 1 - delay))


def recovery(
    records: Sequence[Record], generation: int, delay: int, readable: Container[int] | None
) -> Recovery | None:
    """How to make the shard of `generation` again, or None when the disk never began it, or cannot.

    Args:
        records: durable ones, oldest first; snapshots without their file are left out by whoever read them.
        delay: of the run's updates.
        readable: steps of checkpoints that can be read; None where that is not known yet, so taken for granted.
    """
    mine = [record for record in records if record.ledger_generation == generation]
    started = _start_of(mine)
    if started is None:
        return None
    bases = _snapshots(mine)
    first = max(0, started.checkpoint_step)
    there = started.checkpoint_step == -1 or started.checkpoint_step in (readable or ())
    if readable is None or (there and started.continues < 0):  # what fellows had in memory is on no disk but this
        bases.insert(0, (first, "", b""))
    found: Recovery | None = None
    for base, file, digest in bases:
        one = Recovery(started, base, file, _steps(mine, base), digest)
        # Whoever still works on an older step than the newest here asks for the version that it began with; of the
        # first version of these ledgers there is none before.
        if file and base > max(first, oldest_needed(one.version, delay)):
            continue
        if found is None or one.version > found.version or (one.version == found.version and base >= found.base):
            found = one
    if started.continues >= 0 and (found is None or not found.snapshot):
        before = beginning(records, (started.stage, started.shard), started.continues, first)
        if before is not None:
            return replace(before, started=started, replay=before.replay + _steps(mine, first))
    return found


def beginning(records: Sequence[Record], place: tuple[int, int], continues: int, version: int) -> Recovery | None:
    """How to make `version` of the ledgers `continues` again, with which others begin; None: the disk cannot.

    What other ledgers have written that began with the same is as good: the steps before may be pruned since. No
    checkpoint is asked for, which may be gone: ledgers that begin from one have a snapshot of it.

    Args:
        place: stage and shard.
    """
    for start in [record for record in records if isinstance(record, ShardStarted)]:
        mine = [record for record in records if record.ledger_generation == start.ledger_generation]
        first = max(0, start.checkpoint_step)
        theirs = start.ledger_generation == continues
        as_they = (start.continues, first) == (continues, version)
        given_up = _start_of(mine) is None and version > closed_version(mine)
        if (start.stage, start.shard) != place or given_up or not (theirs or as_they):
            continue
        bases = ([(0, "", b"")] if start.checkpoint_step == -1 else []) + _snapshots(mine)
        for base, file, digest in reversed(bases):
            replay = _steps(mine, base, version)
            if base + len(replay) == version:
                return Recovery(start, base, file, replay, digest, start.ledger_generation)
        if theirs and 0 <= start.continues < continues and first <= version:
            before, replay = beginning(records, place, start.continues, first), _steps(mine, first, version)
            if before is not None and first + len(replay) == version:
                return replace(before, replay=before.replay + replay)
    return None


def restored(
    records: Sequence[Record], generation: int, delay: int, place: tuple[int, int], continues: int, version: int
) -> Recovery | None:
    """How a server that starts makes its shard again: as these ledgers left it, or as they begin (`beginning`)."""
    known = recovery(records, generation, delay, None)
    return beginning(records, place, continues, version) if known is None and continues >= 0 else known


def _start_of(records: Sequence[Record]) -> ShardStarted | None:
    """When the ledgers of these records began, unless this server has given up what it had of them."""
    if any(isinstance(record, StateLost) for record in records):
        return None
    return next((record for record in records if isinstance(record, ShardStarted)), None)


def closed_version(records: Sequence[Record]) -> int:
    """Of ledgers that this server has given up, the version that still holds; -1: none."""
    return max((record.closed_version for record in records if isinstance(record, StateLost)), default=-1)


def _snapshots(records: Sequence[Record]) -> list[tuple[int, str, bytes]]:
    """(version, file, digest), oldest first."""
    return [(record.step, record.file, record.digest) for record in records if isinstance(record, SnapshotWritten)]


def _steps(records: Sequence[Record], base: int, until: int | None = None) -> tuple[StepCommitted, ...]:
    """Of one generation: what was committed from version `base` on, as far as all that counts in it is here."""
    commits = {record.step: record for record in records if isinstance(record, StepCommitted)}
    stored = {record.contribution: None for record in records if isinstance(record, ContributionStored)}
    replay: list[StepCommitted] = []
    while (commit := commits.get(base + len(replay))) and commit.step != until:
        if not all(contribution in stored for contribution in commit.contributions):
            break
        replay.append(commit)
    return tuple(replay)


def held(records: Sequence[Record], delay: int, readable: Container[int]) -> tuple[int, int, int, int] | None:
    """(stage, shard, version, ledger generation) of what the disk can give back, or None: nothing of use."""
    newest = newest_start(records)
    known = None if newest is None else recovery(records, newest.ledger_generation, delay, readable)
    if newest is None or known is None:
        return None
    return newest.stage, newest.shard, known.version, newest.ledger_generation


def still_closed(records: Sequence[Record]) -> tuple[tuple[int, int, int, int], ...]:
    """(stage, shard, version, ledger generation) of what this disk can give back of the newest ledgers though their
    state is given up; empty where it is not, or where nothing holds."""
    newest = newest_start(records)
    if newest is None:
        return ()
    generation, place = newest.ledger_generation, (newest.stage, newest.shard)
    version = closed_version([record for record in records if record.ledger_generation == generation])
    if version < 0 or beginning(records, place, generation, version) is None:
        return ()
    return ((*place, version, generation),)


def newest_start(records: Sequence[Record]) -> ShardStarted | None:
    """The newest ledgers that this disk began."""
    return next((record for record in reversed(records) if isinstance(record, ShardStarted)), None)
