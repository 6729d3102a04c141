"""1F1B's times: by hand, against the general simulator, and the path that explains them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.partition.one_f_one_b import makespan_s, timeline
from coordinator.planning.partition.slicer import sliced_makespan_s
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import simulate
from protocol.schedule.ir import Flow, Hop, Instruction, Key, Op, Schedule


def simulated_s(
    forward_s: list[float],
    backward_s: list[float],
    link_s: list[float],
    microbatches: int,
    halved: int = 0,
    blocking: bool = False,
) -> float:
    """The same order, written out and run by the general simulator."""
    stages = len(forward_s)
    route = tuple(Hop(stage, stage) for stage in range(stages))
    flows = tuple(
        Flow(microbatch=i, route=route, slice_samples=(1, 1) if i < halved else (2,)) for i in range(microbatches)
    )
    orders = []
    for d in range(stages):
        warm_up = min(microbatches, stages - d)
        sequence = [(Op.F, i) for i in range(warm_up)]
        for i in range(microbatches):
            sequence.append((Op.B, i))
            if warm_up + i < microbatches:
                sequence.append((Op.F, warm_up + i))
        orders.append(
            tuple(
                Instruction(key=Key(op, i, d, 0, part))
                for op, i in sequence
                for part in range(2 if op is Op.F and i < halved else 1)
            )
        )
    costs = Costs([StageCosts(f, b, 0.0) for f, b in zip(forward_s, backward_s, strict=True)])
    schedule = Schedule(stages=stages, flows=flows, orders=tuple(orders))
    return simulate(schedule, costs, Network.line(link_s, blocking)).makespan_s


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "link_s", "microbatches", "value_s"),
    [
        ([1], [2], [], 3, 9),
        ([1, 1, 1], [2, 2, 2], [0, 0], 6, 24),
        ([1, 1, 1], [2, 2, 2], [0.5, 0.5], 6, 29),
        ([1] * 4, [2] * 4, [0] * 3, 8, 33),
        ([1] * 4, [2] * 4, [0] * 3, 2, 15),  # fewer microbatches than stages
        ([2, 2, 3], [4, 4, 6], [0, 0], 6, 66),
        ([2, 3, 2], [4, 6, 4], [0, 0], 6, 63),
        ([3, 2, 2], [6, 4, 4], [0, 0], 6, 60),
    ],
)
def test_makespans_by_hand(
    forward_s: list[float], backward_s: list[float], link_s: list[float], microbatches: int, value_s: float
) -> None:
    """Worked examples: 3 (m + P - 1) for equal stages, and what a heavy stage costs where."""
    assert makespan_s(forward_s, backward_s, link_s, microbatches) == value_s


def test_blocking_transfers_cost_more() -> None:
    """AutoPipe's own formulas, with the transfer after the maximum: 30.5 instead of 29."""
    assert simulated_s([1.0] * 3, [2.0] * 3, [0.5] * 2, 6, blocking=True) == 30.5
    assert simulated_s([1.0] * 3, [2.0] * 3, [0.0] * 2, 6, blocking=True) == 24


@pytest.mark.parametrize(("heavy", "master"), [(0, 0), (1, 1), (2, 2)])
def test_the_heavy_stage_is_the_master(heavy: int, master: int) -> None:
    """The stage that sets the pace of the steady phase is the one with half as much work again."""
    forward = [3.0 if d == heavy else 2.0 for d in range(3)]
    assert timeline(forward, [2 * f for f in forward], [0.0, 0.0], 6).master_stage == master


def test_among_equal_stages_the_last_is_the_master() -> None:
    """AutoPipe's tie: the critical path nearest the last stage."""
    assert timeline([1.0] * 5, [2.0] * 5, [0.0] * 4, 12).master_stage == 4


def random_stages(rng: random.Random) -> tuple[list[float], list[float], list[float], int]:
    """Stages with thirds and ninths of a second, so that ties occur."""
    stages = rng.randint(1, 6)
    forward = [rng.randint(0, 9) / 3 for _ in range(stages)]
    backward = [rng.randint(0, 18) / 3 for _ in range(stages)]
    return forward, backward, [rng.randint(0, 6) / 9 for _ in range(stages - 1)], rng.randint(1, 12)


@given(st.randoms(use_true_random=False))
def test_both_simulators_agree(rng: random.Random) -> None:
    """The two numbers per stage that a search keeps give what the general simulator gives, slices and all."""
    forward, backward, link, microbatches = random_stages(rng)
    value_s = makespan_s(forward, backward, link, microbatches)
    assert value_s == pytest.approx(simulated_s(forward, backward, link, microbatches), abs=1e-9)
    assert value_s == pytest.approx(timeline(forward, backward, link, microbatches).makespan_s, abs=1e-9)
    halved = rng.randint(0, microbatches)
    sliced_s = sliced_makespan_s(forward, backward, link, microbatches, halved)
    assert sliced_s == pytest.approx(simulated_s(forward, backward, link, microbatches, halved), abs=1e-9)


@given(st.randoms(use_true_random=False))
def test_the_critical_path_has_no_gaps(rng: random.Random) -> None:
    """From time 0 to the end, every step starts when the one before lets it: at once, or a link later."""
    forward, backward, link, microbatches = random_stages(rng)
    found = timeline(forward, backward, link, microbatches)
    path = found.critical_path
    assert path[0].start_s == pytest.approx(0.0, abs=1e-9)
    assert path[-1].end_s == found.makespan_s
    for before, after in pairwise(path):
        assert abs(before.stage - after.stage) <= 1
        hop_s = link[min(before.stage, after.stage)] if before.stage != after.stage else 0.0
        assert after.start_s == pytest.approx(before.end_s + hop_s, abs=1e-8)
