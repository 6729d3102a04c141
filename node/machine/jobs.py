"""Jobs: what a node's machines ask the compute lanes to do. Tensors are keys of the driver's store.

The tuples at the end say which lane does which; a lane runs its jobs one after the other, in order. The docstring says
what the result is. `node/compute` does them (`device_performer.py`, `lanes.py`, `store_lane.py`, `sum_lane.py`),
`tests/simulation` does them with integers, and `node/world` only says how long they take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.run.audits import Audit, Difference
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

OWED_ENDS_MAX = 2
"""Route ends whose weight gradients a volunteer may owe at once: the gradient of a head of 128,256 x 4,096 in bf16 is a
gigabyte, and one is worked off while the next comes in."""

# ---- lane "device": a volunteer, or a server that computes too ----------------------------------------------


@dataclass(frozen=True, slots=True)
class SetUpDevice:
    """The first job of the lane, and again when the stage changes: forgets everything before.

    Result: how many graphs fit into the device's memory.
    """

    config: RunConfig
    vocabulary: int
    plan: Plan
    stage: int


@dataclass(frozen=True, slots=True)
class LoadParameters:
    """Put a version together from its shards (in shard order) and keep it. Result: None.

    With `parameters = "p12"` a shard is whole, or what changed in each step since a version that was loaded before;
    the version's whole numbers are kept until a later job's `keep_from` lets them go.
    """

    version: int
    shards: tuple[TensorRef, ...]
    grids: tuple[TensorRef, ...] = ()
    """With `gradients = "gi"`, each shard's part of the grid on which the version's steps are summed."""
    lengths: tuple[int, ...] = ()
    """How many of the tensors in `shards` are of each shard; empty: one of each."""
    keep_from: int = 0
    """The oldest version whose whole numbers somebody may still send the difference to."""


@dataclass(frozen=True, slots=True)
class DropParameters:
    """Forget a version. Result: None."""

    version: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage forward, keep the graph under `task`. Result: TensorRef of the output, stored as `output`."""

    task: TaskId
    version: int
    input: TensorRef
    output: int | None
    """None: of a sample in segments, where only its graph is wanted. Then the result is None, too."""


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward through the kept graph (which ends with it), or recompute from `input` when that is given.

    Adds weight gradients to `accumulator` (None: throws them away); with `weights_later` a `WeightGradient` does it.
    Result: TensorRef stored as `input_gradient`, or None where that is None.
    Of a sample in segments it is about the last one that has not gone back, from the kept graph; `accumulator` counts
    with the first one, where the graph ends.
    """

    task: TaskId
    version: int
    output_gradient: TensorRef
    input: TensorRef | None
    input_gradient: int | None
    accumulator: int | None
    weights_later: bool = False


@dataclass(frozen=True, slots=True)
class RouteEnd:
    """Forward, loss and backward of a route's last stage at once.

    `tasks` are its F, L and B; `weights_later` is as with `Backward`. Result: (loss sum in nats, TensorRef stored as
    `input_gradient` or None).
    """

    tasks: tuple[TaskId, ...]
    version: int
    input: TensorRef
    labels: TensorRef
    input_gradient: int | None
    accumulator: int | None
    weights_later: bool = False


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The second part of a `Backward` or `RouteEnd` with `weights_later`, and to the same accumulator. Result: None.

    `task` is its B. What was left until then goes with `DropGraphs` of that task, if it is not wanted any more. A
    device without memory for it has done all at once, and nothing is left to do.
    """

    task: TaskId
    version: int
    accumulator: int


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """Loss and backward of a sample's last segment that has not gone back, at its route's end, from the kept graph.

    `task` is the segment's B, `labels` are the whole sample's; the rest is as for `RouteEnd` and `Backward`. Result:
    (the segment's loss sum in nats, TensorRef stored as `input_gradient` or None).
    """

    task: TaskId
    version: int
    labels: TensorRef
    input_gradient: int | None
    accumulator: int | None


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Forward without a graph, for the validation. With `labels`, at a route's end, its loss.

    Result: TensorRef of the output, stored as `output`; or the loss sum in nats.
    """

    task: TaskId
    version: int
    input: TensorRef
    labels: TensorRef | None
    output: int


@dataclass(frozen=True, slots=True)
class TakeGradient:
    """Cut the sum in `accumulator` into shards. Result: tuple of TensorRefs, stored as `shards`, in shard order."""

    accumulator: int
    shards: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compare:
    """How far what was claimed is from what was computed here, each one vector cut into tensors of one form.

    Result: |claimed - computed| / |computed|, 0 for equal ones; not finite where one of them is not. Of sums on a grid
    that were made for an audit: what the gradients must have differed by before they were rounded.
    """

    unit: int
    """Whose comparison it is: the accumulator of the computed sum."""
    version: int
    """Its grid is the unit of sums in the form `gi`."""
    computed: tuple[TensorRef, ...]
    claimed: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class TakeResidual:
    """To which side what was claimed lies of what was computed, as in `Compare`.

    Result: `RESIDUAL_PARTS` floats, (claimed - computed) / |computed|: along the computed vector, then in directions
    that the seed gives; all 0 where the vectors are equal, or cannot be compared.
    """

    unit: int
    version: int
    computed: tuple[TensorRef, ...]
    claimed: tuple[TensorRef, ...]
    directions: bytes


@dataclass(frozen=True, slots=True)
class TakeWeights:
    """A version's weights in fp32 and, where sums are on a grid, its grid. Result: TensorRefs stored as the keys."""

    version: int
    weights: int
    grid: int | None = None


@dataclass(frozen=True, slots=True)
class DropGraphs:
    """Forget the graphs of these forwards, and what these backwards have left for later. Result: None."""

    tasks: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class DropAccumulators:
    """Forget these sums. Result: None."""

    accumulators: tuple[int, ...]


# ---- lane "server": data, shards, optimizer ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareData:
    """Stage 0, before anything else: read and tokenize. Result: (vocabulary, data hash, token count)."""

    config: RunConfig


@dataclass(frozen=True, slots=True)
class SetUpServer:
    """Says which shard this is; forgets everything before but the data. Result: elements of the shard."""

    config: RunConfig
    vocabulary: int
    plan: Plan
    stage: int
    shard: int


@dataclass(frozen=True, slots=True)
class LoadBatch:
    """Stage 0: a microbatch, of the training or the validation.

    Result: (TensorRef of tokens as `tokens`, TensorRef of labels as `labels`).
    """

    step: int
    microbatch: int
    tokens: int
    labels: int
    mixtures: tuple[tuple[int, str], ...] = ()
    """(first step, mixture) of what the operator has made of `data.mixture`, up to this step."""
    counts: tuple[tuple[int, int], ...] = ()
    """How many microbatches steps have (`protocol.run.batches.Batches.counts`); empty: as many as the file says."""


@dataclass(frozen=True, slots=True)
class StartShard:
    """Version 0 from the run's seed, or a checkpoint's version and the parameters it has of the one before.

    With `continues` that version is taken from the pieces of its copy, or from what the lane still has of the shard
    that was set up before, under those ledgers. Result: digest of that version; empty: it has nothing of it.
    """

    checkpoint_step: int
    """-1: from the seed."""
    undone: bool = False
    """Later checkpoints, which lie there, are none any more."""
    continues: int = -1
    """The ledger generation that is gone on from; -1: none."""
    copy: tuple[TensorRef, ...] = ()
    """All pieces that `CopyState` has made, in order …"""
    digest: bytes = b""
    """… and its digest, which they must have."""


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Take the shard's state from a snapshot on its disk. Result: digest."""

    version: int
    file: str


@dataclass(frozen=True, slots=True)
class CopyState:
    """A piece of the shard's state of a version, as whole numbers of 32 bits, for its buddy.

    Result: (TensorRef stored as `key`, number of pieces, digest of the whole state), or None: the version is gone.
    """

    version: int
    piece: int
    words: int
    """Of a piece; the last one has what is left."""
    key: int


@dataclass(frozen=True, slots=True)
class Measure:
    """How large a contribution's part is that nobody measured as it came, before it counts: one in the form `gi`, or a
    server's own. Result: its square norm, or some more; infinite for what is not finite."""

    contribution: ContributionId
    step: int
    version: int
    """That it was computed on: its grid is the part's unit."""
    part: TensorRef


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """How large an activation, or the gradient of one, is that a server made where a volunteer's was doubted. Result:
    the root mean square of its values; infinite for what is not finite."""

    task: TaskId
    kind: Literal["F", "B"]
    """Whether it is a forward's output or a backward's input gradient."""
    node: NodeId
    result: TensorRef


@dataclass(frozen=True, slots=True)
class AddUp:
    """With `activations_up = "d4"`: what came up, plus what had gone down to who made it, in the form in which that
    goes on. Result: TensorRef stored as `sum`."""

    ledger_generation: int
    task: TaskId
    """A forward, whose output it is, or a backward, whose input gradient it is."""
    node: NodeId
    """Who made it."""
    part: TensorRef
    base: TensorRef
    sum: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Add a contribution's tensor to the step's sum. Result: None."""

    step: int
    part: TensorRef


@dataclass(frozen=True, slots=True)
class Reduce:
    """End the step's sum: everything is folded into it. Result: (square norm, all finite)."""

    step: int
    contribution_count: int
    """How many were folded (for the metrics)."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make version step + 1 out of version step and the sum that `Reduce` left for the step. Result: digest.

    A skipped step keeps the weights and moments; its version has the same content under the next number.
    """

    step: int
    clip_factor: float
    skipped: bool
    learning_rate: float = -1.0
    """Of the update; -1: as the run's file says."""
    scale: float = 1.0
    """What the sum is multiplied with beside the clip factor (`protocol.run.batches.Batches.scale`)."""


@dataclass(frozen=True, slots=True)
class ServeParameters:
    """The shard's part of a version in wire form, and of its grid. Result: TensorRefs stored as `key` and `grid`."""

    version: int
    key: int
    grid: int | None = None
    """Set with `gradients = "gi"`."""
    base: int | None = None
    """With `parameters = "p12"`: only what changed since this version."""


@dataclass(frozen=True, slots=True)
class DropVersions:
    """Forget versions below `version`, and of those below `closed`, the newest that every shard has committed, all but
    the weights: nobody goes on from them. Result: None."""

    version: int
    closed: int


@dataclass(frozen=True, slots=True)
class WriteSnapshot:
    """Write the shard's state of a version durably. Result: the file's name."""

    version: int


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write the shard's part of a checkpoint durably. Result: (file, bytes, digest).

    With a delayed update the next step runs on the version before, so its parameters go with it.
    """

    step: int
    version: int
    complete: tuple[int, ...] = ()
    """Where every server keeps its own parts: steps of checkpoints that this one was told are complete. By these it is
    decided which older parts go."""


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Decider: all parts of a checkpoint are durable; write its manifest, last. Result: the manifest's name."""

    step: int
    parts: tuple[tuple[int, int, str, int, bytes], ...]
    """(stage, shard, file, bytes, digest), in order."""
    data_cursor: int
    """The first sample that the step trains on."""


@dataclass(frozen=True, slots=True)
class WriteEvidence:
    """Write all that an audit compared to the disk, signed. Result: the file's name. It fails where there
    are too many, or the disk has too little room."""

    order: Audit
    differences: tuple[Difference, ...]
    names: tuple[str, ...]
    """Of the tensors: `weights`, `grid`, `part N` of the contribution, and what a task went in and came out with, as
    `KIND N` for the N-th backward of the order."""
    tensors: tuple[TensorRef, ...]


@dataclass(frozen=True, slots=True)
class FindCheckpoints:
    """Look which checkpoints lie where the run keeps them. Result: their steps, in any order.

    Something is written there before, and taken away: where writing hangs, there is no answer.
    """

    config: RunConfig
    told: tuple[int, ...] = ()
    """Checkpoints of which this server was told, where it keeps nothing but its own part and there is no manifest: such
    a one is found if that part lies here."""


@dataclass(frozen=True, slots=True)
class TryStore:
    """Whether the run's object store lets this server write, and take away. Result: nothing."""

    config: RunConfig
    ledger_generation: int


@dataclass(frozen=True, slots=True)
class BringPart:
    """Bring the shard's part of a checkpoint, which `WriteCheckpoint` has left on the disk, to the run's object store,
    and read it back there. Result: nothing."""

    config: RunConfig
    ledger_generation: int
    step: int
    stage: int
    shard: int
    file: str
    byte_count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class BringManifest:
    """Decider: all parts lie in the object store; put the manifest there that `WriteManifest` has left on the disk,
    unless one is there. Result: the manifest's name."""

    config: RunConfig
    ledger_generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Run a layer of the run's model for about half a second. Result: floating point operations a second."""

    config: RunConfig


DEVICE_JOBS = (
    SetUpDevice,
    LoadParameters,
    DropParameters,
    Forward,
    Backward,
    RouteEnd,
    WeightGradient,
    SegmentEnd,
    Evaluate,
    TakeGradient,
    Compare,
    TakeResidual,
    TakeWeights,
    DropGraphs,
    DropAccumulators,
)
STORE_JOBS = (TryStore, BringPart, BringManifest)
"""What may take as long as a line and somebody else's computers do: in a lane of its own, for which no training waits.
Each names the ledgers that it was ordered under, since the lanes end their jobs in any order."""
SUM_JOBS = (AddUp,)
"""What the next stage waits for: in a lane of its own, too, so that it does not wait for an optimizer or for a disk."""
SHARD_JOBS = (Measure, Fold, Reduce, Apply)
"""A shard's arithmetic on what lies on its disk: where it fails, the next start would do the same, and fail."""
FILE_JOBS = (WriteSnapshot, WriteCheckpoint, WriteManifest)
"""What training does not need: tried again, or given up, where it cannot be written."""
StoreJob = TryStore | BringPart | BringManifest
Job = (
    SetUpDevice
    | LoadParameters
    | DropParameters
    | Forward
    | Backward
    | RouteEnd
    | WeightGradient
    | SegmentEnd
    | Evaluate
    | TakeGradient
    | Compare
    | TakeResidual
    | TakeWeights
    | DropGraphs
    | DropAccumulators
    | PrepareData
    | SetUpServer
    | LoadBatch
    | StartShard
    | LoadSnapshot
    | CopyState
    | Measure
    | MeasureResult
    | AddUp
    | Fold
    | Reduce
    | Apply
    | ServeParameters
    | DropVersions
    | WriteSnapshot
    | WriteCheckpoint
    | WriteManifest
    | WriteEvidence
    | FindCheckpoints
    | StoreJob
    | Benchmark
)
