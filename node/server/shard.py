"""The shard role: a slice of the stage's parameters and optimizer state, and the gradients that wait for a seal.

A part of a contribution is acknowledged only after it is durable; a version is served only after its commit is; a
version grows by exactly one per commit and never changes (T-I2, T-I5, T-I7 of state-and-trust 4.6). After a restart
the state is made again from a snapshot and the gradients in the journal, and its digests must come out the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from node.jobs import Apply, DropVersions, LoadSnapshot, Reduce, ServeParameters, StartShard, WriteCheckpoint
from node.jobs import WriteSnapshot as WriteSnapshotJob
from node.records import ContributionStored, Record, ShardStarted, SnapshotWritten, StepCommitted
from node.server.context import StageContext
from protocol.ids import ContributionId, NodeId, TensorRef
from protocol.messages import (
    CheckpointPart,
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

CONTRIBUTIONS_PER_STEP_MAX = 4096
"""More parts than this of one step are refused: a step has at most this many tasks in a stage worth uploading."""
CONTRIBUTIONS_PER_TASK_MAX = 4
"""Parts of one node and step, for each microbatch: an honest node has one accepted and a few that wait for a verdict.
So no node can make us hold more than a few times what an honest step weighs."""


class Phase(Enum):
    """The life of the shard: it serves only when it is ready."""

    NEW = "new"
    RESTORING = "restoring"
    READY = "ready"


@dataclass(slots=True)
class _Part:
    """This shard's part of one contribution."""

    message: Contribute
    durable: bool


@dataclass(slots=True)
class _Reduction:
    """The sum of a step's contributions, once the ledger has frozen them."""

    contributions: tuple[ContributionId, ...]
    square_norm: float = 0.0
    finite: bool = True
    finished: bool = False


class ShardRole:
    """One server's slice of its stage."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._out = context.out
        self.phase = Phase.NEW
        self.version = -1
        """Newest version whose commit is durable."""
        self._digests: dict[int, bytes] = {}
        self._parts: dict[ContributionId, _Part] = {}
        self._reductions: dict[int, _Reduction] = {}
        self._commits: dict[int, Commit] = {}
        """Seals that wait for their reduction, or for the version before."""
        self._applying: int | None = None
        self._served: dict[int, TensorRef] = {}
        self._serving: dict[int, None] = {}
        """Versions that the lane is putting into wire form."""
        self._asked: dict[int, list[NodeId]] = {}
        self._oldest_version = 0
        self._snapshots: list[int] = []
        self._checkpoint: CheckpointPart | None = None
        self._replay: list[StepCommitted] = []
        self._elements: int | None = None
        self._workers: dict[NodeId, None] = {}

    # ---- start ---------------------------------------------------------------------------------------------------

    def start(self, records: list[Record]) -> None:
        """Begins from what the disk holds of this ledger generation, or anew from the plan's checkpoint or seed."""
        generation = self._context.generation
        mine = [record for record in records if record.ledger_generation == generation]
        self.phase = Phase.RESTORING
        if not any(isinstance(record, ShardStarted) for record in mine):
            self._out.persist(
                ShardStarted(
                    ledger_generation=generation,
                    step=0,
                    stage=self._context.stage,
                    shard=self._context.shard,
                    shard_count=len(self._context.stage_servers),
                    checkpoint_step=self._context.plan.restore_step,
                    config_hash=self._context.config.config_hash(),
                )
            )
        commits = [record for record in mine if isinstance(record, StepCommitted)]
        newest = commits[-1].step + 1 if commits else self._first_version
        needed = self._oldest_needed(newest)
        snapshots = [r for r in mine if isinstance(r, SnapshotWritten) and r.step <= needed]
        for record in mine:
            if isinstance(record, ContributionStored):
                self._parts[record.contribution] = _Part(_as_message(record, self._context.shard), durable=True)
        self._snapshots = [record.step for record in mine if isinstance(record, SnapshotWritten)]
        if snapshots:
            base = snapshots[-1].step
            self._out.compute(LoadSnapshot(base, snapshots[-1].file))
        else:
            base = self._first_version
            assert not commits or commits[0].step == base, f"the journal begins at step {commits[0].step}, not {base}"
            self._out.compute(StartShard(self._context.plan.restore_step))
        self.version = base - 1
        self._oldest_version = base if snapshots else self._context.config.version_of(base)
        self._replay = [record for record in commits if record.step >= base]

    def end(self) -> None:
        """Lets go of every tensor; what is on the disk stays there."""
        for part in self._parts.values():
            self._out.drop(part.message.tensors)
        self._out.drop(self._served.values())
        self._parts, self._served = {}, {}

    def _oldest_needed(self, newest: int) -> int:
        """The oldest version that somebody may still ask for when `newest` is committed here.

        Step newest - 1 is committed here, so step newest - 1 - delay may still be open elsewhere (T-I8), and a server
        there may have lost what was computed for it.
        """
        return oldest_needed(newest, self._context.config.batch.delay)

    @property
    def _first_version(self) -> int:
        return max(0, self._context.plan.restore_step)

    def set_elements(self, elements: int) -> None:
        """Size of the shard: a part of a contribution with another size is refused."""
        self._elements = elements

    def base_loaded(self, digest: bytes) -> None:
        """The snapshot, checkpoint or seed is in memory; what was committed since is made again."""
        self.version += 1
        self._digests[self.version] = digest
        self._replay_next()

    def _replay_next(self) -> None:
        if not self._replay:
            self.phase = Phase.READY
            self.close_step(self._context.closed)
            # A crash may have come between the commit and the checkpoint; writing one twice does no harm.
            self._checkpoint_if_due()
            self._out.log("info", "shard ready", version=self.version)
            for node in self._workers:
                self._out.send(node, VersionReady(ledger_generation=self._context.generation, version=self.version))
            return
        record = self._replay[0]
        parts = tuple(self._parts[c].message.tensors[0] for c in record.contributions)
        self._reductions[record.step] = _Reduction(record.contributions)
        self._out.compute(Reduce(record.step, parts))

    # ---- contributions -------------------------------------------------------------------------------------------

    def on_contribute(self, peer: NodeId, message: Contribute) -> str:
        """Takes a part of a contribution. Returns the reason why it is refused, or an empty string."""
        context = self._context
        known = self._parts.get(message.contribution)
        if known is not None:
            self._out.drop(message.tensors)
            if known.durable and known.message.tasks == message.tasks:
                self._announce(message.contribution)
            return ""
        reason = self._refusal(message)
        if reason or self.phase is not Phase.READY or message.step < self.version:
            self._out.drop(message.tensors)
            return reason
        self._parts[message.contribution] = _Part(message, durable=False)
        self._out.persist(
            ContributionStored(
                ledger_generation=context.generation,
                step=message.step,
                contribution=message.contribution,
                version=message.version,
                tasks=message.tasks,
                losses=message.losses,
                tensors=message.tensors,
            )
        )
        return ""

    def _refusal(self, message: Contribute) -> str:
        context = self._context
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
        kept = [contribution.node for contribution, part in self._parts.items() if part.message.step == message.step]
        if len(kept) >= CONTRIBUTIONS_PER_STEP_MAX:
            return "size: too many contributions of one step"
        if kept.count(message.contribution.node) >= CONTRIBUTIONS_PER_TASK_MAX * context.config.batch.microbatches:
            return "size: too many contributions of one node"
        return ""

    def stored(self, record: ContributionStored) -> None:
        """The part is durable: only now the ledger hears of it."""
        part = self._parts.get(record.contribution)
        if part is not None:
            part.durable = True
            self._announce(record.contribution)

    def _announce(self, contribution: ContributionId) -> None:
        message = self._parts[contribution].message
        self._out.send(
            self._context.ledger,
            Stored(
                ledger_generation=self._context.generation,
                contribution=contribution,
                step=message.step,
                version=message.version,
                tasks=message.tasks,
                losses=message.losses,
                shard=self._context.shard,
            ),
        )

    def on_verdict(self, message: Verdict) -> None:
        """A refused contribution is forgotten (its record goes with the next pruning)."""
        if not message.accepted:
            part = self._parts.pop(message.contribution, None)
            if part is not None:
                self._out.drop(part.message.tensors)

    # ---- freeze and commit ---------------------------------------------------------------------------------------

    def on_freeze(self, message: Freeze) -> None:
        """Sums the step's contributions in the ledger's order (the order decides the last bits)."""
        if self.phase is not Phase.READY or message.step < self.version:
            return
        reduction = self._reductions.get(message.step)
        if reduction is None:
            self._reduce(message.step, message.contributions)
        elif reduction.finished:
            self._send_norm(message.step, reduction)

    def _reduce(self, step: int, contributions: tuple[ContributionId, ...]) -> None:
        missing = [c for c in contributions if c not in self._parts or not self._parts[c].durable]
        assert not missing, f"the ledger froze {missing}, which this shard never acknowledged (T-I2)"
        self._reductions[step] = _Reduction(contributions)
        self._out.compute(Reduce(step, tuple(self._parts[c].message.tensors[0] for c in contributions)))

    def reduced(self, job: Reduce, square_norm: float, finite: bool) -> None:
        reduction = self._reductions[job.step]
        reduction.square_norm, reduction.finite, reduction.finished = square_norm, finite, True
        if self._replay and self._replay[0].step == job.step:
            record = self._replay[0]
            self._out.compute(Apply(job.step, record.clip_factor, record.skipped))
        else:
            self._send_norm(job.step, reduction)
            self._apply_next()

    def _send_norm(self, step: int, reduction: _Reduction) -> None:
        self._out.send(
            self._context.ledger,
            PartialNorm(
                ledger_generation=self._context.generation,
                step=step,
                shard=self._context.shard,
                square_norm=reduction.square_norm,
                finite=reduction.finite,
            ),
        )

    def on_commit(self, message: Commit) -> None:
        """The step happens. A second word about the same step changes nothing and is acknowledged again."""
        if self.phase is not Phase.READY:
            return
        if message.step < self.version:
            if message.step + 1 in self._digests:
                self._send_committed(message.step)
            return
        self._commits[message.step] = message
        reduction = self._reductions.get(message.step)
        if reduction is None:
            self._reduce(message.step, message.contributions)
        else:
            assert reduction.contributions == message.contributions, "a seal with another list than its freeze (T-I9)"
        self._apply_next()

    def _apply_next(self) -> None:
        commit = self._commits.get(self.version)
        reduction = self._reductions.get(self.version)
        if commit is None or reduction is None or not reduction.finished or self._applying is not None:
            return
        self._applying = commit.step
        self._out.compute(Apply(commit.step, commit.clip_factor, commit.skipped))

    def applied(self, job: Apply, digest: bytes) -> None:
        if self._replay and self._replay[0].step == job.step:
            record = self._replay.pop(0)
            if record.digest != digest:
                raise ReplayError(f"version {job.step + 1} came out with another digest than before the restart")
            self._finish_version(job.step, digest)
            self._replay_next()
            return
        commit = self._commits[job.step]
        self._out.persist(
            StepCommitted(
                ledger_generation=self._context.generation,
                step=job.step,
                contributions=commit.contributions,
                clip_factor=commit.clip_factor,
                skipped=commit.skipped,
                digest=digest,
            )
        )

    def committed(self, record: StepCommitted) -> None:
        """The new version is durable: it may be served, and the ledger hears of it."""
        self._applying = None
        del self._commits[record.step]
        self._finish_version(record.step, record.digest)
        for node in self._workers:
            self._out.send(node, VersionReady(ledger_generation=self._context.generation, version=self.version))
        for peer in self._asked.pop(self.version, []):
            self._serve(peer, self.version)
        self._send_committed(record.step)
        self._snapshot_if_due()
        self._checkpoint_if_due()
        self._apply_next()

    def _finish_version(self, step: int, digest: bytes) -> None:
        assert step == self.version, f"version {step + 1} after {self.version} (T-I5)"
        self.version = step + 1
        self._digests[self.version] = digest
        self._digests.pop(self.version - 8, None)
        for contribution in self._reductions.pop(step).contributions:
            self._out.drop(self._parts.pop(contribution).message.tensors)

    def _send_committed(self, step: int) -> None:
        self._out.send(
            self._context.ledger,
            Committed(
                ledger_generation=self._context.generation,
                step=step,
                shard=self._context.shard,
                digest=self._digests[step + 1],
            ),
        )

    # ---- serving parameters --------------------------------------------------------------------------------------

    def on_fetch(self, peer: NodeId, message: FetchParameters) -> None:
        """Answers at once, or as soon as the version is there when it is the next one."""
        if self.phase is not Phase.READY:
            return  # the volunteer asks again at `VersionReady`
        if self._oldest_version <= message.version <= self.version:
            self._serve(peer, message.version)
        elif self.version < message.version <= self.version + 2:
            waiting = self._asked.setdefault(message.version, [])
            if peer not in waiting and len(waiting) < self._context.config.limits.volunteers_max:
                waiting.append(peer)
        else:
            self._out.send(
                peer,
                Parameters(
                    ledger_generation=self._context.generation,
                    version=message.version,
                    shard=self._context.shard,
                    tensors=(),
                ),
            )

    def _serve(self, peer: NodeId, version: int) -> None:
        served = self._served.get(version)
        if served is None:
            waiting = self._asked.setdefault(version, [])
            if peer not in waiting:
                waiting.append(peer)
            if version not in self._serving:
                self._serving[version] = None
                self._out.compute(ServeParameters(version, self._out.key()))
            return
        self._out.send(
            peer,
            Parameters(
                ledger_generation=self._context.generation,
                version=version,
                shard=self._context.shard,
                tensors=(served,),
            ),
        )

    def served(self, job: ServeParameters, tensor: TensorRef) -> None:
        del self._serving[job.version]
        if job.version < self._oldest_version:
            self._out.drop((tensor,))
            return
        self._served[job.version] = tensor
        for peer in self._asked.pop(job.version, []):
            self._serve(peer, job.version)

    # ---- snapshots, checkpoints, closing -------------------------------------------------------------------------

    def _snapshot_if_due(self) -> None:
        if self.version % self._context.config.limits.snapshot_steps == 0:
            self._out.compute(WriteSnapshotJob(self.version))

    def snapshot_written(self, job: WriteSnapshotJob, file: str) -> None:
        self._out.persist(
            SnapshotWritten(
                ledger_generation=self._context.generation,
                step=job.version,
                file=file,
                digest=self._digests.get(job.version, b""),
            )
        )

    def snapshot_durable(self, record: SnapshotWritten) -> None:
        """The newest snapshot that a restart could begin from makes everything older useless."""
        self._snapshots.append(record.step)
        usable = [version for version in self._snapshots if version <= self._oldest_needed(self.version)]
        if usable:
            self._snapshots = [version for version in self._snapshots if version >= usable[-1]]
            self._out.prune(usable[-1])

    def _checkpoint_if_due(self) -> None:
        config = self._context.config
        every = config.checkpoint.every_steps
        if self.version == config.steps or (every and self.version % every == 0):
            self._out.compute(WriteCheckpoint(self.version, self.version))

    def checkpoint_written(self, job: WriteCheckpoint, file: str, byte_count: int, digest: bytes) -> None:
        self._checkpoint = CheckpointPart(
            ledger_generation=self._context.generation,
            step=job.step,
            stage=self._context.stage,
            shard=self._context.shard,
            file=file,
            byte_count=byte_count,
            digest=digest,
        )
        self._out.send(self._context.plan.decider, self._checkpoint)

    def close_step(self, step: int) -> None:
        """Nobody asks for versions older than the oldest open step's any more."""
        if self.phase is not Phase.READY:
            return  # what is being replayed still needs all of it
        oldest = self._context.config.version_of(step + 1)
        if oldest > self._oldest_version:
            self._oldest_version = oldest
            self._out.compute(DropVersions(oldest))
            for version in [version for version in self._served if version < oldest]:
                self._out.drop((self._served.pop(version),))
            for version in [version for version in self._asked if version < oldest]:
                del self._asked[version]
        self._prune_parts()

    def _prune_parts(self) -> None:
        """Parts of closed or committed steps were accepted and applied, or nobody wants them."""
        limit = max(self._context.closed + 1, self.version)
        frozen = {c for reduction in self._reductions.values() for c in reduction.contributions}
        for contribution in [c for c, p in self._parts.items() if p.message.step < limit and c not in frozen]:
            part = self._parts[contribution]
            if part.durable:
                self._out.drop(self._parts.pop(contribution).message.tensors)

    # ---- links ---------------------------------------------------------------------------------------------------

    def worker_here(self, peer: NodeId) -> None:
        self._workers[peer] = None

    def greet(self, peer: NodeId) -> None:
        """A volunteer asks whether this shard serves; when it does not yet, it will hear of it."""
        if self.phase is Phase.READY:
            self._out.send(peer, VersionReady(ledger_generation=self._context.generation, version=self.version))

    def worker_gone(self, peer: NodeId) -> None:
        self._workers.pop(peer, None)
        for waiting in self._asked.values():
            if peer in waiting:
                waiting.remove(peer)

    def sync(self, peer: NodeId) -> None:
        """A server is ready: the ledger hears of every durable part, the decider of the last checkpoint."""
        if peer == self._context.ledger:
            for contribution, part in self._parts.items():
                if part.durable and part.message.step >= self.version:
                    self._announce(contribution)
        if peer == self._context.plan.decider and self._checkpoint is not None:
            self._out.send(peer, self._checkpoint)

    def check(self) -> None:
        for step, commit in self._commits.items():
            assert step == commit.step >= self.version, f"a seal of step {step} waits at version {self.version}"
        assert self.phase is not Phase.READY or self.version in self._digests, "a version without a digest"
        pending = sum(part.message.step < self._context.closed for part in self._parts.values() if part.durable)
        assert pending == 0 or self.phase is not Phase.READY, f"{pending} parts of closed steps are kept (L3)"


def oldest_needed(newest: int, delay: int) -> int:
    """The oldest version that a shard whose newest is `newest` may still be asked for; it restarts from there."""
    return max(0, newest - 1 - 2 * delay)


class ReplayError(RuntimeError):
    """The journal and the optimizer do not agree: the disk is damaged, or the arithmetic has changed."""


def _as_message(record: ContributionStored, shard: int) -> Contribute:
    return Contribute(
        ledger_generation=record.ledger_generation,
        contribution=record.contribution,
        step=record.step,
        version=record.version,
        tasks=record.tasks,
        losses=record.losses,
        shard=shard,
        tensors=record.tensors,
    )
