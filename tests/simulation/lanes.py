"""Does `node.machine.jobs` with whole numbers, as `node/compute` does with torch (`device_performer`, `lanes`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from node.machine import jobs
from protocol.base.forms import byte_bounds
from protocol.base.ids import TaskId, TensorRef
from protocol.run.audits import AUDIT_SLICE
from protocol.run.course import VALIDATION_FIRST
from protocol.run.segments import segment_ranges
from tests.simulation.arithmetic import (
    PRIME,
    SHARD_ELEMENTS,
    State,
    Vector,
    Visit,
    add,
    backward,
    digest,
    first_averages,
    forward,
    from_grid,
    grid_of,
    next_averages,
    norm,
    on_grid,
    recut,
    route_end,
    sample,
    segment_of,
    shards,
    start_vector,
    update,
)

ANNOUNCED_ELEMENTS = 100_000
"""What a shard says that it holds, in place of `SHARD_ELEMENTS`: transfers take the time of so many."""


NEED_DEVICE = (
    jobs.LoadParameters, jobs.Forward, jobs.Backward, jobs.RouteEnd, jobs.SegmentEnd, jobs.WeightGradient,
    jobs.Evaluate, jobs.TakeGradient,
)  # fmt: skip
"""What a device refuses whose set-up has failed."""


class FileLostError(Exception):
    """Something that a job needs is gone, or has no room: the lane reports that it cannot."""


class Held(NamedTuple):
    """A version of a shard."""

    weights: Vector
    moments: Vector
    """Empty where nobody goes on from it."""
    averages: Vector
    """What makes the grid of the steps that run on it; empty where sums are on no grid."""


class SharedFolder(dict[str, Any]):
    """The folder that all servers share: checkpoint parts and manifests by name."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        """No room for anything new."""
        self.salted = False
        """Whether every write of the same state gives other bytes, as if the format were not canonical."""
        self.write_count = 0
        self.harmed = False
        """Whether the weather has taken a file."""

    def complete(self) -> tuple[int, ...]:
        """Steps of the newest checkpoints that verify, newest first: as many as a server names."""
        return tuple(sorted(self.whole(), reverse=True)[:16])

    def undo_after(self, step: int) -> None:
        for name in [name for name in self if name.startswith("manifest-")]:
            if int(name.removeprefix("manifest-")) > step:
                del self[name]

    def whole(self) -> list[int]:
        """Steps of all checkpoints that verify."""
        return [
            int(name.removeprefix("manifest-"))
            for name, parts in self.items()
            if name.startswith("manifest-") and all(part[2] in self for part in parts)
        ]

    def put(self, name: str, value: Any) -> None:
        if self.full:
            raise FileLostError("no space left on device")
        self[name] = value


@dataclass
class Lanes:
    """The device lane and the server lane of one host. `store` is the host's: key -> value.

    `files` is the host's disk (snapshots), `shared` a folder that all servers see (checkpoints).
    """

    store: dict[int, Any]
    files: dict[str, Any]
    shared: SharedFolder
    flops_per_s: float = 1e9
    """What a benchmark finds."""
    versions: dict[int, Vector] = field(default_factory=dict)
    grids: dict[int, Vector] = field(default_factory=dict)
    """By version."""
    bases: dict[int, Vector] = field(default_factory=dict)
    """Versions that a server may send the difference to."""
    graphs: dict[TaskId, tuple[Vector, int]] = field(default_factory=dict)
    visits: dict[TaskId, Visit] = field(default_factory=dict)
    """Of samples in segments."""
    sums: dict[int, Vector] = field(default_factory=dict)
    owed: dict[TaskId, Vector] = field(default_factory=dict)
    """What backwards have left for later."""
    shard: dict[int, Held] = field(default_factory=dict)
    before: dict[int, Held] = field(default_factory=dict)
    """The same shard's versions under the ledgers that the present ones go on from."""
    folds: dict[int, Vector] = field(default_factory=dict)
    totals: dict[int, tuple[Vector, Vector]] = field(default_factory=dict)
    """The gradient of a step, and the sum that it was made of."""
    inputs: dict[int, Any] = field(default_factory=dict)
    added: dict[TaskId, None] = field(default_factory=dict)
    """Backwards whose weight gradients have been in a sum since the device was set up."""
    mounted: bool = True
    """Whether this host sees `shared`; one that does not has no place yet, or cannot begin there."""
    failed: bool = False
    """Whether the device has ever lost what was on it."""
    device: jobs.SetUpDevice | None = None
    place: jobs.SetUpServer | None = None

    def perform(self, job: jobs.Job, inputs: dict[int, Any]) -> Any:
        """Does a job; `inputs` are the values of the tensors that it names, as they were when it was ordered."""
        self.inputs = inputs
        if self.device is None and isinstance(job, NEED_DEVICE):
            raise FileLostError("no stage was set up")
        match job:
            case jobs.SetUpDevice():
                self.device = job
                self.added = {}
                self.versions, self.graphs, self.visits, self.sums, self.bases = {}, {}, {}, {}, {}
                self.owed, self.grids = {}, {}
                return 1 << 20
            case jobs.LoadParameters():
                self._load_parameters(job)
            case jobs.DropParameters():
                self.versions.pop(job.version, None)
                self.grids.pop(job.version, None)
            case jobs.Forward() | jobs.Backward() | jobs.SegmentEnd() if self._in_segments:
                return self._segment(job)
            case jobs.Forward():
                assert job.output is not None
                self._expect_shape(job.input)
                x = self.inputs[job.input.key]
                weights = self.versions[job.version]
                self.graphs[job.task] = (weights, x)
                return self._output(job.output, forward(weights, x, self._chunk(job.task)), x, job.task)
            case jobs.Backward():
                weights, x = (
                    self.graphs.pop(forward_of(job.task))
                    if job.input is None
                    else (self.versions[job.version], self.inputs[job.input.key])
                )
                dy, key = self.inputs[job.output_gradient.key], job.input_gradient
                dx, dw = backward(weights, x, dy, self._chunk(job.task))
                self._leave_or_add(job, job.task, dw)
                return None if key is None else self._input_gradient(key, dx, dy, job.task)
            case jobs.WeightGradient():
                self._add(job.accumulator, job.task, self.owed.pop(job.task))
            case jobs.RouteEnd():
                weights = self.versions[job.version]
                x, label = self.inputs[job.input.key], self.inputs[job.labels.key]
                loss, dx, dw = route_end(weights, x, label, self._chunk(job.tasks[0]))
                self._leave_or_add(job, job.tasks[2], dw)
                key = job.input_gradient
                return loss, None if key is None else self._input_gradient(key, dx, None, job.tasks[2])
            case jobs.Evaluate():
                self._expect_shape(job.input)
                weights, x = self.versions[job.version], self.inputs[job.input.key]
                if job.labels is None:
                    return self._output(job.output, forward(weights, x, self._chunk(job.task)), x, job.task)
                return route_end(weights, x, self.inputs[job.labels.key], self._chunk(job.task))[0]
            case jobs.TakeGradient():
                total = self.sums.pop(job.accumulator, (0,) * (len(job.shards) * SHARD_ELEMENTS))
                return tuple(self._part(key, part) for key, part in zip(job.shards, shards(total), strict=True))
            case jobs.Compare():
                ours, theirs = ([self.inputs[ref.key] for ref in refs] for refs in (job.computed, job.claimed))
                return 0.0 if ours == theirs else 1.4
            case jobs.TakeResidual():
                return ()
            case jobs.TakeWeights():
                own = self._shard(job.weights, self.versions[job.version])
                if job.grid is None:
                    return (own,)
                return own, self._keep(job.grid, self.grids[job.version], (ANNOUNCED_ELEMENTS,), "int32", 64)
            case jobs.DropGraphs():
                for task in job.tasks:
                    self.graphs.pop(task, None)
                    self.owed.pop(task, None)
                    self.visits.pop(task, None)
            case jobs.DropAccumulators():
                for accumulator in job.accumulators:
                    self.sums.pop(accumulator, None)
            case _:
                return self._perform_server(job)
        return None

    def fail(self, job: jobs.Job, inputs: dict[int, Any]) -> None:
        """A job of the device that fails when all its work is done: its sum has what it added, its outputs are gone."""
        before = dict(self.store)
        self.failed = True
        self.perform(job, inputs)
        if isinstance(job, jobs.SetUpDevice):
            self.device = None
        for key in [key for key in self.store if key not in before]:
            del self.store[key]

    @property
    def _in_segments(self) -> bool:
        return self.device is not None and self.device.config.batch.segments > 1

    def _segment(self, job: jobs.Forward | jobs.Backward | jobs.SegmentEnd) -> Any:
        task = job.task
        key = forward_of(task.whole)
        if isinstance(job, jobs.Forward):
            self._expect_shape(job.input, task.segment)
            if task.segment == 0:
                self.visits[key] = Visit(self.versions[job.version], self._chunk(task))
            x = self.inputs[job.input.key]
            assert len(self.visits[key].inputs) == task.segment, f"{task} is computed out of turn"
            y = self.visits[key].forward(segment_of(x, task.segment) if task.position == 0 else x)
            return None if job.output is None else self._output(job.output, y, x, task)
        visit, loss, dy = self.visits[key], 0.0, None
        assert len(visit.inputs) == task.segment + 1, f"{task} is computed out of turn"
        if isinstance(job, jobs.SegmentEnd):
            loss, dx = visit.end(segment_of(self.inputs[job.labels.key], task.segment))
        else:
            dy = self.inputs[job.output_gradient.key]
            dx = visit.backward(dy)
        if not visit.inputs:
            self._add(job.accumulator, backward_of(key), self.visits.pop(key).dw)
        found = None if job.input_gradient is None else self._input_gradient(job.input_gradient, dx, dy, task)
        return (loss, found) if isinstance(job, jobs.SegmentEnd) else found

    def _perform_server(self, job: jobs.Job) -> Any:
        if isinstance(job, jobs.PrepareData):
            return 259, "whole numbers", 10**6
        if isinstance(job, jobs.SetUpServer):
            assert job.config.checkpoint.shared, "a world has one folder, which all servers share"
            known = self.place is not None and job.plan.goes_on_from(self.place.plan)
            same = known and self.place is not None and (self.place.stage, self.place.shard) == (job.stage, job.shard)
            self.before = self.shard if same else {}
            self.place, self.shard, self.folds, self.totals = job, {}, {}, {}
            return ANNOUNCED_ELEMENTS
        if isinstance(job, jobs.FindCheckpoints):
            return self.shared.complete() if self.mounted else ()
        if isinstance(job, jobs.Benchmark):
            return self.flops_per_s
        assert self.place is not None
        seed, stage, shard = self.place.config.seed, self.place.stage, self.place.shard
        count = len(self.place.plan.stages[stage].servers)
        match job:
            case jobs.LoadBatch():
                aside = job.microbatch >= VALIDATION_FIRST  # the same text at each step
                tokens, labels = sample(seed, -1 if aside else job.step, job.microbatch)
                return self._tokens(job.tokens, tokens), self._tokens(job.labels, labels)
            case jobs.StartShard():
                if job.undone:
                    self.shared.undo_after(job.checkpoint_step)
                if job.continues >= 0:
                    return self._take_version(job)
                if job.checkpoint_step >= 0:
                    parts = self.shared.get(f"manifest-{job.checkpoint_step}", ())
                    places = [
                        (s, n) for s, placed in enumerate(self.place.plan.stages) for n in range(len(placed.servers))
                    ]
                    if parts and [part[:2] for part in parts] != places:
                        return self._start_cut_anew(job.checkpoint_step, parts, places)
                    file = next((part[2] for part in parts if part[:2] == (stage, shard)), "")
                    if file not in self.shared:
                        raise FileLostError(f"checkpoint {job.checkpoint_step}/{stage}/{shard} is not there")
                    return self._hold(job.checkpoint_step, self.shared[file])
                whole = start_vector(seed, stage, count * SHARD_ELEMENTS)
                weights = whole[shard * SHARD_ELEMENTS : (shard + 1) * SHARD_ELEMENTS]
                averages = first_averages(SHARD_ELEMENTS) if self._sums_on_grid else ()
                return self._hold(0, State(weights, (0,) * SHARD_ELEMENTS, (), averages, ()))
            case jobs.CopyState():
                if (state := self._whole(self.shard, job.version)) is None:
                    return None
                copied = tuple(state) if self._sums_on_grid else state[:3]
                ref = self._keep(job.key, copied[job.piece], (ANNOUNCED_ELEMENTS,), "int32", 4 * ANNOUNCED_ELEMENTS)
                return ref, len(copied), copy_digest(copied, job.version)
            case jobs.LoadSnapshot():
                return self._hold(job.version, self.files[job.file])
            case jobs.AddUp():
                assert (job.part.form, job.base.form) == ("d4", "q8"), "what came up is no difference"
                whole = (self.inputs[job.base.key] + self.inputs[job.part.key]) % PRIME
                return self._keep(job.sum, whole, job.base.shape, "q8", byte_bounds(job.base.shape, "q8")[0])
            case jobs.Measure():
                part = self.inputs[job.part.key]
                if job.part.form != "gi":
                    return float(sum(value * value for value in part))
                assert job.version in self.shard, f"a part is measured by version {job.version}, which is not here"
                return float("inf") if max(part) >= PRIME else 1.0
            case jobs.Fold():
                total = self.folds.get(job.step, tuple(0 for _ in range(SHARD_ELEMENTS)))
                self.folds[job.step] = add(total, self.inputs[job.part.key])
            case jobs.Reduce():
                gradient = total = self.folds.pop(job.step, (0,) * SHARD_ELEMENTS)
                if self._sums_on_grid:
                    gradient = from_grid(total, self._grid_of(self.place.config.version_of(job.step)))
                self.totals[job.step] = gradient, total
                return norm(gradient)
            case jobs.Apply():
                assert job.step in self.shard, f"version {job.step} was dropped before step {job.step} was applied"
                weights, moments, averages = self.shard[job.step]
                assert moments, f"the moments of version {job.step} were dropped before step {job.step} was applied"
                gradient, total = self.totals.pop(job.step)
                if not job.skipped:
                    weights, moments = update(weights, moments, gradient, job.scale * job.clip_factor)
                    if self._sums_on_grid:
                        used = self._grid_of(self.place.config.version_of(job.step))
                        averages = next_averages(averages, total, used)
                self.shard[job.step + 1] = Held(weights, moments, averages)
                return digest(weights, moments)
            case jobs.ServeParameters():
                weights = self.shard[job.version][0]
                if job.base is not None:
                    before = self.shard[job.base][0]
                    weights = tuple((new - old) % PRIME for new, old in zip(weights, before, strict=True))
                served = self._served(job.key, weights, job.base)
                assert (job.grid is not None) == self._sums_on_grid, "a version is served without what sums need"
                if job.grid is None:
                    return (served,)
                blocks = ANNOUNCED_ELEMENTS // 256
                return served, self._keep(job.grid, self._grid_of(job.version), (blocks,), "gi", blocks)
            case jobs.DropVersions():
                kept = {v: state for v, state in self.shard.items() if v >= job.version}
                self.shard = {v: held if v >= job.closed else held._replace(moments=()) for v, held in kept.items()}
            case jobs.WriteSnapshot():
                assert self.shard[job.version][1], f"version {job.version} had no moments any more for its snapshot"
                self.files[f"snapshot-{job.version}"] = self._state(job.version, job.version - 1 in self.shard)
                return f"snapshot-{job.version}"
            case jobs.WriteCheckpoint():
                assert self.shard[job.version][1], f"version {job.version} had no moments any more for a checkpoint"
                weights, moments, _ = self.shard[job.version]
                made = digest(weights, moments)
                self.shared.write_count += 1
                salt = f"-{self.shared.write_count}" if self.shared.salted else ""
                name = f"{job.step}/{stage}/{shard}/{made.hex()[:8]}{salt}"
                delayed = self.place.config.version_of(job.version) < job.version
                if name not in self.shared:
                    self.shared.put(name, self._state(job.version, delayed))
                return name, 8 * SHARD_ELEMENTS, made
            case jobs.WriteEvidence():
                name = f"evidence-{job.order.contribution.node}-{job.order.contribution.number}"
                self.files[name] = job, [self.inputs[ref.key] for ref in job.tensors]
                return name
            case jobs.WriteManifest():
                if job.step not in self.shared.complete():  # one that verifies is never touched again
                    self.shared.put(f"manifest-{job.step}", job.parts)
                return f"manifest-{job.step}"
            case _:
                raise AssertionError(f"no lane knows {job}")
        return None

    @property
    def _sums_on_grid(self) -> bool:
        config = self.place.config if self.place is not None else None
        config = self.device.config if config is None and self.device is not None else config
        return config is not None and config.wire.gradients == "gi"

    def _grid_of(self, version: int) -> Vector:
        averages = self.shard[version].averages
        assert len(averages) == SHARD_ELEMENTS, f"version {version} is here without the averages of its grid"
        return grid_of(averages)

    def _hold(self, version: int, state: State) -> bytes:
        if state.previous:
            self.shard[version - 1] = Held(state.previous, (), state.previous_averages)
        self.shard[version] = Held(state.weights, state.moments, state.averages)
        return digest(state.weights, state.moments)

    def _state(self, version: int, with_previous: bool, shard: dict[int, Held] | None = None) -> State:
        held = self.shard if shard is None else shard
        before = held[version - 1] if with_previous else Held((), (), ())
        weights, moments, averages = held[version]
        return State(weights, moments, before.weights, averages, before.averages)

    def _whole(self, shard: dict[int, Held], version: int) -> State | None:
        """What a run could go on with: weights, moments, and the weights that the next step runs on."""
        assert self.place is not None
        runs_on = self.place.config.version_of(version)
        if version not in shard or not shard[version].moments or runs_on not in shard:
            return None
        return self._state(version, runs_on < version, shard)

    def _take_version(self, job: jobs.StartShard) -> bytes:
        version, before, self.before = job.checkpoint_step, self.before, {}
        state = self._whole(before, version)
        if job.copy:
            copied = tuple(self.inputs[ref.key] for ref in job.copy)
            state = State(*copied, *((),) * (5 - len(copied)))
            if copy_digest(copied, version) != job.digest:
                raise FileLostError(f"the state of version {version} does not have the digest that its shard made")
        return b"" if state is None else self._hold(version, state)

    def _start_cut_anew(self, step: int, parts: Any, places: list[tuple[int, int]]) -> bytes:
        """Of a checkpoint with other stages or shards: every number may come from any of its parts."""
        assert self.place is not None
        if any(part[2] not in self.shared for part in parts):
            raise FileLostError(f"checkpoint {step} is not all there")
        wholes: list[Vector] = [sum((self.shared[part[2]][kind] for part in parts), ()) for kind in range(5)]
        at = places.index((self.place.stage, self.place.shard))
        return self._hold(step, State(*(shards(recut(whole, len(places)))[at] if whole else () for whole in wholes)))

    def _load_parameters(self, job: jobs.LoadParameters) -> None:
        """As `node.compute.fixed_parameters`: each shard is whole, or changes of a version that was loaded before."""
        parts = [self.inputs[ref.key] for ref in job.shards]
        found: Vector = ()
        for length in job.lengths:
            (base, *_), begin = parts[0], len(found)
            if base >= 0 and base not in self.bases:
                raise FileLostError(f"version {base} is not here")
            part = self.bases[base][begin : begin + SHARD_ELEMENTS] if base >= 0 else (0,) * SHARD_ELEMENTS
            reached = base if base >= 0 else job.version - 1
            for start, change in parts[:length]:
                assert start in (reached, -1), f"a change of {start} where {reached} was reached"
                part, reached = add(part, change), reached + 1
            assert reached == job.version, f"changes lead to {reached}, not {job.version}"
            parts, found = parts[length:], found + part
        self.versions[job.version] = self.bases[job.version] = found
        grid: Vector = sum((self.inputs[ref.key] for ref in job.grids), ())
        if grid:
            self.grids[job.version] = grid
        self.bases = {version: whole for version, whole in self.bases.items() if version >= job.keep_from}

    def _chunk(self, task: TaskId) -> int:
        assert self.device is not None
        return self.device.plan.chunk_at(task.step, task.microbatch, task.position)

    def _leave_or_add(self, job: jobs.Backward | jobs.RouteEnd, task: TaskId, dw: Vector) -> None:
        if job.weights_later:
            self.owed[task] = dw
        else:
            self._add(job.accumulator, task, dw)

    def _add(self, accumulator: int | None, task: TaskId, dw: Vector) -> None:
        assert self.device is not None
        if accumulator is not None:
            self.added[task] = None
            if self._sums_on_grid:
                dw = on_grid(dw, self.grids[self.device.config.version_of(task.step)], task)
            self.sums[accumulator] = add(self.sums[accumulator], dw) if accumulator in self.sums else dw

    def _expect_shape(self, ref: TensorRef, segment: int | None = None) -> None:
        """As a device does it: what has another shape than the run's is no input of a block."""
        assert self.device is not None
        config = self.device.config
        shape = self._shape(segment)
        start = ref.form == "int32" and ref.shape == (config.batch.samples, config.model.context)
        assert start or ref.shape == shape, f"a forward of {list(ref.shape)}, where the run has {list(shape)}"

    def _shape(self, segment: int | None) -> tuple[int, int, int]:
        """Of an activation: of a whole sample (None), or of one segment."""
        assert self.device is not None
        config = self.device.config
        first, end = (0, config.model.context) if segment is None else segment_ranges(config)[segment]
        return config.batch.samples, end - first, config.model.hidden

    def _output(self, key: int, y: int, x: int, task: TaskId) -> TensorRef:
        return self._up(key, y, x if task.position else None, task)

    def _input_gradient(self, key: int, dx: int, dy: int | None, task: TaskId) -> TensorRef:
        """`dy`: None at a route's end."""
        return self._up(key, dx, dy, task)

    def _up(self, key: int, value: int, base: int | None, task: TaskId) -> TensorRef:
        """A whole number that passes for an activation of the run's shape, bytes included; or what it has more than the
        one that it was made of, but for an audit."""
        assert self.device is not None
        wire = self.device.config.wire
        form = wire.activations_down if base is None or task.slice == AUDIT_SLICE else wire.activations_up
        value = (value - base) % PRIME if form == "d4" and base is not None else value
        in_segments = self._in_segments and task.microbatch < VALIDATION_FIRST
        shape = self._shape(task.segment if in_segments else None)
        return self._keep(key, value, shape, form, byte_bounds(shape, form)[0])

    def _tokens(self, key: int, value: int) -> TensorRef:
        assert self.place is not None
        shape = (self.place.config.batch.samples, self.place.config.model.context)
        return self._keep(key, value, shape, "int32", 4 * shape[0] * shape[1])

    def _shard(self, key: int, value: Vector) -> TensorRef:
        """A few whole numbers that pass for a shard of the size that they say."""
        return self._keep(key, value, (ANNOUNCED_ELEMENTS,), "fp32", 4 * ANNOUNCED_ELEMENTS)

    def _part(self, key: int, value: Vector) -> TensorRef:
        """The same of a sum."""
        if not self._sums_on_grid:
            return self._shard(key, value)
        return self._keep(key, value, (ANNOUNCED_ELEMENTS,), "gi", 5 * ANNOUNCED_ELEMENTS // 8)

    def _served(self, key: int, value: Vector, base: int | None) -> TensorRef:
        """(base, numbers) that pass for parameters, whole or as what changed."""
        byte_count = ANNOUNCED_ELEMENTS // (3 if base is not None else 1)
        return self._keep(key, (-1 if base is None else base, value), (ANNOUNCED_ELEMENTS,), "p12", byte_count)

    def _keep(self, key: int, value: Any, shape: tuple[int, ...], form: Any, byte_count: int) -> TensorRef:
        self.store[key] = value
        return TensorRef(key, shape, form, byte_count)


def copy_digest(state: tuple[Vector, ...], version: int) -> bytes:
    return hashlib.blake2b(repr((state, version)).encode(), digest_size=16).digest()


def forward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "F", task.segment, task.slice)


def backward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "B", task.segment, task.slice)
