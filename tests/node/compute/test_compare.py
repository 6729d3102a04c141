"""A sum computed again is the same in every number, whatever the order; a false one is far off."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from node.compute.tolerance import relative_difference
from node.machine import jobs
from protocol.base.ids import TaskId, TensorRef
from protocol.run.audits import RESIDUAL_PARTS
from tests.node.compute.test_lanes import Bench, small_run


def _sum(bench: Bench, microbatches: tuple[int, ...], accumulator: int, slice_: int = 0) -> tuple[TensorRef, ...]:
    """The parts of a contribution with these route ends of the last stage."""
    first, last = bench.devices
    for microbatch in microbatches:
        tasks = tuple(TaskId(0, microbatch, 1 + (op == "L"), op, 0, slice_) for op in ("F", "L", "B"))
        tokens, labels = bench.do(bench.servers[0][0], jobs.LoadBatch(0, microbatch, bench.fresh(), bench.fresh()))
        forward = TaskId(0, microbatch, 0, "F", 0, slice_)
        hidden = bench.do(first, jobs.Forward(forward, 0, tokens, bench.fresh()))
        bench.do(first, jobs.DropGraphs((forward,)))
        bench.do(last, jobs.RouteEnd(tasks, 0, hidden, labels, bench.fresh(), accumulator))
    parts: tuple[TensorRef, ...] = bench.do(last, jobs.TakeGradient(accumulator, (bench.fresh(), bench.fresh())))
    return parts


@pytest.mark.parametrize("form", ["gi", "fp32"])
def test_a_sum_computed_again_is_the_same(tmp_path: Path, form: str) -> None:
    """On the grid in every number, in another order too; without one within the rounding of fp32."""
    config = small_run(1)
    wire = msgspec.structs.replace(config.wire, gradients=form)
    bench = Bench(msgspec.structs.replace(config, wire=wire), tmp_path)
    bench.start()
    bench.fetch(0)
    claimed = _sum(bench, (0, 1), 7)
    again = _sum(bench, (1, 0), 8, slice_=1)
    others = _sum(bench, (0,), 9)
    difference = bench.do(bench.devices[1], jobs.Compare(1, 0, again, claimed))
    assert difference == 0.0 if form == "gi" else difference < 1e-6
    assert bench.do(bench.devices[1], jobs.Compare(1, 0, again, others)) > 0.2
    assert bench.do(bench.devices[1], jobs.Compare(1, 0, again, claimed[:1])) == math.inf
    side = bench.do(bench.devices[1], jobs.TakeResidual(1, 0, again, others, b"12345678"))
    assert len(side) == RESIDUAL_PARTS
    assert math.hypot(*side[1:]) == pytest.approx(
        bench.do(bench.devices[1], jobs.Compare(1, 0, again, others)), rel=0.7
    )
    same = bench.do(bench.devices[1], jobs.TakeResidual(1, 0, again, again, b"12345678"))
    assert same == (0.0,) * RESIDUAL_PARTS


def test_relative_differences() -> None:
    """2 for a flipped sign, |1 - x| for a scale of x, no number where there is none."""
    vector = torch.tensor([3.0, -4.0])
    assert relative_difference(vector, vector.clone()) == 0.0
    assert relative_difference(vector, -vector) == pytest.approx(2.0)
    assert relative_difference(vector, 1.05 * vector) == pytest.approx(0.05, rel=1e-5)
    assert relative_difference(torch.zeros(2), vector) == math.inf
    assert math.isnan(relative_difference(vector, torch.tensor([math.nan, 0.0])))
