"""Computes an audit once more from its file of evidence, with nothing else: see `node.compute.evidence`."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import torch

from node.compute.device_performer import DevicePerformer
from node.compute.evidence import Evidence
from node.compute.lane import input_refs
from node.compute.wire import decode
from node.machine import jobs
from node.process.store import Buffer
from protocol.base.ids import TaskId, TensorRef
from protocol.base.machine import Computed, ComputeFailed
from protocol.run.audits import AUDIT_SLICE, Claim, Difference


class NotCheckedError(Exception):
    """The file does not hold what the audit needs."""


class _Bench:
    """A device and its tensors."""

    def __init__(self, evidence: Evidence) -> None:
        self.about = evidence.about
        self._keys = count(1)
        self._buffers: dict[int, Buffer] = {}
        self.refs: dict[str, TensorRef] = {}
        for name, ref in evidence.about.tensors:
            key = self.key()
            self._buffers[key] = evidence.buffers[name]
            self.refs[name] = TensorRef(key, ref.shape, ref.form, ref.byte_count)
        self._performer = DevicePerformer()
        self.do(jobs.SetUpDevice(self.about.config, self.about.vocabulary, self.about.plan, self.about.stage))
        version = self.about.order.version
        self._performer._stage.set_params(version, [self._tensor("weights")])
        if "grid" in self.refs:
            self._performer._stage.set_grid(version, [self._tensor("grid").to(torch.int8)])

    def _tensor(self, name: str) -> Any:
        ref = self.need(name)
        return decode(self._buffers[ref.key], ref.shape, ref.form)

    def key(self) -> int:
        return next(self._keys)

    def need(self, name: str) -> TensorRef:
        if name not in self.refs:
            raise NotCheckedError(f"it holds no {name}")
        return self.refs[name]

    def do(self, job: Any) -> Any:
        outcome = self._performer.perform(job, {ref.key: self._buffers[ref.key] for ref in input_refs(job)})
        if isinstance(outcome.fact, ComputeFailed):
            raise NotCheckedError(outcome.fact.reason)
        assert isinstance(outcome.fact, Computed), "a performer returns when a job has ended"
        for ref, buffer in outcome.tensors:
            self._buffers[ref.key] = buffer
        return outcome.fact.result

    def differs(self, computed: tuple[TensorRef, ...], claimed: tuple[TensorRef, ...]) -> float:
        found: float = self.do(jobs.Compare(0, self.about.order.version, computed, claimed))
        return found


def recompute(evidence: Evidence) -> list[tuple[Difference, float]]:
    """Of each difference that the audit recorded, what comes out here.

    Raises:
        NotCheckedError: something that it follows from is not in the file.
    """
    bench, order = _Bench(evidence), evidence.about.order
    found: dict[tuple[Claim, TaskId], float] = {}
    losses = dict(zip((task for task in order.tasks if task.op == "L"), order.losses, strict=False))
    for number, task in enumerate(task for task in order.tasks if task.op == "B"):
        _compute(bench, number, task, losses, found)
    count_of_parts = len(evidence.about.plan.stages[evidence.about.stage].servers)
    parts = tuple(bench.need(f"part {shard}") for shard in range(count_of_parts))
    summed = bench.do(jobs.TakeGradient(0, tuple(bench.key() for _ in parts)))
    found["gradient", order.tasks[0]] = bench.differs(summed, parts)
    return [(each, found.get((each.claim, each.task), 0.0)) for each in evidence.about.differences]


def _compute(
    bench: _Bench, number: int, task: TaskId, losses: dict[TaskId, float], found: dict[tuple[Claim, TaskId], float]
) -> None:
    version, x = bench.about.order.version, bench.need(f"input {number}")
    ours = msgspec.structs.replace(task, slice=AUDIT_SLICE)
    forward = msgspec.structs.replace(ours, op="F")
    loss = msgspec.structs.replace(task, op="L", position=task.position + 1)
    key = bench.key() if f"input_gradient {number}" in bench.refs else None
    if f"labels {number}" in bench.refs:
        end = jobs.RouteEnd((forward, loss, ours), version, x, bench.need(f"labels {number}"), key, 0)
        loss_sum, gradient = bench.do(end)
        claimed = losses.get(loss, loss_sum)
        found["loss", task] = abs(claimed - loss_sum) / max(abs(loss_sum), 1e-12)
    else:
        output = bench.do(jobs.Forward(forward, version, x, bench.key()))
        if f"output {number}" in bench.refs:
            found["output", task] = bench.differs((output,), (bench.need(f"output {number}"),))
        dy = bench.need(f"output_gradient {number}")
        gradient = bench.do(jobs.Backward(ours, version, dy, None, key, 0))
    if gradient is not None:
        found["input_gradient", task] = bench.differs((gradient,), (bench.need(f"input_gradient {number}"),))
