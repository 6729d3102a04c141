"""A sum computed again is the same in every number, whatever the order; a false one is far off."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from node.compute.layout import StageLayout
from node.compute.stage_grid import StageGrid
from node.compute.tolerance import Edges, grid_difference, relative_difference
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


TASKS = 8


class Sums:
    """Sums of eight tasks' gradients on the grid of a run, of which one is made for an audit."""

    def __init__(self) -> None:
        config = small_run(1, gradients="gi")
        config = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, microbatches=TASKS))
        layout = StageLayout.whole(config, 300)
        self.grid, self.count = StageGrid.of(layout), layout.parameter_count
        self._rng = torch.Generator().manual_seed(5)
        # A sum is as large as the grid was made for: a step is an eighth to a quarter of it.
        averages = torch.full((self.grid.block_count,), math.sqrt(TASKS), dtype=torch.float64)
        self.steps = self.grid.steps(averages)
        self.gradients = [self.noise(1.0) for _ in range(TASKS)]
        self.edges = Edges.none_yet(self.count)
        self.computed = self.of(self.gradients, self.edges)

    def noise(self, size: float) -> torch.Tensor:
        return size * torch.randn(self.count, generator=self._rng)

    def of(self, gradients: list[torch.Tensor], edges: Edges | None = None) -> torch.Tensor:
        total = torch.zeros(self.count, dtype=torch.int32)
        for number, gradient in enumerate(gradients):
            if edges is not None:
                edges.tasks += 1
            self.grid.add(total, gradient, self.steps, 3, number, None if edges is None else edges.nearest)
        return total

    def plainly(self, claimed: torch.Tensor) -> float:
        return relative_difference(*(self.grid.value(each, self.steps) for each in (self.computed, claimed)))

    def differ(self, claimed: torch.Tensor) -> float:
        units = self.grid.value(torch.ones_like(claimed), self.steps)
        return grid_difference(self.computed, claimed, units, self.edges, self.plainly(claimed))


def test_what_another_device_rounds_elsewhere_is_a_small_difference_on_the_grid_too() -> None:
    """Gradients that differ by 0.5 %, as those of bf16 on two devices: the sums are off by more than the tolerance, and
    no audit of them is."""
    sums = Sums()
    claimed = sums.of([gradient + sums.noise(0.005) for gradient in sums.gradients])
    assert sums.plainly(claimed) > 0.02
    assert 0.0 < sums.differ(claimed) <= 0.006


def test_what_is_false_is_far_off_on_the_grid() -> None:
    """Gross where it is another vector; over the tolerance where a task is missing, or all is a tenth longer."""
    sums = Sums()
    assert sums.differ(sums.computed.clone()) == 0.0
    assert sums.differ(-sums.computed) > 1.0
    assert sums.differ(sums.of([sums.noise(1.0) for _ in range(TASKS)])) > 0.5
    assert sums.differ(sums.of(sums.gradients[1:])) > 0.2
    assert sums.differ(sums.of([1.1 * gradient for gradient in sums.gradients])) > 0.05
    # One step in a tenth of the places, with no regard to how near they were.
    moved = sums.computed + (torch.arange(sums.count) % 10 == 0).to(torch.int32)
    assert sums.differ(moved) > 0.01


def test_a_sum_of_no_audit_is_compared_as_it_is() -> None:
    sums = Sums()
    units = torch.ones(sums.count)
    assert grid_difference(sums.computed, -sums.computed, units, Edges.none_yet(sums.count), 2.0) == 2.0
    assert grid_difference(sums.computed, sums.computed, units, sums.edges, math.inf) == math.inf


def test_relative_differences() -> None:
    """2 for a flipped sign, |1 - x| for a scale of x, no number where there is none."""
    vector = torch.tensor([3.0, -4.0])
    assert relative_difference(vector, vector.clone()) == 0.0
    assert relative_difference(vector, -vector) == pytest.approx(2.0)
    assert relative_difference(vector, 1.05 * vector) == pytest.approx(0.05, rel=1e-5)
    assert relative_difference(torch.zeros(2), vector) == math.inf
    assert math.isnan(relative_difference(vector, torch.tensor([math.nan, 0.0])))
