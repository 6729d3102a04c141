"""Does `node.machine.jobs` in no time of its own: says how long a job takes on a device, and how large its tensors are.

Times are operations over the device's speed, as the planners count them (`coordinator.planning.placement.pools`), and
bytes over the speed of memory; sizes are those of the run's wire forms. Nothing is computed: a loss is a constant,
a gradient's norm is one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from node.machine import jobs
from protocol.base.forms import GRID_BLOCK, TYPICAL_BITS, byte_bounds
from protocol.base.ids import TaskId, TensorRef
from protocol.run.course import VALIDATION_FIRST
from protocol.run.memory import VERSION_BYTES
from protocol.run.model_spec import BlockSpec, ModelSpec, blocks_of
from protocol.run.plan import Plan
from protocol.run.run import BoundaryForm, RunConfig
from protocol.run.segments import segment_ranges
from protocol.world.world import CannotComputeError

DEVICE_BYTES_PER_S = 1e10
"""What a volunteer's device and its host exchange: parameters that come, gradients that go."""
SERVER_BYTES_PER_S = 2e9
"""What a server's processor folds, updates and packs, in bytes of fp32: on one core 1.8 GB/s for a fold, 2.1 for an
update's 32 bytes, 4 for a measurement, 0.9 for a version that is packed, and more on several (`node/README.md`)."""
DISK_BYTES_PER_S = 5e8
WHOLE_P12_BITS = 10.0
"""Of a parameter for somebody without an earlier version; `TYPICAL_BITS` has what a change takes."""
UPDATE_BYTES = 32
"""Of a parameter that AdamW reads and writes: weight, two moments, gradient."""
LOSS_NATS = 5.0
GRAPHS_WANTED = 2
"""Where not even so many whole graphs fit, or as many as the plan wants, a device keeps inputs only and runs forwards
again, as `node.compute.worker`."""
OTHER_S = 1e-4
"""Of a job that moves no bytes to speak of."""
DATA_S = 1.0
"""Reading and tokenizing what is small; a large run has it prepared."""


@dataclass(frozen=True, slots=True)
class Device:
    """What a computer can do: operations and bytes of memory, as a network's file says."""

    forward_flops_per_s: float
    backward_flops_per_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Work:
    """A run's model, as its lanes feel it. One for all lanes of a world."""

    config: RunConfig
    vocabulary: int
    held_bytes: float
    """Kept per parameter by a volunteer."""
    value_bytes: float = 4.0
    """Of a value that stands from forward to backward."""
    executed: Counter[int] = field(default_factory=Counter)
    """Forwards, backwards and ends of routes that devices have done, by step; a forward that is run again counts."""

    @cached_property
    def spec(self) -> ModelSpec:
        return ModelSpec.of_run(self.config.model, self.vocabulary)

    @cached_property
    def blocks(self) -> Sequence[BlockSpec]:
        return blocks_of(self.spec)

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.config.batch.samples * self.config.model.context

    @cached_property
    def flops(self) -> float:
        """Of a token, forward and backward through the whole model."""
        return float(sum(block.forward_flops + block.backward_flops for block in self.blocks))

    def parameters(self, plan: Plan, stage: int) -> int:
        """Of a stage, all its chunks."""
        chunks = [plan.course.chunks[number] for number in plan.course.chunks_of(stage)]
        return sum(b.parameters for chunk in chunks for b in self.blocks[chunk.first_block : chunk.end_block])

    def elements(self, plan: Plan, stage: int, shard: int) -> int:
        """Of a shard: an even part, as near as whole numbers come."""
        count, parameters = len(plan.stages[stage].servers), self.parameters(plan, stage)
        return parameters * (shard + 1) // count - parameters * shard // count

    def tokens_per_s(self, device: Device) -> float:
        """What a benchmark on an even share of the blocks finds."""
        forward = sum(block.forward_flops for block in self.blocks) / self.config.stages.count
        backward = sum(block.backward_flops for block in self.blocks) / self.config.stages.count
        return 1.0 / (forward / device.forward_flops_per_s + backward / device.backward_flops_per_s)

    @cached_property
    def _boundary_bytes(self) -> dict[tuple[int, BoundaryForm], int]:
        """By tokens of a sample, and form."""
        samples, hidden, wire = self.config.batch.samples, self.config.model.hidden, self.config.wire
        lengths = [self.config.model.context, *(end - first for first, end in segment_ranges(self.config))]
        return {
            (length, form): byte_bounds((samples, length, hidden), form)[0]
            for length in lengths
            for form in (wire.activations_up, wire.activations_down)
        }

    def _length(self, task: TaskId) -> int:
        """Tokens of a sample that a task is about."""
        first, end = segment_ranges(self.config)[task.segment]
        return self.config.model.context if task.microbatch >= VALIDATION_FIRST else end - first

    def share(self, task: TaskId) -> float:
        """Of a microbatch's work. Segments are cut to cost the same."""
        return 1.0 if task.microbatch >= VALIDATION_FIRST else 1.0 / self.config.batch.segments

    def boundary(self, key: int, task: TaskId, form: BoundaryForm) -> TensorRef:
        """An activation between two stages, or its gradient; or what a stage has added to one."""
        length = self._length(task)
        shape = (self.config.batch.samples, length, self.config.model.hidden)
        return TensorRef(key, shape, form, self._boundary_bytes[length, form])

    def output(self, key: int, task: TaskId) -> TensorRef:
        """A task's, as it goes up."""
        return self.boundary(key, task, self.config.wire.output_form(task.position == 0))

    def input_gradient(self, key: int, task: TaskId, ends: bool) -> TensorRef:
        """The same; `ends`: of a route's end."""
        return self.boundary(key, task, self.config.wire.input_gradient_form(ends))

    def numbers(self, key: int) -> TensorRef:
        """A microbatch's tokens, or its labels."""
        shape = (self.config.batch.samples, self.config.model.context)
        return TensorRef(key, shape, "int32", 4 * shape[0] * shape[1])

    @staticmethod
    def vector(key: int, elements: int, form: Any, bits: float | None = None) -> TensorRef:
        """A shard's part of parameters or of gradients."""
        return TensorRef(key, (elements,), form, int(elements * (TYPICAL_BITS[form] if bits is None else bits) / 8) + 8)


@dataclass(slots=True)
class _Place:
    """The stage that a device works for."""

    plan: Plan
    stage: int
    parameters: int
    forward_s: dict[int, float]
    """Of a microbatch, by chunk."""
    backward_s: dict[int, float]


class WorldLanes:
    """The lanes of one computer."""

    def __init__(self, work: Work, device: Device) -> None:
        self._work = work
        self._device = device
        self._recomputes = False
        self._place: _Place | None = None
        self._server: jobs.SetUpServer | None = None
        self._elements = 0

    # ---- time ----------------------------------------------------------------------------------------------------

    def takes(self, job: jobs.Job) -> tuple[str, float]:
        """The lane that does it, and for how long."""
        kind = type(job)
        if kind in _DEVICE:
            return "device", self._device_s(job)
        if isinstance(job, jobs.AddUp):
            # Decoded twice, added and encoded.
            return "sums", 4 * 4.0 * math.prod(job.base.shape) / SERVER_BYTES_PER_S
        return "server", self._server_s(job)

    def _device_s(self, job: jobs.Job) -> float:
        match job:
            case jobs.SetUpDevice():
                self._set_up(job)
            case jobs.Forward():
                return self._work.share(job.task) * self._at(job.task)[0]
            case jobs.SegmentEnd():
                return self._work.share(job.task) * self._at(job.task)[1]
            case jobs.Backward():
                forward_s, backward_s = (self._work.share(job.task) * each for each in self._at(job.task))
                backward_s -= backward_s / 2 if job.weights_later else 0.0
                return backward_s + (forward_s if self._recomputes or job.input is not None else 0.0)
            case jobs.RouteEnd():
                forward_s, backward_s = self._at(job.tasks[0])
                return forward_s + (backward_s / 2 if job.weights_later else backward_s)
            case jobs.WeightGradient():
                return self._at(job.task)[1] / 2
            case jobs.LoadParameters() | jobs.TakeGradient():
                return 4.0 * (0 if self._place is None else self._place.parameters) / DEVICE_BYTES_PER_S
        return OTHER_S

    def _at(self, task: TaskId) -> tuple[float, float]:
        """Forward and backward of a task's chunk."""
        place = self._place
        assert place is not None, "a device is set up before it computes"
        chunk = place.plan.chunk_at(task.step, task.microbatch, task.position)
        return place.forward_s[chunk], place.backward_s[chunk]

    def _set_up(self, job: jobs.SetUpDevice) -> None:
        work, device, course = self._work, self._device, job.plan.course
        forward_s, backward_s = {}, {}
        for number in course.chunks_of(job.stage):
            blocks = work.blocks[course.chunks[number].first_block : course.chunks[number].end_block]
            forward_s[number] = work.tokens * sum(b.forward_flops for b in blocks) / device.forward_flops_per_s
            backward_s[number] = work.tokens * sum(b.backward_flops for b in blocks) / device.backward_flops_per_s
        parameters = work.parameters(job.plan, job.stage)
        self._place = _Place(job.plan, job.stage, parameters, forward_s, backward_s)

    def _server_s(self, job: jobs.Job) -> float:
        match job:
            case jobs.PrepareData():
                return DATA_S
            case jobs.SetUpServer():
                self._server = job
                self._elements = self._work.elements(job.plan, job.stage, job.shard)
                return OTHER_S
            case jobs.Fold() | jobs.Measure() | jobs.MeasureResult() | jobs.ServeParameters():
                return 4.0 * self._elements / SERVER_BYTES_PER_S
            case jobs.CopyState():
                return 4.0 * job.words / SERVER_BYTES_PER_S
            case jobs.Apply() | jobs.StartShard():
                return UPDATE_BYTES * self._elements / SERVER_BYTES_PER_S
            case jobs.WriteSnapshot() | jobs.WriteCheckpoint() | jobs.LoadSnapshot():
                return VERSION_BYTES * self._elements / DISK_BYTES_PER_S
        return OTHER_S

    # ---- results -------------------------------------------------------------------------------------------------

    def result(self, job: jobs.Job) -> Any:
        """As the docstring of each job says. Raises `CannotComputeError` where a stage does not fit into the memory."""
        work, wire = self._work, self._work.config.wire
        match job:
            case jobs.Forward():
                work.executed[job.task.step] += 1
                return None if job.output is None else work.output(job.output, job.task)
            case jobs.Backward():
                work.executed[job.task.step] += 1 if job.input is None else 2
                return None if job.input_gradient is None else work.input_gradient(job.input_gradient, job.task, False)
            case jobs.SegmentEnd():
                work.executed[job.task.step] += 1
                key = job.input_gradient
                gradient = None if key is None else work.input_gradient(key, job.task, True)
                return LOSS_NATS * self._work.share(job.task) * work.tokens, gradient
            case jobs.RouteEnd():
                work.executed[job.tasks[0].step] += 1
                key = job.input_gradient
                gradient = None if key is None else work.input_gradient(key, job.tasks[0], True)
                return LOSS_NATS * work.tokens, gradient
            case jobs.TakeGradient():
                assert self._place is not None
                plan, stage = self._place.plan, self._place.stage
                parts = [work.elements(plan, stage, shard) for shard in range(len(job.shards))]
                return tuple(work.vector(*part, wire.gradients) for part in zip(job.shards, parts, strict=True))
            case jobs.SetUpDevice():
                return self._graphs(job)
            case jobs.Compare():
                return 0.0  # nobody lies here, and values are not there
            case jobs.TakeResidual():
                return ()
            case jobs.PrepareData():
                return work.vocabulary, "simulated", 10**12
            case jobs.SetUpServer():
                return self._elements
            case jobs.LoadBatch():
                return work.numbers(job.tokens), work.numbers(job.labels)
            case jobs.ServeParameters():
                bits = WHOLE_P12_BITS if wire.parameters == "p12" and job.base is None else None
                parameters = work.vector(job.key, self._elements, wire.parameters, bits)
                if job.grid is None:
                    return (parameters,)
                return parameters, work.vector(job.grid, -(-self._elements // GRID_BLOCK), "gi")
            case jobs.CopyState():
                words = VERSION_BYTES // 4 * self._elements
                count = max(0, min(job.words, words - job.piece * job.words))
                copied = TensorRef(job.key, (count,), "int32", 4 * count)
                return copied, max(1, -(-words // job.words)), _digest(job.version)
            case jobs.Measure() | jobs.MeasureResult():
                return 1.0
            case jobs.AddUp():
                return work.boundary(job.sum, job.task, wire.activations_down)
            case jobs.Reduce():
                return 1.0, True
            case jobs.StartShard():
                return _digest(job.checkpoint_step + 1)
            case jobs.LoadSnapshot():
                return _digest(job.version)
            case jobs.Apply():
                return _digest(job.step + 1)
            case jobs.WriteSnapshot():
                return f"snapshot-{job.version}"
            case jobs.WriteCheckpoint():
                return f"{job.step}", VERSION_BYTES * self._elements, _digest(job.version)
            case jobs.WriteManifest() | jobs.BringManifest():
                return f"manifest-{job.step}"
            case jobs.FindCheckpoints():
                return job.told
        return None

    def _graphs(self, job: jobs.SetUpDevice) -> int:
        """How many fit beside weights and gradients: whole ones, or else inputs of blocks only."""
        work, course = self._work, job.plan.course
        assert self._place is not None
        free = self._device.memory_bytes - work.held_bytes * self._place.parameters
        chunks = [course.chunks[number] for number in course.chunks_of(job.stage)]
        whole = light = 0.0
        for chunk in chunks:
            blocks = work.blocks[chunk.first_block : chunk.end_block]
            whole = max(whole, work.value_bytes * work.tokens * sum(b.kept_values for b in blocks))
            inputs = sum(min(b.kept_values, work.spec.boundary_values) for b in blocks)
            light = max(light, work.value_bytes * work.tokens * inputs)
        found = int(free // max(whole, 1.0))
        self._recomputes = found < max(GRAPHS_WANTED, job.plan.graphs_wanted(job.stage))
        if self._recomputes:
            found = int(free // max(light, 1.0))
        if found < 1:
            raise CannotComputeError(
                f"out of memory: this stage needs {(work.held_bytes * self._place.parameters + light) / 2**20:,.0f} MB"
                f" of the device, which has {self._device.memory_bytes / 2**20:,.0f} MB"
            )
        return found


_DEVICE = frozenset(jobs.DEVICE_JOBS)


def _digest(version: int) -> bytes:
    return version.to_bytes(32, "big")
