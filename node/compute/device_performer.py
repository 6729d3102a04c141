"""Performs lane `device` with torch: a volunteer's work (`StageWorker`), one stage's weights by version, graphs, and
sums of gradients. What only servers need (`node.compute.lanes`) is not loaded with it: who starts again waits for that.

Lanes see buffers, never the store: the driver hands over the bytes of a job's references, and puts the results under
the keys that the job names before it tells the machine. So a machine may drop a tensor right after it ordered a job.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.fixed_parameters import FixedParameters
from node.compute.forms import grid, p12
from node.compute.lane import Buffers
from node.compute.performer import Performer
from node.compute.plan_parts import chunks_of
from node.compute.probe import warmed_up
from node.compute.segments import graph_of
from node.compute.tolerance import relative_difference, residual
from node.compute.wire import check_tokens
from node.compute.worker import StageWorker
from node.machine import jobs
from protocol.base.ids import TaskId, TensorRef
from protocol.run.audits import AUDIT_SLICE, RESIDUAL_PARTS
from protocol.run.run import RunConfig
from protocol.run.segments import segment_ranges
from protocol.trust.seals import Sealer


class DevicePerformer(Performer):
    """Lane `device`: on the device that the owner chose. `threads` is torch's, one number for the whole process.

    Args:
        evidence: of an auditor, which has no server's lane: the folder, and who signs what is written there.
    """

    def __init__(
        self,
        threads: int = 1,
        choice: DeviceChoice | None = None,
        cap_bytes: int | None = None,
        evidence: tuple[Path, Sealer] | None = None,
    ) -> None:
        super().__init__()
        self._evidence = evidence
        self._threads = threads
        self._cap_bytes = cap_bytes
        self._choice = DeviceChoice("cpu") if choice is None else choice
        self._device: Device | None = None
        self._is_warm = False
        self._worker: StageWorker | None = None
        self._config = RunConfig()
        self._place: jobs.SetUpDevice | None = None
        self._fixed: FixedParameters | None = None
        """With `parameters = "p12"`."""
        self.is_lost = False
        """The device does nothing more for this process: only another process can use it again."""

    def _reason(self, error: Exception) -> str:
        """With the words by which a volunteer knows that memory ran out, whichever library has said so."""
        reason = super()._reason(error)
        if self._device is None:
            return reason
        self.is_lost = self.is_lost or self._device.is_lost(error)
        if self._device.is_out_of_memory(error) and "out of memory" not in reason.lower():
            return f"out of memory: {reason}"
        return reason

    def _methods(self) -> dict[type, tuple[str, Callable[[Any, Buffers], Any]]]:
        return {
            jobs.SetUpDevice: ("other", self._set_up),
            jobs.LoadParameters: ("compute", self._load_parameters),
            jobs.DropParameters: ("other", lambda job, _: self._stage.drop_params(job.version)),
            jobs.Forward: ("compute", self._forward),
            jobs.Backward: ("compute", self._backward),
            jobs.RouteEnd: ("compute", self._route_end),
            jobs.WeightGradient: ("compute", self._weight_gradient),
            jobs.SegmentEnd: ("compute", self._segment_end),
            jobs.Evaluate: ("compute", self._evaluate),
            jobs.TakeGradient: ("compute", self._take_gradient),
            jobs.Compare: ("compute", self._compare),
            jobs.TakeResidual: ("compute", self._take_residual),
            jobs.TakeWeights: ("other", self._take_weights),
            jobs.DropGraphs: ("other", self._drop_graphs),
            jobs.DropAccumulators: ("other", self._drop_accumulators),
            jobs.WriteEvidence: ("disk", self._write_evidence),
        }

    @property
    def _stage(self) -> StageWorker:
        if self._worker is None:
            raise RuntimeError("no stage was set up")
        return self._worker

    def _set_up(self, job: jobs.SetUpDevice, _: Buffers) -> int:
        chunks = chunks_of(job.plan, job.stage)
        self._config = job.config
        if self._worker is not None:
            self._worker.close()  # its memory goes before the next one's comes
            self._worker = None
        if self._device is None:
            self._device = open_device(self._choice, self._cap_bytes)
        if not self._is_warm:
            warmed_up(self._device, job.config)
            self._is_warm = True
        self._device.keep_within()
        self._place = job
        self._worker = StageWorker(
            job.config, job.vocabulary, *chunks[0], self._threads, self._device, further=chunks[1:],
            graphs_wanted=job.plan.graphs_wanted(job.stage),
        )  # fmt: skip
        self._fixed = None
        if job.config.wire.parameters == "p12":
            count = len(job.plan.stages[job.stage].servers)
            ranges = [self._worker.layout.shard_range(shard, count) for shard in range(count)]
            self._fixed = FixedParameters(p12.fixed_bits(job.config), ranges)
        return self._worker.graphs_max

    def _chunk(self, task: TaskId) -> int:
        """The place of a task's chunk among the stage's."""
        assert self._place is not None
        plan = self._place.plan
        number = plan.chunk_at(task.step, task.microbatch, task.position)
        return plan.course.chunks_of(self._place.stage).index(number)

    def _input(self, ref: TensorRef, buffers: Buffers) -> Tensor:
        """On the device. Tokens that no vocabulary has would be read from foreign memory there, or end its process."""
        if ref.form != "int32":
            return self._decode(ref, buffers, self._stage.upload)
        tokens = self._decode(ref, buffers)
        check_tokens(tokens, self._stage.layout.vocabulary, "what a server sent")
        return tokens

    def _load_parameters(self, job: jobs.LoadParameters, buffers: Buffers) -> None:
        if self._fixed is None:
            shards = [self._decode(ref, buffers) for ref in job.shards]
        else:
            start = time.monotonic()
            parts = iter(buffers[ref.key] for ref in job.shards)
            lengths = job.lengths or (1,) * len(job.shards)
            shards = [self._fixed.load(job.version, [list(islice(parts, n)) for n in lengths], job.keep_from)]
            self._codec_s += time.monotonic() - start
        self._stage.set_params(job.version, shards)
        if job.grids:
            self._stage.set_grid(job.version, [self._unpack(ref, buffers).to(torch.int8) for ref in job.grids])

    def _forward(self, job: jobs.Forward, buffers: Buffers) -> TensorRef | None:
        if self._config.batch.segments > 1:
            return self._forward_segment(job, buffers)
        assert job.output is not None
        y = self._stage.forward(job.task, job.version, x := self._input(job.input, buffers), self._chunk(job.task))
        return self._output(job.output, y, x, job.task)

    def _backward(self, job: jobs.Backward, buffers: Buffers) -> TensorRef | None:
        stage, into = self._stage, job.accumulator
        dy, forward = self._input(job.output_gradient, buffers), msgspec.structs.replace(job.task, op="F")
        _begin(stage, job.version, job.task)
        if self._config.batch.segments > 1:
            dx = stage.backward_segment(graph_of(job.task), dy, into)
        elif job.input is None and job.weights_later:
            dx = stage.backward_input(forward, dy, into, job.task)
        elif job.input is None:
            dx = stage.backward(forward, dy, into)
        else:
            x, chunk = self._input(job.input, buffers), self._chunk(job.task)
            if job.weights_later:
                dx = stage.recompute_backward_input(job.version, x, dy, into, job.task, chunk)
            else:
                dx = stage.recompute_backward(job.version, x, dy, into, chunk)
        return self._input_gradient(job.input_gradient, dx, dy, job.task)

    def _route_end(self, job: jobs.RouteEnd, buffers: Buffers) -> tuple[float, TensorRef | None]:
        x, labels = self._input(job.input, buffers), self._input(job.labels, buffers)
        _begin(self._stage, job.version, job.tasks[0])
        chunk, into = self._chunk(job.tasks[0]), job.accumulator
        if job.weights_later:
            loss_sum, dx = self._stage.tail_input(job.version, x, labels, into, job.tasks[2], chunk)
        else:
            loss_sum, dx = self._stage.tail(job.version, x, labels, into, chunk)
        return loss_sum, self._input_gradient(job.input_gradient, dx, None, job.tasks[2])

    def _weight_gradient(self, job: jobs.WeightGradient, _: Buffers) -> None:
        _begin(self._stage, job.version, job.task)
        self._stage.finish(job.task, job.accumulator)

    def _forward_segment(self, job: jobs.Forward, buffers: Buffers) -> TensorRef | None:
        x, key = self._input(job.input, buffers), graph_of(job.task)
        if job.task.segment == 0:
            self._stage.drop_graph(key)  # of whoever began it before
        if job.task.position == 0:
            x = x[:, slice(*segment_ranges(self._config)[job.task.segment])]
        y = self._stage.forward_segment(key, job.version, x, self._chunk(job.task))
        return None if job.output is None else self._output(job.output, y, x, job.task)

    def _segment_end(self, job: jobs.SegmentEnd, buffers: Buffers) -> tuple[float, TensorRef | None]:
        labels = self._input(job.labels, buffers)[:, slice(*segment_ranges(self._config)[job.task.segment])]
        _begin(self._stage, job.version, job.task)
        loss_sum, dx = self._stage.tail_segment(graph_of(job.task), labels, job.accumulator)
        return loss_sum, self._input_gradient(job.input_gradient, dx, None, job.task)

    def _evaluate(self, job: jobs.Evaluate, buffers: Buffers) -> TensorRef | float:
        labels = None if job.labels is None else self._input(job.labels, buffers)
        found = self._stage.evaluate(job.version, x := self._input(job.input, buffers), labels, self._chunk(job.task))
        return found if isinstance(found, float) else self._output(job.output, found, x, job.task)

    def _output(self, key: int, y: Tensor, x: Tensor, task: TaskId) -> TensorRef:
        self._stage.wait()
        return self._encode_up(key, y, x if task.position else None, self._config.wire.activations_up, task)

    def _input_gradient(self, key: int | None, dx: Tensor | None, dy: Tensor | None, task: TaskId) -> TensorRef | None:
        if key is None:
            return None
        if dx is None:
            raise ValueError("a stage that reads tokens has no input gradient")
        self._stage.wait()
        return self._encode_up(key, dx, dy, self._config.wire.activations_up, task)

    def _take_gradient(self, job: jobs.TakeGradient, _: Buffers) -> tuple[TensorRef, ...]:
        total, form = self._stage.take_gradient(job.accumulator), self._config.wire.gradients
        made = []
        for shard, key in enumerate(job.shards):
            part = total[slice(*self._stage.layout.shard_range(shard, len(job.shards)))]
            made.append(self._pack(key, grid.short(part)) if form == "gi" else self._encode(key, part, form))
        return tuple(made)

    def _compare(self, job: jobs.Compare, buffers: Buffers) -> float:
        if [(ref.shape, ref.form) for ref in job.computed] != [(ref.shape, ref.form) for ref in job.claimed]:
            return math.inf
        if job.computed[0].form == "gi":
            sums = (self._integers(refs, buffers) for refs in (job.computed, job.claimed))
            return self._stage.sums_differ(job.version, job.unit, *sums)
        return relative_difference(*(self._whole(job.version, refs, buffers) for refs in (job.computed, job.claimed)))

    def _take_residual(self, job: jobs.TakeResidual, buffers: Buffers) -> tuple[float, ...]:
        if [(ref.shape, ref.form) for ref in job.computed] != [(ref.shape, ref.form) for ref in job.claimed]:
            return (0.0,) * RESIDUAL_PARTS
        ours, theirs = (self._whole(job.version, refs, buffers) for refs in (job.computed, job.claimed))
        return residual(ours, theirs, job.directions)

    def _whole(self, version: int, refs: tuple[TensorRef, ...], buffers: Buffers) -> Tensor:
        """One vector of what is compared."""
        if refs[0].form == "gi":
            return self._stage.sum_value(version, self._integers(refs, buffers))
        return torch.cat([self._decode(ref, buffers).flatten() for ref in refs])

    def _integers(self, refs: tuple[TensorRef, ...], buffers: Buffers) -> Tensor:
        return torch.cat([self._unpack(ref, buffers) for ref in refs])

    def _take_weights(self, job: jobs.TakeWeights, _: Buffers) -> tuple[TensorRef, ...]:
        weights = self._encode(job.weights, self._stage.weights(job.version), "fp32")
        if job.grid is None:
            return (weights,)
        return weights, self._encode(job.grid, self._stage.grid_steps(job.version), "int32")

    def _write_evidence(self, job: jobs.WriteEvidence, buffers: Buffers) -> str:
        from node.compute import evidence  # only an auditor's

        assert self._evidence is not None and self._place is not None, "only auditors write evidence on this lane"
        folder, sealer = self._evidence
        return evidence.write(folder, self._place, job, buffers, sealer)

    def _drop_graphs(self, job: jobs.DropGraphs, _: Buffers) -> None:
        for task in job.tasks:
            self._stage.drop_graph(task)

    def _drop_accumulators(self, job: jobs.DropAccumulators, _: Buffers) -> None:
        for accumulator in job.accumulators:
            self._stage.drop_gradient(accumulator)


def _begin(stage: StageWorker, version: int, task: TaskId) -> None:
    stage.begin_task(version, task.step, task.microbatch, task.slice == AUDIT_SLICE)
