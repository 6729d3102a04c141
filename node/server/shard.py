"""The shard role: a slice of the stage's parameters and optimizer state, and the gradients that wait for a seal.

A part of a contribution is acknowledged only after it is durable; a version is served only after its commit is; a
version grows by exactly one per commit and never changes (T-I2, T-I5, T-I7 of state-and-trust 4.6). After a restart
the state is made again from a snapshot and the gradients in the journal, and its digests must come out the same.

An accepted part is folded into its step's one sum at once, in the ledger's order, and its bytes are forgotten: memory
holds the sum and what has no verdict yet. The sum dies with the process and the parts on the disk do not, so after a
restart each is folded again, once. The disk holds each part once, until a snapshot makes it useless; a snapshot is
taken as soon as what lies there is several times the state's size.
"""

from __future__ import annotations

from enum import Enum
from itertools import islice

import msgspec

from node.machine.jobs import (
    Apply,
    DropVersions,
    Fold,
    LoadSnapshot,
    Measure,
    Reduce,
    ServeParameters,
    StartShard,
)
from node.machine.jobs import WriteSnapshot as WriteSnapshotJob
from node.machine.numbers import same_losses
from node.machine.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.agreement import Agreement
from node.server.buddy import BuddyRole
from node.server.context import StageContext, stage_tasks
from node.server.judging import apply_job
from node.server.parts import JOURNAL_BYTES, RECORDS_PER_TASK_MAX, Part, Reduction, as_message, as_record, leases
from node.server.recovery import StateLostError, must_not_be, needed_in_replay, restored
from node.server.saves import Saves
from node.server.serving import Serving
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.messages import (
    Commit,
    Committed,
    Contribute,
    FetchParameters,
    Freeze,
    FrozenList,
    PartialNorm,
    Stored,
    Verdict,
    VersionReady,
)

_Key = tuple[ContributionId, int]
"""A contribution and its step: a number means nothing beyond the step that it was used in."""


class Phase(Enum):
    """The life of the shard: it serves only when it is ready."""

    NEW = "new"
    RESTORING = "restoring"
    READY = "ready"


class ShardRole:
    """One server's slice of its stage."""

    def __init__(self, context: StageContext, buddy: BuddyRole) -> None:
        self._context = context
        self._out = context.out
        self._buddy = buddy
        buddy.on_kept = self._kept_by_buddy
        self.phase = Phase.NEW
        self.version = -1
        """Newest version whose commit is durable."""
        self.began_with = -1
        """The version that was newest when this process was ready."""
        self._digests: dict[int, bytes] = {}
        self._parts: dict[_Key, Part] = {}
        self._spent: dict[tuple[TaskId, int], ContributionId] = {}
        """Leases of open steps, by task and fence, and the contribution that brought their gradient."""
        self._doubted: set[TaskId] = set()
        """Of contributions that did not count and are done again: in memory only, as a ledger's doubts are."""
        self._written: dict[tuple[NodeId, int], int] = {}
        """Parts of one node and step that went to the disk."""
        self._reductions: dict[int, Reduction] = {}
        self._ended: dict[int, Reduction] = {}
        """The same of steps that are committed here and may not be closed: their ledger may ask again."""
        self._accepted: dict[int, dict[int, ContributionId]] = {}
        """Step -> accepted contributions by their number, which is the order of summation."""
        self._folded: dict[int, int] = {}
        """Step -> how many of these are in the sum."""
        self._folding = False
        """One at a time: what comes from the disk is in memory only while it is added."""
        self._journal_bytes = 0
        """Of parts, since the newest snapshot was ordered."""
        self._commits: dict[int, Commit] = {}
        """Seals that wait for their reduction, or for the version before."""
        self._applying: int | None = None
        self._agreement = Agreement(context)
        self._serving = Serving(context)
        self._oldest_version = 0
        self._durable_version = -1
        """What the disk gives back, while it is being restored."""
        self.saves = Saves(context)
        self._base_digest = b""
        """Of the snapshot that is being loaded, as its record says; empty: not known."""
        self._replay: list[StepCommitted] = []
        self._elements: int | None = None
        self._workers: dict[NodeId, None] = {}

    # ---- start ---------------------------------------------------------------------------------------------------

    def start(self, records: list[Record]) -> None:
        """Begins from what the disk holds of this ledger generation, or of those that it goes on from, or anew from the
        plan's checkpoint or seed. What earlier ledgers have gathered besides is let go."""
        context, plan = self._context, self._context.plan
        generation, place = context.generation, (context.stage, context.shard)
        known = restored(records, generation, context.config.batch.delay, place, plan.continues, self._first_version)
        mine = [record for record in records if record.ledger_generation == generation]
        self.phase = Phase.RESTORING
        if not any(isinstance(record, ShardStarted) for record in mine):
            self._out.persist(
                ShardStarted(
                    ledger_generation=generation, step=0, stage=context.stage, shard=context.shard,
                    shard_count=len(context.stage_servers), checkpoint_step=plan.restore_step,
                    config_hash=context.written.config_hash(), continues=plan.continues,
                )
            )  # fmt: skip
        for record in records:
            if isinstance(record, ContributionStored):
                if record.ledger_generation == generation or (known is not None and known.sums(record)):
                    self._keep(as_message(record, context.shard), durable=True)
                else:
                    self._out.drop(record.tensors)
        self.saves.start(mine)
        base = self._first_version if known is None else known.base
        if known is not None and known.snapshot:
            self._base_digest = known.digest
            self._out.compute(LoadSnapshot(base, known.snapshot))
        elif known is not None and known.earlier >= 0:
            self._out.compute(StartShard(-1))
        else:
            self._out.compute(StartShard(plan.restore_step, plan.undone, plan.continues))
        self.version = base - 1
        self._oldest_version = base if base > self._first_version else context.config.version_of(base)
        self._replay = [] if known is None else list(known.replay)
        nothing = known is None and plan.continues >= 0  # what fellows have in memory is on no disk
        self._durable_version = -1 if nothing else base + len(self._replay)

    @property
    def held_version(self) -> int:
        """The newest version that is durable here, whether or not it is in memory again already."""
        return self.version if self.phase is Phase.READY else self._durable_version

    def end(self) -> None:
        """Lets go of every tensor; what is on the disk stays there."""
        for contribution in list(self._parts):
            self._forget(contribution)
        self._serving.end()
        self._buddy.end()

    @property
    def _first_version(self) -> int:
        return max(0, self._context.plan.restore_step)

    def set_elements(self, elements: int) -> None:
        """Size of the shard: a part of a contribution with another size is refused."""
        self._elements = elements
        self._buddy.set_elements(elements)

    def base_loaded(self, digest: bytes) -> None:
        """The snapshot, checkpoint or seed is in memory; what was committed since is made again."""
        if self._base_digest not in (b"", digest):
            must_not_be(self._out, self.version + 1, "of the snapshot is not what was written")
        self.version += 1
        self._digests[self.version] = digest
        self._buddy.loaded()
        self._replay_next()

    def _replay_next(self) -> None:
        if not self._replay:
            self.phase, self.began_with = Phase.READY, self.version
            self.close_step(self._context.closed)
            self._buddy.committed(self.version)
            # A crash may have come between the commit and the checkpoint; writing one twice does no harm.
            self.saves.begun_at(self.version)
            self._out.log("info", "shard ready", version=self.version)
            self.tell_workers()
            return
        record = self._replay[0]
        self._reduce(record.step, record.contributions)

    # ---- contributions -------------------------------------------------------------------------------------------

    def on_contribute(self, peer: NodeId, message: Contribute) -> str:
        """Takes a part of a contribution. Returns the reason why it is refused, or an empty string."""
        context = self._context
        known = self._parts.get((message.contribution, message.step))
        reason = self._refusal(message, known)
        ready = self.phase is Phase.READY and message.version <= self.version
        if reason or known is not None or not ready or message.step < self.version:
            self._out.drop(message.tensors)
            if known is not None and known.durable and ready and not reason:
                self._announce(known)
            return reason
        # A grid's whole numbers nobody could measure as they came; nor was what a stage's server made, which tells who
        # lied where it is done in the place of something doubted.
        ours = message.contribution.node in context.stage_servers
        judges = ours and message.square_norm == 0.0 and not self._doubted.isdisjoint(message.tasks)
        part = self._keep(message, durable=False)
        if message.tensors[0].form == "gi" or judges:
            self._measure(part)
        else:
            self._write(part)
        return ""

    def _measure(self, part: Part) -> None:
        message = part.message
        part.measured = False
        self._out.compute(Measure(message.contribution, message.step, message.version, message.tensors[0]))

    def _write(self, part: Part) -> None:
        """Its size is known first: after a restart the version that it is measured by may be gone, and parts of whole
        steps would be read at once."""
        self._out.persist(as_record(part.message, self._context.generation))

    def _keep(self, message: Contribute, durable: bool) -> Part:
        part = self._parts[message.contribution, message.step] = Part(message, durable)
        for lease in leases(message):
            self._spent[lease] = message.contribution
        writer = message.contribution.node, message.step
        self._written[writer] = self._written.get(writer, 0) + 1
        return part

    def part_of(self, contribution: ContributionId, step: int) -> TensorRef | None:
        """This shard's part, as long as it is not in the step's sum."""
        part = self._parts.get((contribution, step))
        return None if part is None or part.folded else part.message.tensors[0]

    @property
    def part_count(self) -> int:
        """Parts of contributions that wait here for their step's commit."""
        return len(self._parts)

    def _refusal(self, message: Contribute, known: Part | None) -> str:
        context = self._context
        if known is not None:
            before = known.message
            same = (before.tasks, before.tickets) == (message.tasks, message.tickets)
            same = same and same_losses(before.losses, message.losses)
            return "" if same else "replay: another contribution under a number that was used before"
        if any(contribution == message.contribution for contribution, _ in self._parts):
            return "replay: a number that was used in another step"
        if message.shard != context.shard:
            return "shape: a part for another shard"
        if len(message.tensors) != 1:
            return "shape: a part has one tensor"
        expected = ((self._elements,), context.config.wire.gradients)
        if (message.tensors[0].shape, message.tensors[0].form) != expected:
            return f"shape: expected {expected[1]}{list(expected[0])}, got {message.tensors[0]}"
        if message.version != context.config.version_of(message.step):
            return "version: not the version of its step"
        if any(task.step != message.step for task in message.tasks) or not message.tasks:
            return "decode: tasks of another step"
        if len(set(message.tasks)) != len(message.tasks):
            return "decode: a task twice"
        if any(self._spent.get(lease, message.contribution) != message.contribution for lease in leases(message)):
            return "replay: a lease whose gradient came with another contribution"
        for_tasks = self._written.get((message.contribution.node, message.step), 0) // RECORDS_PER_TASK_MAX
        if next(islice(stage_tasks(context, message.step), for_tasks, None), None) is None:  # it has no more of them
            return "size: too many contributions of one node"
        return ""

    def stored(self, record: ContributionStored) -> None:
        """The part is durable: only now the ledger hears of it, if its step was not committed without it meanwhile."""
        key = record.contribution, record.step
        if record.step < self.version:
            self._forget(key)
        elif (part := self._parts.get(key)) is not None:
            part.durable = True
            self._announce(part)

    def measured(self, job: Measure, square_norm: float) -> None:
        """The part's size is known: it is written, unless it was let go meanwhile, and perhaps sent again."""
        part = self._parts.get((job.contribution, job.step))
        if part is None or part.measured or part.message.tensors[0] != job.part:
            return
        part.message, part.measured = msgspec.structs.replace(part.message, square_norm=square_norm), True
        if job.step < self.version:
            self._forget((job.contribution, job.step))
        else:
            self._write(part)

    def _announce(self, part: Part) -> None:
        message = part.message
        self._out.send(
            self._context.ledger,
            Stored(
                ledger_generation=self._context.generation,
                contribution=message.contribution,
                step=message.step,
                version=message.version,
                tasks=message.tasks,
                losses=message.losses,
                shard=self._context.shard,
                square_norm=message.square_norm,
            ),
        )

    def on_verdict(self, message: Verdict) -> None:
        """An accepted contribution is added to the step's sum, a refused one is forgotten (its record goes with the
        next pruning)."""
        if not message.accepted:
            self._forget((message.contribution, message.step))
            self._doubted.update(message.tasks if message.doubted else ())
        elif message.step >= self.version:
            accepted = self._accepted.setdefault(message.step, {})
            if accepted.setdefault(message.number, message.contribution) != message.contribution:
                raise StateLostError(f"contribution {message.number} of step {message.step} is said to be another one")
            self._fold_next()

    def _forget(self, key: _Key) -> None:
        part = self._parts.pop(key, None)
        if part is not None and not part.folded:
            self._out.drop(part.message.tensors)

    def _fold_next(self) -> None:
        """Adds the next part to its step's sum, or ends a sum that is whole and whose version is here, by which one on
        a grid is read: a disk may have lost it. Older steps first: they are waited for."""
        if self._folding or self.phase is Phase.NEW:
            return
        for step in sorted(self._accepted):
            number = self._folded.get(step, 0)
            contribution = self._accepted[step].get(number)
            part = self._parts.get((contribution, step)) if contribution is not None else None
            if part is not None and part.durable:
                self._folding = part.folded = True
                self._folded[step] = number + 1
                self._out.compute(Fold(step, part.message.tensors[0]))
                self._out.drop(part.message.tensors)
                return
            reduction = self._reductions.get(step)
            here = self._context.config.version_of(step) <= self.version
            if here and reduction is not None and not reduction.ordered and number == len(reduction.contributions):
                reduction.ordered = True
                self._out.compute(Reduce(step, number))

    def folded(self, job: Fold) -> None:
        self._folding = False
        self._journal_bytes += job.part.byte_count
        self._fold_next()

    # ---- freeze and commit ---------------------------------------------------------------------------------------

    def on_freeze(self, message: Freeze) -> None:
        """Sums the step's contributions in the ledger's order (the order decides the last bits).

        A ledger freezes a step that is committed here when its disk has lost the seal. It gets the sum once more, and
        with the decision it seals the same again.
        """
        if self.phase is not Phase.READY:
            return
        if message.step < self.version:
            self._freeze_again(message)
            return
        reduction = self._reductions.get(message.step)
        if reduction is None:
            self._reduce(message.step, message.contributions)
        elif reduction.finished:
            self._send_norm(message.step, reduction)

    def _freeze_again(self, message: Freeze) -> None:
        ended = self._ended.get(message.step)
        if ended is None:
            return  # it is closed
        if ended.contributions != message.contributions:
            raise StateLostError(f"step {message.step} is committed, and is frozen with another list (T-I9)")
        self._send_norm(message.step, ended)

    def _reduce(self, step: int, contributions: tuple[ContributionId, ...]) -> None:
        parts = [self._parts.get((contribution, step)) for contribution in contributions]
        missing = sum(part is None or not part.durable for part in parts)
        if missing:
            raise StateLostError(f"step {step} counts {missing} contributions that are not on this disk (T-I2)")
        before = self._accepted.get(step, {})
        now = dict(enumerate(contributions))
        if before != {n: now.get(n) for n in before}:
            raise StateLostError(f"step {step} is frozen in another order than it was accepted")
        self._reductions[step] = Reduction(contributions)
        self._agreement.frozen(step, contributions)
        self._accepted[step] = now
        self._fold_next()

    def reduced(self, job: Reduce, square_norm: float, finite: bool) -> None:
        reduction = self._reductions[job.step]
        reduction.square_norm, reduction.finite, reduction.finished = square_norm, finite, True
        if self._replay and self._replay[0].step == job.step:
            record = self._replay[0]
            self._out.compute(apply_job(self._context, record))
        else:
            self._send_norm(job.step, reduction)
            self._apply_next()

    def _send_norm(self, step: int, reduction: Reduction) -> None:
        norm = PartialNorm(
            ledger_generation=self._context.generation, step=step, shard=self._context.shard,
            square_norm=reduction.square_norm, finite=reduction.finite,
        )  # fmt: skip
        self._out.send(self._context.ledger, norm)

    def on_frozen_list(self, message: FrozenList) -> None:
        """A fellow tells which list it was told."""
        self._agreement.on_frozen_list(message)
        self._apply_next()

    def square_norm(self, step: int) -> float | None:
        """What it came to here, if it is summed up."""
        reduction = self._reductions.get(step)
        return reduction.square_norm if reduction is not None and reduction.finished else None

    def on_commit(self, message: Commit) -> None:
        """The step happens. A second word about the same step changes nothing and is acknowledged again."""
        if self.phase is not Phase.READY:
            return
        if message.step < self.version:
            if message.step + 1 in self._digests:
                self._send_committed(message.step)
            return
        reduction = self._reductions.get(message.step)
        if reduction is None:
            self._reduce(message.step, message.contributions)
        elif reduction.contributions != message.contributions:
            raise StateLostError(f"step {message.step} is sealed with another list (T-I9)")
        self._commits[message.step] = message
        self._apply_next()

    def _apply_next(self) -> None:
        commit = self._commits.get(self.version)
        reduction = self._reductions.get(self.version)
        if commit is None or reduction is None or not reduction.finished or self._applying is not None:
            return
        if not self._agreement.reached(commit.step):
            return
        self._applying = commit.step
        self._out.compute(apply_job(self._context, commit))

    def applied(self, job: Apply, digest: bytes) -> None:
        if self._replay and self._replay[0].step == job.step:
            record = self._replay.pop(0)
            if record.digest != digest:
                must_not_be(self._out, job.step + 1, "came out with another digest than before the restart")
            self._finish_version(job.step, digest)
            known = self._context.closed, self._context.config.batch.delay
            self._drop_versions(*needed_in_replay(self.version, self._durable_version, *known))
            self._replay_next()
            return
        commit = self._commits[job.step]
        self._out.persist(
            StepCommitted(
                ledger_generation=self._context.generation, step=job.step, contributions=commit.contributions,
                clip_factor=commit.clip_factor, skipped=commit.skipped, digest=digest,
                learning_rate=commit.learning_rate,
            )
        )  # fmt: skip

    def committed(self, record: StepCommitted) -> None:
        """The new version is durable: it may be served, and the ledger hears of it."""
        self._applying = None
        del self._commits[record.step]
        self._finish_version(record.step, record.digest)
        self.tell_workers()
        self._serving.new_version(self.version, made_from_here=self._oldest_version < self.version)
        self._buddy.committed(self.version)
        self._send_committed(record.step)
        self._save_if_due()
        self._apply_next()

    def _finish_version(self, step: int, digest: bytes) -> None:
        assert step == self.version, f"version {step + 1} after {self.version} (T-I5)"
        self.version = step + 1
        self._digests[self.version] = digest
        self._digests.pop(self.version - 8, None)
        self._ended[step] = reduction = self._reductions.pop(step)
        self._ended.pop(step - 1 - self._context.config.batch.delay, None)  # closed, or this step had not opened (T-I8)
        for contribution in reduction.contributions:
            self._forget((contribution, step))
        self._accepted.pop(step, None)
        self._folded.pop(step, None)
        self._fold_next()

    def _kept_by_buddy(self, version: int) -> None:
        if self.phase is Phase.READY and version in self._digests and version > self._first_version:
            self._send_committed(version - 1)

    def _send_committed(self, step: int) -> None:
        """A step is over when no single disk can undo it any more."""
        if not self._buddy.holds(step + 1):
            return
        committed = Committed(
            ledger_generation=self._context.generation, step=step, shard=self._context.shard,
            digest=self._digests[step + 1],
        )  # fmt: skip
        self._out.send(self._context.ledger, committed)

    # ---- serving parameters --------------------------------------------------------------------------------------

    def on_fetch(self, peer: NodeId, message: FetchParameters) -> None:
        if self.phase is Phase.READY:  # else the volunteer asks again at `VersionReady`
            self._serving.on_fetch(peer, message, self._oldest_version, self.version)

    def served(self, job: ServeParameters, tensors: tuple[TensorRef, ...]) -> None:
        self._serving.served(job, tensors, self._oldest_version)

    # ---- snapshots, checkpoints, closing -------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        full = self._journal_bytes > JOURNAL_BYTES * (self._elements or 0)
        if self.saves.snapshot_if_due(self.version, full):
            self._journal_bytes = 0
        self.saves.checkpoint_if_due(self.version)

    def snapshot_written(self, job: WriteSnapshotJob, file: str) -> None:
        self.saves.snapshot_written(job, file, self._digests.get(job.version, b""))

    def snapshot_durable(self, record: SnapshotWritten) -> None:
        self.saves.snapshot_durable(record, self.version)

    def close_step(self, step: int) -> None:
        """Nobody asks for versions older than the oldest open step's any more."""
        if self.phase is not Phase.READY:
            return  # what is being replayed still needs all of it
        if self.version <= step:
            raise StateLostError(f"step {step} is closed, and this disk has version {self.version} only")
        self._drop_versions(self._context.config.version_of(step + 1), step + 1)
        self._serving.drop_below(self._oldest_version)
        self._agreement.close_step(step)
        self._prune_parts()

    def _drop_versions(self, oldest: int, closed: int) -> None:
        self._oldest_version = max(self._oldest_version, oldest)
        self._out.compute(DropVersions(self._oldest_version, closed))

    def _prune_parts(self) -> None:
        """Parts of closed or committed steps were applied, or nobody wants them."""
        limit = max(self._context.closed + 1, self.version)
        frozen = {(c, step): None for step, reduction in self._reductions.items() for c in reduction.contributions}
        for key in [key for key in self._parts if key[1] < limit and key not in frozen]:
            if self._parts[key].durable:
                self._forget(key)
        for lease in [lease for lease in self._spent if lease[0].step < limit]:
            del self._spent[lease]
        self._doubted = {task for task in self._doubted if task.step >= limit}
        for writer in [writer for writer in self._written if writer[1] < limit]:
            del self._written[writer]

    # ---- links ---------------------------------------------------------------------------------------------------

    def worker_here(self, peer: NodeId) -> None:
        self._workers[peer] = None

    def greet(self, peer: NodeId) -> None:
        """A volunteer asks whether this shard serves; when it does not yet, it will hear of it."""
        if self._takes_work:
            self._out.send(peer, VersionReady(ledger_generation=self._context.generation, version=self.version))

    def tell_workers(self) -> None:
        """The shard takes work, or has a new version: everybody who computes for the stage hears of it."""
        if self._takes_work:
            for peer in self._workers:
                self.greet(peer)

    @property
    def _takes_work(self) -> bool:
        """A shard that could not yet tell a lease from a lie lets results wait where they are."""
        return self.phase is Phase.READY and self._context.tickets.open

    def worker_gone(self, peer: NodeId) -> None:
        self._workers.pop(peer, None)
        self._serving.worker_gone(peer)

    def sync(self, peer: NodeId) -> None:
        """A server is ready: the ledger hears of every durable part, fellows of the lists, the decider of the last
        checkpoint."""
        if peer == self._context.ledger:
            for part in self._parts.values():
                if part.durable and part.message.step >= self.version:
                    self._announce(part)
        self._agreement.sync(peer)
        if peer == self._context.plan.decider and self.saves.part is not None:
            self._out.send(peer, self.saves.part)

    def check(self) -> None:
        for step, commit in self._commits.items():
            assert step == commit.step >= self.version, f"a seal of step {step} waits at version {self.version}"
        assert self.phase is not Phase.READY or self.version in self._digests, "a version without a digest"
        pending = sum(part.message.step < self._context.closed for part in self._parts.values() if part.durable)
        assert pending == 0 or self.phase is not Phase.READY, f"{pending} parts of closed steps are kept (L3)"
