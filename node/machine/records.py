"""Durable records of a server: what must survive a crash for nothing to be lost (state-and-trust 4.3, 4.4).

A server's journal is the list of these, in the order written. The machines write them with `Persist`, read them back
at start, and derive everything else. `step` decides when a record may be pruned.
"""

from __future__ import annotations

import msgspec

from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.messages import Share, StageSum, ValidationLoss
from protocol.run.changes import RunChange


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The base of all records; the class name is the tag on disk."""

    ledger_generation: int
    step: int


class ContributionStored(Record, frozen=True, kw_only=True):
    """Shard: its part of a contribution, with the tensor."""

    contribution: ContributionId
    version: int
    tasks: tuple[TaskId, ...]
    losses: tuple[float, ...]
    tickets: tuple[Ticket, ...] = ()
    """Of the leases that it pays for; a journal from before there were tickets has none."""
    square_norm: float = 0.0
    tensors: tuple[TensorRef, ...]


class StepCommitted(Record, frozen=True, kw_only=True):
    """Shard: version step + 1 was made from these contributions, and has this digest."""

    contributions: tuple[ContributionId, ...]
    clip_factor: float
    skipped: bool
    digest: bytes
    learning_rate: float = -1.0
    """Of the update; -1, as in a journal from before a run could be changed: as its file says."""


class SnapshotWritten(Record, frozen=True, kw_only=True):
    """Shard: the state of version `step` lies in a file."""

    file: str
    digest: bytes


class ShardStarted(Record, frozen=True, kw_only=True):
    """Shard: the ledger generation began here, from a checkpoint (its step), from the seed (-1), or from that version
    of other ledgers (`continues`), as it lay in memory."""

    stage: int
    shard: int
    shard_count: int
    checkpoint_step: int
    config_hash: bytes
    continues: int = -1


class StateLost(Record, frozen=True, kw_only=True):
    """Every server: what it or a fellow has on disk of this ledger generation contradicts itself; it gives it up, but
    for the version that all closed steps came to."""

    reason: str
    closed_version: int = -1
    """What a closed step has made of its shard is the same everywhere, whoever lost what since; -1: not even that."""


class StageKeyKnown(Record, frozen=True, kw_only=True):
    """Every server of a stage: the key of its lease tickets in this generation. The ledger drew it."""

    key: bytes


class ContributionAccepted(Record, frozen=True, kw_only=True):
    """Ledger: the contribution counts. The order of these records is the order of summation."""

    contribution: ContributionId
    tasks: tuple[TaskId, ...]
    losses: tuple[float, ...]


class StepSealed(Record, frozen=True, kw_only=True):
    """Ledger: the step happens, with these contributions in this order and the decision of stage 0."""

    contributions: tuple[ContributionId, ...]
    clip_factor: float
    skipped: bool
    learning_rate: float = -1.0
    stages: tuple[StageSum, ...] = ()
    changes: tuple[RunChange, ...] = ()
    norms: tuple[float, ...] = ()
    """Of the stage's shards: the square norms that it comes from."""


class StepDecided(Record, frozen=True, kw_only=True):
    """Decider: every stage is frozen; how the step ends, and what is reported of it."""

    clip_factor: float
    skipped: bool
    loss: float
    gradient_norm: float
    data_cursor: tuple[int, int]
    """First and one past the last sample number that the step trained on."""
    learning_rate: float = -1.0
    changes: int = 0
    """How many of the operator's changes were in force."""
    stages: tuple[StageSum, ...] = ()
    changed: tuple[RunChange, ...] = ()
    """What it follows from: the stages' sums, and these changes."""


class StepDone(Record, frozen=True, kw_only=True):
    """Decider: every stage has committed the step. `shares`: who computed it; kept until the coordinator knows."""

    shares: tuple[Share, ...] = ()
    validation: ValidationLoss | None = None
    """Of the version that the step ran on, if it was validated."""


class LastValidated(Record, frozen=True, kw_only=True):
    """Decider: what a version that no step runs on comes to on text that was kept aside (`RunConfig.final_steps`)."""

    validation: ValidationLoss


class CheckpointWritten(Record, frozen=True, kw_only=True):
    """Decider: the manifest of the checkpoint of version `step` is on disk."""

    manifest: str


class AuditStanding(Record, frozen=True, kw_only=True):
    """Ledger: what audits have shown of a member in this stage, whatever the generation. The newest one counts."""

    node: NodeId
    passed: int
    """Since it was last blamed."""
    judged: int
    strikes: tuple[int, ...]
    """Of which of its audits, by number, each was."""
    owed: bool
    lean_count: int = 0
    """Audits in the window that is averaged now; then what they come to (`node.server.leaning`)."""
    lean_sums: tuple[float, ...] = ()
    lean_squares: float = 0.0
    lean_along_squares: float = 0.0
    lean_windows: int = 0
    leaned: bool | None = None


RECORDS: tuple[type[Record], ...] = (
    ContributionStored,
    StepCommitted,
    SnapshotWritten,
    ShardStarted,
    StateLost,
    StageKeyKnown,
    ContributionAccepted,
    StepSealed,
    StepDecided,
    StepDone,
    LastValidated,
    CheckpointWritten,
    AuditStanding,
)
