"""A bound above an optimum is worse than none: hand checks, a solver and random orders say it never is."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.order.bounds import Bound, _on_the_tick, pipeline_bound, preemptive_one_machine
from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.order.stage_windows import Refuter, StageGrid, chain_of, grid_points, heads, tails
from coordinator.planning.problems import load_problem
from tests.oracles.cpsat import solve_pipeline
from tests.strategies.problems import random_pipeline

PROBLEMS = sorted((Path(__file__).parents[3] / "data/problems").glob("schedule_*.json"))
NEVER_ABOVE = 1 + 1e-9


def pipeline(
    forward_s: list[float],
    back_s: list[float],
    link_s: list[float],
    microbatches: int,
    caps: list[int] | None = None,
) -> PipelineProblem:
    """A fused problem; `back_s` is the whole backward."""
    return PipelineProblem(
        kind="schedule",
        stages=len(forward_s),
        microbatches=microbatches,
        forward_s=forward_s,
        backward_input_s=back_s,
        backward_weight_s=[0.0] * len(forward_s),
        link_s=link_s,
        split_backward=False,
        activations_max=caps,
    )


def greedy_makespan_s(problem: PipelineProblem, rng: random.Random) -> float:
    """Makespan of some valid schedule: always run, of what may run, a random one, as early as it can."""
    m, stages = problem.microbatches, problem.stages
    rows = chain_of(problem).durations_s
    caps = problem.activations_max or [m] * stages
    done = [[0] * len(rows) for _ in range(stages)]
    end: dict[tuple[int, int, int], float] = {}
    free = [0.0] * stages
    while True:
        choices = []
        for stage in range(stages):
            for row in range(len(rows)):
                i = done[stage][row]
                needs = []
                if i == m or (row == 0 and i - done[stage][-1] >= caps[stage]):
                    continue
                if row == 0 and stage > 0:
                    needs.append((row, stage - 1, i, problem.link_s[stage - 1]))
                if row == 1 and stage + 1 < stages:
                    needs.append((row, stage + 1, i, problem.link_s[stage]))
                if row > 0:
                    needs.append((row - 1, stage, i, 0.0))
                if all(need[:3] in end for need in needs):
                    ready = max([free[stage], *(end[need[:3]] + need[3] for need in needs)])
                    choices.append((stage, row, i, ready))
        if not choices:
            assert all(count == m for counts in done for count in counts), "the greedy order got stuck"
            return max(free)
        stage, row, i, ready = rng.choice(choices)
        free[stage] = end[row, stage, i] = ready + rows[row][stage]
        done[stage][row] += 1


@pytest.mark.parametrize(
    ("jobs", "makespan_s"),
    [
        ([(0, 3, 0)], 3),
        ([(2, 3, 4)], 9),
        ([(0, 4, 0), (1, 2, 5)], 8),  # the first is interrupted at 1: 3 + 5
        ([(0, 2, 7), (0, 4, 0), (5, 1, 3)], 9),
        ([], 0),
    ],
)
def test_one_machine_interrupts_for_the_longest_tail(jobs: list[tuple[float, float, float]], makespan_s: float) -> None:
    """Jackson's preemptive rule, worked by hand."""
    assert preemptive_one_machine(jobs) == makespan_s


@pytest.mark.parametrize(
    ("problem", "value_s", "name"),
    [
        (pipeline([1, 1, 1], [2, 2, 2], [0, 0], 1), 9, "path"),
        (pipeline([1] * 4, [2] * 4, [0] * 3, 8), 33, "load"),  # 3 + 8 * 3 + 6
        # One in flight: each goes down and back alone, so eight times 1 + 1 + 2 + 2, plus two links a turn.
        (pipeline([1, 1], [2, 2], [1], 8, [1, 1]), 64, "memory cycle"),
        # A long link: the first backward starts at 21, three forwards fit before it, three backwards follow.
        (pipeline([1, 1], [5, 1], [9], 3, [3, 3]), 36, "first backward"),
    ],
)
def test_each_argument_gives_its_value(problem: PipelineProblem, value_s: float, name: str) -> None:
    """Where one argument is exact, the bound is the optimum and says which argument it was."""
    bound = pipeline_bound(problem)
    assert (bound.value_s, bound.name) == (value_s, name)
    assert solve_pipeline(problem).makespan_s == value_s


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_bound_reaches_the_known_optimum(path: Path) -> None:
    """On every stored problem the bound is the optimum itself, or at least 0.98 of it, and never above."""
    optimum_s = json.loads(path.read_text())["known"]["optimum_s"]
    bound = pipeline_bound(load_problem(path, "schedule", PipelineProblem))
    assert 0.98 * optimum_s <= bound.value_s <= optimum_s * NEVER_ABOVE


def test_more_effort_never_lowers_the_bound() -> None:
    """Each effort adds arguments to those of the one before."""
    rng = random.Random(5)
    for _ in range(100):
        problem = random_pipeline(rng)
        values = [pipeline_bound(problem, effort).value_s for effort in range(3)]
        assert values == sorted(values), problem


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_no_schedule_beats_the_bound(rng: random.Random) -> None:
    """Whatever order a pipeline runs in, it ends no earlier than the bound."""
    problem = random_pipeline(rng, stages_max=5, microbatches_max=10)
    assert pipeline_bound(problem).value_s <= greedy_makespan_s(problem, rng) * NEVER_ABOVE


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_durations_that_share_no_tick_are_bounded_too(rng: random.Random) -> None:
    """Scaling every duration by 1/7 scales the bound, to the precision of the bisection."""
    problem = random_pipeline(rng)
    keys = ("forward_s", "backward_input_s", "backward_weight_s", "link_s")
    smaller = msgspec.structs.replace(problem, **{key: [value / 7 for value in getattr(problem, key)] for key in keys})
    whole, part = pipeline_bound(problem).value_s, pipeline_bound(smaller).value_s * 7
    assert whole * 0.9 <= part <= whole * NEVER_ABOVE
    assert part <= greedy_makespan_s(problem, rng) * NEVER_ABOVE


def test_heads_and_tails_meet_on_the_critical_path() -> None:
    """With one microbatch nothing waits: head, duration and tail of every operation sum to the makespan."""
    chain = chain_of(pipeline([1, 2, 3], [4, 5, 6], [7, 8], 1))
    head, tail = heads(chain), tails(chain)
    sums = {
        head[row][stage][0] + chain.durations_s[row][stage] + tail[row][stage][0]
        for row in chain.rows
        for stage in chain.stages
    }
    assert sums == {21 + 30}


def test_a_pipeline_read_backward_twice_is_itself() -> None:
    """Reversal is its own inverse, with and without split backward."""
    rng = random.Random(3)
    for _ in range(20):
        chain = chain_of(random_pipeline(rng))
        assert chain.reversed().reversed() == chain
        assert replace(chain.reversed(), durations_s=chain.durations_s, down=chain.down) == chain


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("cap", [1, 2, 5])
def test_a_grid_holds_every_count_that_a_stage_can_pass(rows: int, cap: int) -> None:
    """Counts fall from row to row by no more than the cap in all, and each point is reached only from earlier ones."""
    microbatches = 5
    grid = StageGrid(rows, microbatches, cap)
    possible = [
        point
        for point in product(range(microbatches + 1), repeat=rows)
        if list(point) == sorted(point, reverse=True) and point[0] - point[-1] <= cap
    ]
    assert grid.points == len(possible) <= grid_points(rows, microbatches, cap)
    assert {after for _, after, _, _ in grid.moves} == set(range(1, grid.points))
    assert all(before < after for before, after, _, _ in grid.moves)
    assert [after for _, after, _, _ in grid.moves] == sorted(after for _, after, _, _ in grid.moves)


def test_a_refuted_value_is_raised_past_no_more_than_it_refuted() -> None:
    """Just below a multiple of the tick the multiple itself still stands; exactly on it, the next one does."""
    bound = Bound(2.9999, "windows", None, "")
    assert _on_the_tick(bound, 1.0, refuted=True).value_s == 3.0
    assert _on_the_tick(replace(bound, value_s=3.0), 1.0, refuted=True).value_s == 4.0
    assert _on_the_tick(replace(bound, value_s=2.1), 1.0).value_s == 3.0
    assert _on_the_tick(replace(bound, value_s=0.1 + 0.2), 0.1).value_s == pytest.approx(0.3, rel=1e-12)
    assert _on_the_tick(bound, 0.0) == bound


def test_the_refuter_stops_short_of_the_optimum() -> None:
    """It refutes what lies below an optimum that it can prove, and never the optimum itself."""
    refuter = Refuter(chain_of(pipeline([1] * 4, [2] * 4, [0] * 3, 8)))
    assert refuter.refutes(32.9, rounds_max=10)
    assert not refuter.refutes(33.0, rounds_max=10)


def compare_with_solver(seed: int, count: int) -> float:
    """Mean of bound over optimum on `count` problems that the solver proved; asserts that none is above 1."""
    rng = random.Random(seed)
    ratios: list[float] = []
    while len(ratios) < count:
        problem = random_pipeline(rng)
        solved = solve_pipeline(problem, limit_s=20.0)
        if solved.proven:
            for effort in range(3):
                ratio = pipeline_bound(problem, effort).value_s / solved.makespan_s
                assert ratio <= NEVER_ABOVE, f"seed {seed}, effort {effort}: {problem}"
            ratios.append(ratio)
    return sum(ratios) / count


@pytest.mark.slow
def test_bounds_are_near_the_optimum_of_three_hundred_problems() -> None:
    """Never above the optimum, and on average 0.99 of it or more."""
    assert compare_with_solver(seed=12, count=300) >= 0.99


@pytest.mark.slow
def test_bounds_are_near_the_optimum_of_fifteen_hundred_problems() -> None:
    """The same at five times the size."""
    assert compare_with_solver(seed=13, count=1500) >= 0.99


def test_times_too_short_to_be_seen_are_not_rounded_up_to_a_tick() -> None:
    """A link of a millisecond and forwards of a femtosecond: ten thousand of these are no further millisecond."""
    problem = pipeline([9e-16, 9e-16], [9e-16, 9e-16], [1e-3], 10_000)
    for effort in (0, 1):
        assert pipeline_bound(problem, effort).value_s == pytest.approx(2e-3, rel=1e-6)
