"""What a server's disk gives back: which version of its shard can be made again, and from what.

A restart begins from the newest snapshot that is old enough to serve whoever may still ask, or from the checkpoint or
seed that the ledgers began with, and makes every committed step since once more. A disk may have lost something in
between (a snapshot's file, a record that it acknowledged and forgot): then the truth is an older version or none, and
it is told before anybody builds on it.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

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
    back something else. The text says how that shows. Nobody can tell whose disk it was, or what is missing besides;
    so the run goes back to its newest checkpoint."""


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

    @property
    def version(self) -> int:
        """The newest version that comes out."""
        return self.base + len(self.replay)


def oldest_needed(newest: int, delay: int) -> int:
    """The oldest version that a shard whose newest is `newest` may still be asked for; it restarts from there."""
    return max(0, newest - 1 - 2 * delay)


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
    started = next((record for record in mine if isinstance(record, ShardStarted)), None)
    if started is None or any(isinstance(record, StateLost) for record in mine):
        return None
    commits = {record.step: record for record in mine if isinstance(record, StepCommitted)}
    stored = {record.contribution: None for record in mine if isinstance(record, ContributionStored)}
    bases = [(record.step, record.file) for record in mine if isinstance(record, SnapshotWritten)]
    first = max(0, started.checkpoint_step)
    there = started.checkpoint_step == -1 or started.checkpoint_step in (readable or ())
    if readable is None or (there and started.continues < 0):  # what fellows had in memory is on no disk but this
        bases.insert(0, (first, ""))
    found: Recovery | None = None
    for base, file in bases:
        replay: list[StepCommitted] = []
        while (commit := commits.get(base + len(replay))) and all(c in stored for c in commit.contributions):
            replay.append(commit)
        one = Recovery(started, base, file, tuple(replay))
        # Whoever still works on an older step than the newest here asks for the version that it began with; of the
        # first version of these ledgers there is none before.
        if file and base > max(first, oldest_needed(one.version, delay)):
            continue
        if found is None or one.version > found.version or (one.version == found.version and base >= found.base):
            found = one
    return found


def held(records: Sequence[Record], delay: int, readable: Container[int]) -> tuple[int, int, int, int] | None:
    """(stage, shard, version, ledger generation) of what the disk can give back, or None: nothing of use."""
    newest = newest_start(records)
    known = None if newest is None else recovery(records, newest.ledger_generation, delay, readable)
    if newest is None or known is None:
        return None
    return newest.stage, newest.shard, known.version, newest.ledger_generation


def newest_start(records: Sequence[Record]) -> ShardStarted | None:
    """The newest ledgers that this disk began."""
    return next((record for record in reversed(records) if isinstance(record, ShardStarted)), None)
