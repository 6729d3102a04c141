"""Differences up, done by hand: volunteers of three stages, an auditor, and the lane in which servers add."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from node.compute.device_performer import DevicePerformer
from node.compute.lane import input_refs
from node.compute.layout import StageLayout
from node.compute.reference import along_route, along_route_in_segments
from node.compute.segments import SegmentModel
from node.compute.sum_lane import SumPerformer
from node.compute.wire import encode
from node.machine import jobs
from node.process.store import TensorStore
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.base.machine import Computed
from protocol.run.audits import AUDIT_SLICE
from protocol.run.course import course_of
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import AuditSection, BatchSection, ModelSection, RunConfig, StagesSection, WireSection
from protocol.run.segments import segment_ranges

VOCABULARY = 40
NODE = NodeId("v1")


def config_of(segments: int = 1) -> RunConfig:
    """Three stages of width 96, which is a block and a half."""
    config = RunConfig(
        model=ModelSection(layers=3, hidden=96, heads=2, kv_heads=1, feed_forward=64, context=12),
        batch=BatchSection(microbatches=1, samples=2, segments=segments),
        stages=StagesSection(count=3, back_servers=0),
        wire=WireSection(activations_up="d4", gradients="fp64", parameters="fp32"),
        audit=AuditSection(rate=0.05 if segments == 1 else 0.0),
    )
    config.validate()
    return config


class Bench:
    """A volunteer for each stage and what servers keep; weights as the reference has them."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.store, self.sums, self.keys = config, TensorStore(), SumPerformer(), count(10_000)
        course = course_of(config)
        stages = tuple(StagePlan((ServerPlan(NodeId(f"s{stage}"), "both", ()),)) for stage in range(3))
        plan = Plan(1, 1, -1, stages, course)
        self.layout = StageLayout.whole(config, VOCABULARY)
        self.weights = self.layout.initial(1)
        self.models = [SegmentModel(self.layout, (chunk.first_block, chunk.end_block)) for chunk in course.chunks]
        self.devices, begin = [], 0
        for stage in range(3):
            device = DevicePerformer()
            self.devices.append(device)
            self.do(device, jobs.SetUpDevice(config, VOCABULARY, plan, stage))
            end = begin + device._stage.layout.parameter_count
            self.do(device, jobs.LoadParameters(0, (self.keep(self.weights[begin:end], "fp32"),)))
            begin = end

    def keep(self, tensor: Tensor, form: str) -> TensorRef:
        return self.store.add(bytearray(encode(tensor, form)), tuple(tensor.shape), form)

    def do(self, performer: Any, job: Any) -> Any:
        outcome = performer.perform(job, {ref.key: self.store.get(ref.key) for ref in input_refs(job)})
        assert isinstance(outcome.fact, Computed), outcome.fact
        for ref, buffer in outcome.tensors:
            self.store.put(ref.key, buffer, ref.shape, ref.form)
        return outcome.fact.result

    def add(self, task: TaskId, part: TensorRef, base: TensorRef) -> TensorRef:
        """What the server hands on."""
        assert part.form == "d4" and base.form == "q8"
        found: TensorRef = self.do(self.sums, jobs.AddUp(1, task, NODE, part, base, self.fresh()))
        assert found.form == "q8" and found.byte_count == len(self.store.get(found.key))
        return found

    def fresh(self) -> int:
        return next(self.keys)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(VOCABULARY, (2, 13), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def test_volunteers_and_servers_come_to_the_reference_s_bits_and_audits_to_the_servers_bytes() -> None:
    """The first stage sends its output whole, the last one its input gradient; the one between sends differences both
    ways. Who computes that again for an audit has the bytes that the server has made, with a kept graph or without."""
    bench = Bench(config_of())
    tokens, labels = batch()
    loss, (expected,) = along_route(bench.config, bench.models, bench.weights, tokens, labels)
    forwards = [TaskId(0, 0, position, "F") for position in range(3)]
    backwards = [TaskId(0, 0, position, "B") for position in range(3)]
    first, middle, last = bench.devices
    x0, x_labels = bench.keep(tokens, "int32"), bench.keep(labels, "int32")
    x1 = bench.do(first, jobs.Forward(forwards[0], 0, x0, bench.fresh()))
    up = bench.do(middle, jobs.Forward(forwards[1], 0, x1, bench.fresh()))
    assert (x1.form, up.form) == ("q8", "d4")
    x2 = bench.add(forwards[1], up, x1)
    tasks = (forwards[2], TaskId(0, 0, 3, "L"), backwards[2])
    found, dy1 = bench.do(last, jobs.RouteEnd(tasks, 0, x2, x_labels, bench.fresh(), 1))
    assert found == loss and dy1.form == "q8"
    audited = msgspec.structs.replace(backwards[1], slice=AUDIT_SLICE)
    again = bench.do(middle, jobs.Forward(msgspec.structs.replace(audited, op="F"), 0, x1, bench.fresh()))
    assert again.form == "q8" and bench.store.get(again.key) == bench.store.get(x2.key)
    down = bench.do(middle, jobs.Backward(backwards[1], 0, dy1, None, bench.fresh(), 1))
    dy0 = bench.add(backwards[1], down, dy1)
    for x in (None, x1):
        audit = bench.do(middle, jobs.Backward(audited, 0, dy1, x, bench.fresh(), 2))
        assert audit.form == "q8" and bench.store.get(audit.key) == bench.store.get(dy0.key)
    bench.do(first, jobs.Backward(backwards[0], 0, dy0, None, None, 1))
    gradient = torch.cat([device._stage.take_gradient(1) for device in bench.devices])
    assert torch.equal(gradient.float(), expected)
    assert bench.do(middle, jobs.Evaluate(forwards[1], 0, x1, None, bench.fresh())).form == "d4"


@pytest.mark.parametrize("segments", [2, 3])
def test_in_segments_too(segments: int) -> None:
    """Each segment's difference is to that segment's input, or output gradient."""
    bench = Bench(config_of(segments))
    tokens, labels = batch()
    loss, (expected,) = along_route_in_segments(bench.config, bench.models, bench.weights, tokens, labels)
    first, middle, last = bench.devices
    numbers = range(len(segment_ranges(bench.config)))
    x0, x_labels = bench.keep(tokens, "int32"), bench.keep(labels, "int32")
    for segment in numbers:
        tasks = [TaskId(0, 0, position, "F", segment) for position in range(3)]
        x1 = bench.do(first, jobs.Forward(tasks[0], 0, x0, bench.fresh()))
        up = bench.do(middle, jobs.Forward(tasks[1], 0, x1, bench.fresh()))
        bench.do(last, jobs.Forward(tasks[2], 0, bench.add(tasks[1], up, x1), None))
    found = 0.0
    for segment in reversed(numbers):
        tasks = [TaskId(0, 0, position, "B", segment) for position in range(3)]
        part, dy1 = bench.do(last, jobs.SegmentEnd(tasks[2], 0, x_labels, bench.fresh(), 1))
        found += part
        down = bench.do(middle, jobs.Backward(tasks[1], 0, dy1, None, bench.fresh(), 1))
        bench.do(first, jobs.Backward(tasks[0], 0, bench.add(tasks[1], down, dy1), None, None, 1))
    gradient = torch.cat([device._stage.take_gradient(1) for device in bench.devices])
    assert found == loss and torch.equal(gradient.float(), expected)
