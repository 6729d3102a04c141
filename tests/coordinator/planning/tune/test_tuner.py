"""The tuner runs every choice or says why not, keeps memory caps, and reads a run and a measured network."""

from __future__ import annotations

import json
import math
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.commands.plan import plan
from coordinator.planning.order.policy_grid import grid
from coordinator.planning.partition.costs import BlockCost
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.report import report
from coordinator.planning.tune.case import Case, Choice, Node, Workload, balanced_edges
from coordinator.planning.tune.tuner import Space, tune
from protocol.base.errors import BadInputError
from protocol.run.segments import equal_cost_segments, transformer_costs
from protocol.schedule.check import check
from tests.oracles.policy_grid import PolicyGrid

WORK = Workload(
    [BlockCost(1.0, 2.0, 10.0, 4.0) for _ in range(18)], samples=16, tokens=64, boundary_bytes=1.0, attention_share=0.3
)
NEAR = Network.uniform(4, 0.05)


def test_every_choice_has_a_place_and_a_reason() -> None:
    """One best; each other kept for its memory, dominated by a choice or a bound, or rejected with a sentence."""
    found = tune(WORK, [Node()] * 4, NEAR)
    assert found.stopped == "done"
    assert [o.status for o in found.outcomes].count("best") == 1 and found.best.status == "best"
    assert all(o.reason for o in found.outcomes)
    ran = [o for o in found.outcomes if math.isfinite(o.makespan_s)]
    assert ran == sorted(ran, key=lambda o: (o.makespan_s, o.peak_bytes))
    kept = [o for o in ran if o.status in ("best", "kept")]
    assert all(later.peak_bytes < earlier.peak_bytes for earlier, later in pairwise(kept))
    for outcome in ran:
        assert outcome.bound_s <= outcome.makespan_s * (1 + 1e-9)
        assert outcome.timeline is not None
        check(outcome.timeline.schedule(8))
        report(outcome.timeline)


def test_no_choice_exceeds_a_memory_cap() -> None:
    """With room for the parameters and a few activations, what would need more is rejected or held back."""
    caps = [Node(1.0, 105.0)] * 4  # 50 of parameters, and three microbatches of 18
    found = tune(WORK, caps, NEAR, space=Space(microbatch_samples=(1,)))
    assert found.best.peak_bytes <= caps[0].memory_bytes
    assert any(o.reason.startswith("memory: node") for o in found.outcomes)


def test_what_divides_nothing_is_rejected_with_the_numbers() -> None:
    """A microbatch size, groups of segments, more stages than blocks, more nodes than there are."""
    few = Workload(WORK.blocks[:6], samples=6)
    space = Space(nodes=(4, 5), microbatch_samples=(1, 4), segments=(1,), placements=("one-to-one", "circular"))
    reasons = {o.reason for o in tune(few, [Node()] * 4, NEAR, space=space).outcomes}
    assert "microbatch_samples: 4 does not divide the step's 6 samples" in reasons
    assert "stages: 8 stages cannot share 6 blocks" in reasons
    assert "nodes: 5 wanted, 4 given" in reasons


def test_a_budget_that_ends_leaves_the_rest_untried() -> None:
    """On a clock that jumps ahead after the first choices, the others say so."""
    ticks = iter(range(1000))
    found = tune(WORK, [Node()] * 4, NEAR, budget_s=5, clock=lambda: float(next(ticks)))
    assert found.stopped == "time" and math.isfinite(found.best.makespan_s)
    assert any(o.reason == "not tried: the 5 s ended" for o in found.outcomes)


def test_the_first_choice_is_tried_however_late_it_is() -> None:
    """A computer that was busy for a hundredth of a second gave "no choice can run" as the answer to a short budget."""
    ticks = iter(range(1000))
    found = tune(WORK, [Node()] * 4, NEAR, budget_s=0.5, clock=lambda: float(next(ticks)))
    assert math.isfinite(found.best.makespan_s)
    assert sum(o.reason != "not tried: the 0.5 s ended" for o in found.outcomes) == 1


def test_a_slow_node_gets_fewer_blocks() -> None:
    """Blocks follow speed."""
    assert balanced_edges([1.0] * 12, [1, 2, 1]) == [0, 3, 9, 12]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_balanced_edges_are_the_best(costs: list[int], data: st.DataObject) -> None:
    """Against every way to cut, with unequal speeds."""
    speeds = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=min(4, len(costs))))

    def worst(edges: list[int]) -> float:
        return max(sum(costs[a:b]) / v for (a, b), v in zip(pairwise(edges), speeds, strict=True))

    every = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), len(speeds) - 1))
    edges = balanced_edges(costs, speeds)
    assert len(edges) == len(speeds) + 1 and edges[-1] == len(costs)
    assert worst(edges) <= min(map(worst, every)) * (1 + 1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_choices_bound_is_never_above_its_time(data: st.DataObject) -> None:
    """Whatever the placement, the cut and the network: a bound that ended a choice early ended it rightly."""
    blocks = [BlockCost(float(data.draw(st.integers(0, 5))), float(data.draw(st.integers(0, 9)))) for _ in range(8)]
    work = Workload(blocks, 8, tokens=8, boundary_bytes=2.0, attention_share=0.5, overhead_s=0.25)
    nodes = [Node(float(data.draw(st.integers(1, 3)))) for _ in range(3)]
    network = Network(
        [[0.0 if a == b else float(data.draw(st.integers(0, 3))) for b in range(3)] for a in range(3)],
        uplink_bytes_per_s=data.draw(st.none() | st.just([1.0, 2.0, 4.0])),
    )
    placement, order = data.draw(
        st.sampled_from(
            [
                ("one-to-one", "1F1B"),
                ("one-to-one", "all memory"),
                ("V-shape", "forward first"),
                ("bidirectional", "interleaved"),
            ]
        )
    )
    choice = Choice(
        data.draw(st.integers(1, 3)), 1, placement, order, data.draw(st.booleans()), data.draw(st.integers(1, 2))
    )
    case = Case(choice, work, nodes, network)
    assert case.bound_s() <= case.run().makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("work", "nodes", "complaint"),
    [
        (WORK, [], "nodes: at least one"),
        (WORK, [Node(math.nan)], r"nodes\[0\].speed"),
        (WORK, [Node(1.0, 0.0)], r"nodes\[0\].memory_bytes: a cap of 0"),
        (WORK, [Node(1.0, 5.0)], "no choice can run; .* cannot hold its parameters"),
        (Workload([BlockCost(-1.0, 1.0)], 1), [Node()], r"blocks\[0\].forward_s"),
    ],
)
def test_wrong_numbers_are_refused_by_name(work: Workload, nodes: list[Node], complaint: str) -> None:
    """Negative, not a number, a cap of zero, memory that holds not even the parameters."""
    with pytest.raises(BadInputError, match=complaint):
        tune(work, nodes, NEAR)


def test_the_grid_has_forty_points_and_catches_deadlocks() -> None:
    """Each point gives a valid order or the sentence of its deadlock; 4 x 8 is fastest in both directions at once."""
    points = list(grid(4))
    assert len(points) == 40
    explored = [PolicyGrid(4, 8).run(point) for point in points]
    for found in explored:
        assert (found.timeline is None) == found.refused.startswith("schedule: deadlock: ")
    best = min((f for f in explored if f.timeline is not None), key=lambda f: f.timeline.makespan_s)  # type: ignore[union-attr]
    assert best.timeline is not None and best.timeline.makespan_s == 27


def test_v_shape_needs_measured_times() -> None:
    """Backward first ties with circular at F=B and loses at B=2F (algorithms section 1.4)."""
    point = next(p for p in grid(4) if (p.placement, p.first, p.forward_deepest) == ("V-shape", "backward", True))
    measured = PolicyGrid(4, 8).run(point).timeline
    assert measured is not None and measured.makespan_s == 32.5


@pytest.mark.parametrize(
    ("tokens", "segments", "linear", "quadratic", "lengths"),
    [
        (131072, 4, *transformer_costs(7e9, 32, 4096), (55504, 30943, 24138, 20487)),
        (32768, 4, *transformer_costs(2.7e9, 32, 2560), (11981, 8261, 6717, 5809)),
        (8, 2, 0.0, 1.0, (6, 2)),
        (12, 3, 1.0, 0.0, (4, 4, 4)),
    ],
)
def test_segments_of_equal_cost(
    tokens: int, segments: int, linear: float, quadratic: float, lengths: tuple[int, ...]
) -> None:
    """The closed form of algorithms section 1.5."""
    assert equal_cost_segments(tokens, segments, linear, quadratic) == lengths


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 8), st.floats(0, 1e3), st.floats(0, 1e3))
def test_segments_are_whole_multiples_that_add_up(
    units: int, segments: int, multiple: int, linear: float, quadratic: float
) -> None:
    """None is empty, however unequal the costs."""
    if units < segments or linear + quadratic < 1e-6:
        with pytest.raises(BadInputError, match="segments: "):
            equal_cost_segments(units * multiple, max(segments, units + 1), linear, quadratic, multiple)
        return
    lengths = equal_cost_segments(units * multiple, segments, linear, quadratic, multiple)
    assert sum(lengths) == units * multiple and len(lengths) == segments
    assert all(length > 0 and length % multiple == 0 for length in lengths)


RUN = """
name = "tuned"
[model]
layers = 6
hidden = 64
heads = 4
kv_heads = 4
feed_forward = 128
context = 64
[batch]
microbatches = 8
samples = 1
[stages]
count = 2
"""


def network_file(folder: Path, volunteers: int = 2) -> Path:
    """Two servers and some volunteers; volunteers reach each other by a server."""
    machines = [
        {
            "name": f"m{i}",
            "role": "server" if i < 2 else "volunteer",
            "memory_bytes": 10**9,
            "forward_flops_per_s": 1e9 * (1 + i),
            "backward_flops_per_s": 1e9,
            "uplink_bytes_per_s": 1e6,
            "downlink_bytes_per_s": 1e7,
        }
        for i in range(2 + volunteers)
    ]
    links = [
        {"source": f"m{i}", "target": f"m{j}", "latency_s": 0.01 * (1 + i), "bytes_per_s": 1e6}
        for i in range(2 + volunteers)
        for j in range(2)
        if i != j
    ]
    file = folder / "network.json"
    file.write_text(json.dumps({"kind": "network", "machines": machines, "links": links, "sites": []}))
    return file


def test_the_command_ranks_choices_for_a_run_on_its_machines(tmp_path: Path) -> None:
    """A table for people, one JSON object for programs; the strongest machine first."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    arguments = ["tune", str(run), str(network_file(tmp_path)), "--nodes", "2,4", "--segments", "1"]
    said = CliRunner().invoke(plan, arguments, catch_exceptions=False).stdout
    assert "nodes in order: m3, " in said and " best " in said
    answer = json.loads(CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert answer["choices"][0]["status"] == "best" and answer["choices"][0]["step_s"] > 0
    assert all(choice["reason"] for choice in answer["choices"])


def test_choices_that_never_ran_for_one_reason_share_a_line(tmp_path: Path) -> None:
    """Without time nothing but the first choices run; the table says once how many it left out, JSON each."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    arguments = ["tune", str(run), str(network_file(tmp_path)), "--budget-s", "0.01"]
    said = CliRunner().invoke(plan, [*arguments, "--all"], catch_exceptions=False).stdout
    said = " ".join(said.split())  # long lines are wrapped
    assert said.count("not tried: the 0.01 s ended") == 1 and " more: not tried" in said
    answer = json.loads(CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert sum("not tried" in choice["reason"] for choice in answer["choices"]) > 1


def test_without_options_only_what_the_blocks_allow_is_tried(tmp_path: Path) -> None:
    """A model of 6 blocks on 8 machines: at most 6 nodes, the run file's own microbatch among the sizes."""
    run = tmp_path / "run.toml"
    run.write_text(RUN.replace("layers = 6", "layers = 2").replace("samples = 1", "samples = 3"))
    arguments = ["tune", str(run), str(network_file(tmp_path, 6)), "--segments", "1"]
    answer = json.loads(CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False).stdout)
    assert {choice["nodes"] for choice in answer["choices"]} == {6, 3}
    sizes = {(choice["nodes"], choice["microbatch_samples"]) for choice in answer["choices"]}
    assert {(6, 1), (6, 3), (3, 3), (3, 8)} <= sizes and (6, 8) not in sizes


@pytest.mark.slow
def test_the_listing_is_short_and_narrow_and_all_is_there_on_demand(tmp_path: Path) -> None:
    """Who is beaten in time and memory is counted, and listed with --all; nothing is wider than 100 columns."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    arguments = ["tune", str(run), str(network_file(tmp_path)), "--segments", "1,2"]
    few, everything = (
        CliRunner().invoke(plan, [*arguments, *more], catch_exceptions=False).stdout for more in ((), ("--all",))
    )
    assert max(map(len, (few + everything).splitlines())) <= 100
    assert "dominated" not in few and "dominated: " in everything
    assert "which RUN.toml cuts into 8 of 1" in few
    answer = json.loads(CliRunner().invoke(plan, [*arguments, "--json"], catch_exceptions=False).stdout)
    beaten = sum(choice["status"] == "dominated" for choice in answer["choices"])
    assert f"{beaten} more choices are no better" in few


@pytest.mark.parametrize(("option", "value"), [("--nodes", "0"), ("--nodes", "two"), ("--segments", "-1")])
def test_the_commands_numbers_are_checked(tmp_path: Path, option: str, value: str) -> None:
    """A sentence that names the option."""
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    result = CliRunner().invoke(plan, ["tune", str(run), str(network_file(tmp_path)), option, value])
    assert isinstance(result.exception, BadInputError) and option in str(result.exception)


@pytest.mark.parametrize("share", [3, 7, 10])
def test_a_bound_that_is_reached_is_not_above_the_makespan(share: int) -> None:
    """On one node both are the sum of all work, added up in another order."""
    work = Workload([BlockCost(1 / share, 2 / share), BlockCost(4 / share, 5 / share)], samples=12)
    space = Space((1,), (1, 2, 3), placements=("one-to-one",), segments=(1,), slices=())
    found = tune(work, [Node()], Network(), space, 60.0)
    assert all(outcome.bound_s <= outcome.makespan_s for outcome in found.outcomes)
    assert found.best.bound_s == pytest.approx(found.best.makespan_s)
