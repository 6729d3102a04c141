"""What a server writes beside its journal: snapshots on its own disk, its part of checkpoints, and on one a manifest.

Training needs none of them at the moment that they are written: a disk that is full is an alert for the operator, and
the journal keeps what a snapshot would have made useless. What failed is tried again while it is still the newest,
because a run ends by its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.machine.jobs import BringPart, Job, StoreJob, WriteCheckpoint, WriteManifest, WriteSnapshot
from node.machine.records import Record, SnapshotWritten
from node.server.bringing import Bringing
from node.server.context import StageContext
from node.server.recovery import oldest_needed
from protocol.messages import CheckpointPart

TRY_AGAIN_S = 15.0
"""Between two attempts to write a checkpoint: an operator who frees a disk waits no longer for the last one."""
Saved = WriteCheckpoint | WriteManifest | WriteSnapshot
_SUBJECTS = {WriteCheckpoint: "checkpoint part", WriteManifest: "checkpoint", WriteSnapshot: "snapshot"}


class Saves:
    """Of one server under one ledger generation."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self._snapshots: list[int] = []
        self.part: CheckpointPart | None = None
        """This shard's part of the newest checkpoint."""
        self._failed: dict[type[Job], WriteCheckpoint | WriteManifest] = {}
        self._try_again_at: float | None = None
        self.store = Bringing(context) if context.config.checkpoint.is_url else None
        """Where checkpoints lie in an object store."""

    def start(self, records: Sequence[Record]) -> None:
        """Snapshots that the disk has of these ledgers."""
        if self.store is not None:
            self.store.begin()
        self._snapshots = [record.step for record in records if isinstance(record, SnapshotWritten)]

    # ---- orders --------------------------------------------------------------------------------------------------

    def snapshot_if_due(self, version: int, journal_is_full: bool) -> bool:
        """Whether a snapshot of the version that was just committed is ordered."""
        due = journal_is_full or version % self._context.config.limits.snapshot_steps == 0
        if due:
            self._out.compute(WriteSnapshot(version))
        return due

    def begun_at(self, version: int) -> None:
        """The state is in memory. Ledgers that begin from a checkpoint keep a copy of it at once: it may be thinned out
        before there is a snapshot that a restart can begin from, and alone on its disk no server has its manifest. What
        they go on from out of memory has no other file at all.
        Costs a write of the shard (8 GB at 8 B parameters in 16 shards) each time that the run goes back."""
        if version == self._context.plan.restore_step >= 0 and not self._snapshots:
            self._out.compute(WriteSnapshot(version))
        self.checkpoint_if_due(version)

    def checkpoint_if_due(self, version: int) -> None:
        config = self._context.config
        every = config.checkpoint.every_steps
        plan = self._context.plan
        if version == plan.restore_step >= 0 and plan.continues < 0:
            return  # the checkpoint that these ledgers began from, perhaps in another cut, which fellows still read
        if version in (config.steps, plan.save) or (every and version % every == 0):
            self._write(version)

    def _write(self, version: int) -> None:
        self._out.compute(WriteCheckpoint(version, version, self._complete()))

    def _complete(self) -> tuple[int, ...]:
        """What `WriteCheckpoint` wants to know: what all could begin from stays until there is another such one."""
        context, plan = self._context, self._context.plan
        if context.config.checkpoint.shared:
            return ()  # the manifests say it
        told = set() if context.readable is None else set(context.readable.steps)
        if plan.restore_step >= 0 and plan.continues < 0:
            told.add(plan.restore_step)
        return tuple(sorted(told))

    # ---- results -------------------------------------------------------------------------------------------------

    def snapshot_written(self, job: WriteSnapshot, file: str, digest: bytes) -> None:
        self._done(job)
        self._out.persist(
            SnapshotWritten(
                ledger_generation=self._context.generation,
                step=job.version,
                file=file,
                digest=digest,
            )
        )

    def snapshot_durable(self, record: SnapshotWritten, version: int) -> None:
        """The newest snapshot that a restart could begin from makes everything older useless."""
        self._snapshots.append(record.step)
        needed = oldest_needed(version, self._context.config.batch.delay)
        usable = [version for version in self._snapshots if version <= needed]
        if usable:
            self._snapshots = [version for version in self._snapshots if version >= usable[-1]]
            self._out.prune(usable[-1])

    def part_written(self, job: WriteCheckpoint, file: str, byte_count: int, digest: bytes) -> None:
        self._done(job)
        part = CheckpointPart(
            ledger_generation=self._context.generation,
            step=job.step,
            stage=self._context.stage,
            shard=self._context.shard,
            file=file,
            byte_count=byte_count,
            digest=digest,
        )
        if self.store is not None:
            self.store.part(part)
        else:
            self._announce(part)

    def _announce(self, part: CheckpointPart) -> None:
        self.part = part
        self._out.send(self._context.plan.decider, part)

    def manifest_written(self, job: WriteManifest) -> bool:
        """Whether the checkpoint is complete: in an object store it is when the manifest was brought there, too."""
        self._done(job)
        if self.store is not None:
            self.store.manifest(job.step)
        return self.store is None

    def brought(self, job: StoreJob) -> bool:
        """Something lies in the object store now. Returns whether it was ordered under these ledgers."""
        if self.store is None or not self.store.is_ours(job):
            return False
        self.store.brought(job)
        if isinstance(job, BringPart):
            self._announce(
                CheckpointPart(
                    ledger_generation=job.ledger_generation,
                    step=job.step,
                    stage=job.stage,
                    shard=job.shard,
                    file=job.file,
                    byte_count=job.byte_count,
                    digest=job.digest,
                )
            )
        return True

    def not_brought(self, job: StoreJob, reason: str, now: float) -> None:
        if self.store is not None and self.store.is_ours(job):
            self.store.failed(job, reason, now)

    def _done(self, job: Saved) -> None:
        self._context.alerts.pop(_SUBJECTS[type(job)], None)

    # ---- failures ------------------------------------------------------------------------------------------------

    def failed(self, job: Saved, reason: str, now: float) -> None:
        """Nothing was written, and nothing is lost."""
        subject, version = _SUBJECTS[type(job)], job.version if isinstance(job, WriteSnapshot) else job.step
        self._context.alerts[subject] = f"{subject} {version} cannot be written: {reason}"
        self._out.log("error", "write failed", what=subject, version=version, reason=reason)
        if not isinstance(job, WriteSnapshot):
            self._failed[type(job)] = job
            self._try_again_at = now + TRY_AGAIN_S

    def wake_at(self) -> float | None:
        if self.store is None:
            return self._try_again_at
        times = (self._try_again_at, self.store.wake_at())
        return min((time for time in times if time is not None), default=None)

    def wake(self, now: float, version: int) -> None:
        """Tries again; a part only while its version is the newest, which alone is in memory for sure."""
        if self.store is not None:
            self.store.wake(now)
        if self._try_again_at is None or now < self._try_again_at:
            return
        self._try_again_at = None
        failed, self._failed = self._failed, {}
        for job in failed.values():
            if isinstance(job, WriteManifest):
                self._out.compute(job)
            elif job.version == version:
                self._write(version)
