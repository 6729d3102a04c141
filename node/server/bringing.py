"""What a server brings to the run's object store, beside the training: one thing at a time, and only the newest.

A part or a manifest is on the server's own disk first, in the lane that has the shard; then it is brought, in a lane of
its own. A store that refuses, is away or hangs costs checkpoints and no step: it is an alert for the operator, and what
failed is brought again. A store that is slower than checkpoints come gets fewer of them.
"""

from __future__ import annotations

from node.machine.jobs import BringManifest, BringPart, StoreJob, TryStore
from node.server.context import StageContext
from protocol.messages import CheckpointPart

TRY_AGAIN_S = 15.0
"""As `node.server.saves.TRY_AGAIN_S`: an operator who mends a key waits no longer."""
_SUBJECT, _LATE = "object store", "object store is slow"


class Bringing:
    """Of one server under one ledger generation."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._under_way: dict[type[StoreJob], StoreJob] = {}
        self._next: dict[type[StoreJob], StoreJob] = {}
        """The newest of each kind that waits until the one under way has ended, or may be tried again."""
        self._try_again_at: float | None = None

    def begin(self) -> None:
        """Whether the store can be used is said before the first checkpoint is lost."""
        self._order(TryStore(self._context.written, self._context.generation))

    def part(self, part: CheckpointPart) -> None:
        """It lies on this server's disk."""
        self._order(
            BringPart(
                config=self._context.written,
                ledger_generation=self._context.generation,
                step=part.step,
                stage=part.stage,
                shard=part.shard,
                file=part.file,
                byte_count=part.byte_count,
                digest=part.digest,
            )
        )

    def manifest(self, step: int) -> None:
        """It lies on this server's disk, and all parts in the store."""
        self._order(BringManifest(self._context.written, self._context.generation, step))

    def _order(self, job: StoreJob) -> None:
        kind = type(job)
        if kind not in self._under_way:
            self._under_way[kind] = job
            self._next.pop(kind, None)
            self._context.out.compute(job)
            return
        self._next[kind] = job
        if isinstance(job, BringPart):
            busy = self._under_way[kind]
            assert isinstance(busy, BringPart)
            self._context.alerts[_LATE] = (
                f"the part of checkpoint {busy.step} is still on its way to {self._context.config.checkpoint.folder};"
                " those that come before it is there are left out"
            )

    def is_ours(self, job: StoreJob) -> bool:
        """Whether it was ordered under the present ledgers."""
        return job.ledger_generation == self._context.generation and self._under_way.get(type(job)) == job

    def brought(self, job: StoreJob) -> None:
        """The store has it."""
        for alert in (_SUBJECT, *((_LATE,) if isinstance(job, BringPart) else ())):
            self._context.alerts.pop(alert, None)
        self._under_way.pop(type(job))
        if (waiting := self._next.pop(type(job), None)) is not None:
            self._order(waiting)

    def failed(self, job: StoreJob, reason: str, now: float) -> None:
        """It is tried again in a while, unless a newer one is there by then."""
        what = "checkpoints" if isinstance(job, TryStore) else f"checkpoint {job.step}"
        self._context.alerts[_SUBJECT] = f"{what} cannot be brought to the object store: {reason}"
        self._context.out.log("error", "write failed", what=_SUBJECT, job=type(job).__name__, reason=reason)
        self._under_way.pop(type(job))
        self._next.setdefault(type(job), job)
        self._try_again_at = now + TRY_AGAIN_S

    def wake_at(self) -> float | None:
        return self._try_again_at

    def wake(self, now: float) -> None:
        if self._try_again_at is not None and now >= self._try_again_at:
            self._try_again_at = None
            for job in list(self._next.values()):
                if type(job) not in self._under_way:
                    self._order(job)
