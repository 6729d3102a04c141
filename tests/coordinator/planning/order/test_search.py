"""Searches reach known optima without a solver, keep memory limits, and never claim less than a proven bound."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.commands.plan import plan
from coordinator.planning.order.improver import OrderImprover
from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.order.search import Found, latency_warmup, problem_graph, search
from coordinator.planning.problems import load_problem
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pipeline import drive, replay
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.ir import Op
from protocol.schedule.policies import Policy
from tests.oracles.split_search import Line, search_split
from tests.strategies.problems import random_pipeline

PROBLEMS = sorted((Path(__file__).parents[3] / "data/problems").glob("schedule_*.json"))


def frozen() -> float:
    """A clock on which no time passes, so that only moves and bounds end a search."""
    return 0.0


def verify(problem: PipelineProblem, found: Found) -> None:
    """The answer against coordinator/README.md, from its operations alone."""
    timeline = found.timeline
    keys = timeline.graph.keys
    at = {
        (keys[t].op, keys[t].microbatch, keys[t].position): (timeline.start_s[t], timeline.end_s[t])
        for t in range(len(keys))
    }
    eps = 1e-6
    back = Op.I if problem.split_backward else Op.B
    for m in range(problem.microbatches):
        for s in range(problem.stages):
            lengths = {
                Op.F: problem.forward_s[s],
                Op.I: problem.backward_input_s[s],
                Op.W: problem.backward_weight_s[s],
            }
            lengths[Op.B] = lengths[Op.I] + lengths[Op.W]
            for op in (Op.F, back, *((Op.W,) if problem.split_backward else ())):
                start, end = at[op, m, s]
                assert start >= -eps and end - start == pytest.approx(lengths[op])
            if s:
                assert at[Op.F, m, s][0] >= at[Op.F, m, s - 1][1] + problem.link_s[s - 1] - eps
                assert at[back, m, s - 1][0] >= at[back, m, s][1] + problem.link_s[s - 1] - eps
            assert at[back, m, s][0] >= at[Op.F, m, s][1] - eps
            if problem.split_backward:
                assert at[Op.W, m, s][0] >= at[back, m, s][1] - eps
    last = Op.W if problem.split_backward else Op.B
    for s in range(problem.stages):
        spans = sorted(times for (_, _, position), times in at.items() if position == s)
        assert all(earlier[1] <= later[0] + eps for earlier, later in pairwise(spans))
        if problem.activations_max is not None:
            lives = [(at[Op.F, m, s][0], at[last, m, s][1]) for m in range(problem.microbatches)]
            for start, _ in lives:
                assert sum(a <= start + eps and b > start + eps for a, b in lives) <= problem.activations_max[s]
    assert max(end for _, end in at.values()) == pytest.approx(timeline.makespan_s)


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.stem)
def test_every_problem_is_solved_to_its_optimum(path: Path) -> None:
    """All optima are reached and proven by the bound, on a clock that stands still."""
    problem = load_problem(path, "schedule", PipelineProblem)
    found = search(problem, budget_s=1.0, seed=0, clock=frozen)
    verify(problem, found)
    assert found.timeline.makespan_s == pytest.approx(json.loads(path.read_bytes())["known"]["optimum_s"])
    assert found.fraction == pytest.approx(1)
    assert found.stopped == "bound"


@pytest.mark.parametrize("number", range(12))
def test_answers_to_random_problems_hold_every_rule(number: int) -> None:
    """Unequal stages, links, caps and splits; a tenth of a second of improving."""
    problem = random_pipeline(random.Random(number))
    found = search(problem, budget_s=0.1, seed=number)
    verify(problem, found)
    assert found.bound.value_s <= found.timeline.makespan_s * (1 + 1e-9)
    check(found.timeline.schedule(problem.stages))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_improving_never_makes_worse_nor_breaks_a_limit(seed: int) -> None:
    """From a random problem's first order: not longer, replayable, within memory, the same for the same seed."""
    rng = random.Random(seed)
    problem = random_pipeline(rng)
    caps = problem.activations_max or [problem.microbatches] * problem.stages
    graph = problem_graph(problem)
    first = drive(graph, [Policy(alive_max=(cap,)) for cap in caps])
    improver = OrderImprover(graph, [float(cap) for cap in caps])
    results = [improver.improve(first.orders, 0.0, random.Random(seed), lambda: 1.0, moves_max=60) for _ in range(2)]
    assert results[0] == results[1]
    improved = replay(graph, results[0].orders)
    assert improved.makespan_s == pytest.approx(results[0].makespan_s)
    assert improved.makespan_s <= first.makespan_s + 1e-9
    assert all(peak <= cap + 1e-9 for peak, cap in zip(improved.peaks(), caps, strict=True))


@pytest.mark.parametrize(("caps", "optimum"), [([4, 4, 4, 4], 27), ([4, 3, 2, 1], 30)])
def test_split_backwards_reach_the_proven_optima(caps: list[int], optimum: float) -> None:
    """P=4, m=8, F=I=W=1 (algorithms section 1.4)."""
    problem = msgspec.structs.replace(load_problem(PROBLEMS[2], "schedule", PipelineProblem), activations_max=caps)
    scaled = msgspec.structs.replace(
        problem, forward_s=[1.0] * 4, backward_input_s=[1.0] * 4, backward_weight_s=[1.0] * 4, split_backward=True
    )
    assert search(scaled, 1.0, 0, clock=frozen).timeline.makespan_s == optimum


@pytest.mark.parametrize(
    ("nodes", "microbatches", "link_s"),
    [
        (4, 8, 0.1),
        (8, 16, 0.1),
        (8, 32, 0.1),
        (16, 64, 0.1),
        (4, 16, 1),
        (4, 16, 2),
        (8, 32, 1),
        (8, 32, 3),
        (8, 64, 0.5),
        (16, 64, 1),
    ],
)
def test_the_latency_aware_warm_up_reaches_its_bound(nodes: int, microbatches: int, link_s: float) -> None:
    """F=1, B=2: no bubble but filling and draining, whatever the links take."""
    warmup = latency_warmup([1.0] * nodes, [2.0] * nodes, [link_s] * (nodes - 1))
    design = Design.of(nodes, microbatches).order("interleaved", wait_turn=True).warm_up(warmup.__getitem__)
    timeline = design.timeline(network=Network.line([link_s] * (nodes - 1)))
    assert timeline.makespan_s == pytest.approx((nodes - 1) * (3 + 2 * link_s) + 3 * microbatches)


def test_segments_with_split_backwards_on_slow_links() -> None:
    """8 nodes, 32 microbatches, link 0.1, four segments: 98.45 with a peak of 4.75, proven best for this cut."""
    found = search_split(Line(8, 32, link_s=0.1), 4.75, (4,), budget_s=0.0)
    assert found.timeline.makespan_s <= 98.45 + 1e-9
    assert max(found.timeline.peaks()) <= 4.75
    check(found.timeline.schedule(8))


@pytest.mark.slow
def test_whole_microbatches_with_split_backwards_on_slow_links() -> None:
    """8 nodes, 32 microbatches, link 0.1, whole microbatches: at most 102.8 with a peak of 8."""
    found = search_split(Line(8, 32, link_s=0.1), 8, budget_s=10.0)
    assert found.timeline.makespan_s <= 102.8 + 1e-9
    assert max(found.timeline.peaks()) <= 8
    check(found.timeline.schedule(16))


def test_a_limit_that_nothing_fits_is_named() -> None:
    """Less than one segment."""
    with pytest.raises(BadInputError, match="peak_max: no order of 4 nodes fits"):
        search_split(Line(4, 4), 0.2, (1, 2), budget_s=0.1)


def test_the_command_answers_in_the_format() -> None:
    """Every key of coordinator/README.md; the operations are complete; the known value is not needed."""
    answer = json.loads(CliRunner().invoke(plan, ["schedule", str(PROBLEMS[0]), "--json", "--seed", "3"]).stdout)
    assert {"makespan_s", "lower_bound_s", "search_s", "stopped", "seed", "operations"} <= answer.keys()
    assert answer["seed"] == 3 and len(answer["operations"]) == 4 * 8 * 2
    assert set(answer["operations"][0]) == {
        "node",
        "op",
        "microbatch",
        "position",
        "segment",
        "slice",
        "start_s",
        "end_s",
    }
    said = CliRunner().invoke(plan, ["schedule", str(PROBLEMS[0])]).stdout
    assert "100.0% of the lower bound" in said and "stage 3: F0 B0" in said


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"activations_max": [4, 3, 0, 1]}, r"activations_max\[2\]: a cap of 0"),
        ({"forward_s": [1, -1, 1, 1]}, r"forward_s\[1\]: -1 is not"),
        ({"link_s": [0, 0]}, "link_s: 3 values wanted, got 2"),
        ({"stages": 0}, "stages: 0 is not at least 1"),
        ({"microbatches": 10**9}, "microbatches: more than"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_problem_is_refused_by_key(tmp_path: Path, change: dict[str, object], complaint: str) -> None:
    """One sentence that names the key."""
    file = tmp_path / "problem.json"
    file.write_text(json.dumps(json.loads(PROBLEMS[0].read_bytes()) | change))
    result = CliRunner().invoke(plan, ["schedule", str(file)])
    assert isinstance(result.exception, BadInputError)
    with pytest.raises(BadInputError, match=complaint):
        load_problem(file, "schedule", PipelineProblem)


def test_numbers_that_are_not_are_refused(tmp_path: Path) -> None:
    """NaN in a file is not a time."""
    file = tmp_path / "problem.json"
    file.write_text(PROBLEMS[0].read_text().replace("[10, 10, 10, 10]", "[NaN, 10, 10, 10]", 1))
    with pytest.raises(BadInputError, match=r"forward_s\[0\]"):
        load_problem(file, "schedule", PipelineProblem)


@pytest.mark.parametrize("depth", [700, 900, 980, 100_000])
def test_a_value_that_is_nested_without_end_is_refused(tmp_path: Path, depth: int) -> None:
    """Whether it is the reading that gives up or what looks at the numbers."""
    file = tmp_path / "problem.json"
    nested = "[" * depth + "]" * depth
    file.write_text(PROBLEMS[0].read_text().replace("[10, 10, 10, 10]", nested, 1))
    with pytest.raises(BadInputError, match=r"^problem\.json: "):
        load_problem(file, "schedule", PipelineProblem)


@pytest.mark.parametrize("seed", range(12))
def test_a_bound_that_is_reached_is_not_printed_above_the_makespan(seed: int) -> None:
    """Tenths and sevenths are rounded differently in sums of another order."""
    problem = msgspec.structs.replace(random_pipeline(random.Random(seed)), microbatches=3)
    for share in (10, 7, 3):
        times = ("forward_s", "backward_input_s", "backward_weight_s", "link_s")
        parts = {key: [value / share for value in getattr(problem, key)] for key in times}
        found = search(msgspec.structs.replace(problem, **parts), 5.0, seed, frozen)
        assert found.bound.value_s <= found.timeline.makespan_s, f"seed {seed}"


def test_a_link_of_any_length_has_a_warm_up() -> None:
    """Twice the link over the cycle is more than a number holds; nobody has so many microbatches anyway."""
    warmup = latency_warmup([1e-200, 1e-200], [1e-200, 1e-200], [1e200])
    assert warmup[0] > 10**6 and warmup[1] == 0
