"""From a measured network to stages and routes: `plan run` and `plan compare`, and networks that are hardly
one.
"""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.commands.compare import compare
from coordinator.commands.plan import plan
from coordinator.commands.run import duration, share
from coordinator.commands.tune import workload
from coordinator.planning.placement.pool_bound import pool_bound
from coordinator.planning.placement.pool_search import PoolAnswer, search_pools
from coordinator.planning.placement.run_plan import plan_run, sizes_of, skipped_stages
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import hops_of, member_model, world_of
from coordinator.planning.routes.search import search_routes
from protocol.base.errors import BadInputError
from protocol.run.run import BatchSection, ModelSection, RunConfig, WireSection
from protocol.schedule.profile import Link, Machine, NetworkFile, build_network
from tests.benchmarks.swarms import swarm
from tests.oracles.route_rules import violations

DATA = Path(__file__).parents[3] / "data"
SMALL = RunConfig(model=ModelSection(layers=6), batch=BatchSection(microbatches=12, samples=8))


def random_file(rng: random.Random) -> NetworkFile:
    """Up to five servers and five volunteers, some links missing, some machines tiny, some lines dead."""
    machines = [
        Machine(
            name=f"{role}-{number}",
            role=role,  # type: ignore[arg-type]
            forward_flops_per_s=10 ** rng.uniform(9, 13),
            backward_flops_per_s=10 ** rng.uniform(9, 13),
            memory_bytes=int(10 ** rng.uniform(6, 10)),
            uplink_bytes_per_s=rng.choice([0.0, 1e6, 1e8]),
            downlink_bytes_per_s=rng.choice([1e6, 1e8]),
        )
        for role, count in (("server", rng.randint(1, 5)), ("volunteer", rng.randint(0, 5)))
        for number in range(count)
    ]
    links = [
        Link(source=a.name, target=b.name, latency_s=rng.uniform(0, 0.2), bytes_per_s=10 ** rng.uniform(5, 9))
        for a in machines
        for b in machines
        if a.name != b.name and b.role == "server" and rng.random() < 0.85
    ]
    return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9))
def test_any_network_gives_a_plan_or_a_sentence(seed: int) -> None:
    """Random networks, degenerate ones among them, are planned by the rules or refused with what is missing."""
    rng = random.Random(seed)
    file = random_file(rng)
    try:
        found = plan_run(SMALL, build_network(file), skip=rng.choice([Fraction(0), Fraction(1, 4)]), budget_s=0.05)
    except BadInputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert len(refusal) > 20 and ":" in refusal
        return
    assert found.plan.edges[0] == 0 and found.plan.edges[-1] == SMALL.block_count
    assert found.tokens_per_s > 0 and found.step_s >= found.found.lower_bound_s
    if found.routed is not None and found.routes is not None:
        assert violations(found.routed.model, found.routes.routes) == []


@pytest.mark.parametrize(
    ("servers", "volunteers", "says"), [(0, 3, "0 servers"), (1, 0, "1 servers"), (2, 0, None), (2, 1, None)]
)
def test_smallest_networks(servers: int, volunteers: int, says: str | None) -> None:
    """Two servers are enough, with or without volunteers; fewer are refused by number."""
    network = swarm(servers, volunteers, measured_links=0)
    if says is None:
        assert plan_run(SMALL, network, budget_s=0.1).tokens_per_s > 0
    else:
        with pytest.raises(BadInputError, match=says):
            plan_run(SMALL, network, budget_s=0.1)


def test_members_links_are_the_quickest_way_over_servers() -> None:
    """The link between two members is the least over all back and front servers, and hops name that pair."""
    network = swarm(8, 12, seed=3)
    world = world_of(network, sizes_of(SMALL), may_bench=False)
    placement = search_placement(world, 0, 0.1, stages=2).placement
    routed = member_model(world, placement)
    to, back = network.transfer_s(world.tokens * sizes_of(SMALL).activation_bytes)
    model = routed.model
    for a, b in ((0, model.nodes - 1), (model.nodes - 1, 0)):
        one, two = (placement.stages[model.stage_of_node[node]] for node in (a, b))
        machine, other = routed.members[a], routed.members[b]
        best = min(to[machine, s] + to[s, f] + back[f, other] for s in one.back for f in two.front)
        assert model.link_s[a][b] == pytest.approx(best, rel=1e-4)
    answer = search_routes(model, 0, 0.2)
    for route in answer.routes[:4]:
        hops = hops_of(placement, routed, route)
        assert [hop.member for hop in hops] == [routed.members[node] for node in route]
        for hop in hops:
            assert hop.front in placement.stages[hop.stage].front
            assert hop.back in placement.stages[hop.stage].back


def test_skipping_gives_stage_zero_more_power_per_layer() -> None:
    """With half of the other stages skipped, stage 0 (which nobody skips) gets fewer layers for its power."""
    network = swarm(9, 0, seed=1)
    config = RunConfig(model=ModelSection(layers=24), batch=BatchSection(microbatches=24, samples=8))
    found = plan_run(config, network, skip=Fraction(1, 4), stages=4, budget_s=0.5)
    assert found.routed is not None and found.routed.model.route_stages == 3
    visits = [pace.visits for pace in found.plan.paces]
    assert visits == pytest.approx([24, 16, 16, 16])


def test_shares_of_skipping() -> None:
    """Thirds may be written as decimals; what is no share is refused."""
    assert share("0.25") == Fraction(1, 4) and share("0.33") == share("1/3") == Fraction(1, 3)
    assert skipped_stages(6, Fraction(1, 3)) == 2 and skipped_stages(5, Fraction(1, 3)) is None
    assert skipped_stages(4, Fraction(3, 4)) is None and skipped_stages(1, Fraction(0)) == 0
    with pytest.raises(BadInputError, match="--skip"):
        share("a lot")
    with pytest.raises(BadInputError, match="no whole number"):
        plan_run(SMALL, swarm(8, 0), skip=Fraction(3, 4), stages=4)
    with pytest.raises(BadInputError, match="--skip"):
        plan_run(SMALL, swarm(4, 0), skip=Fraction(3, 2))


def test_differences_up_are_counted_as_what_passes_whole() -> None:
    """With `d4` a boundary comes down in `q8`, and what begins a route goes up in it: planners with one number for all
    boundaries counted 4 bits of 8."""
    stages = msgspec.structs.replace(SMALL.stages, back_servers=0)
    config = msgspec.structs.replace(SMALL, stages=stages, wire=WireSection(activations_up="d4"))
    assert sizes_of(config).activation_bytes == sizes_of(SMALL).activation_bytes
    assert workload(config).boundary_bytes == workload(SMALL).boundary_bytes
    bf16 = msgspec.structs.replace(SMALL, wire=WireSection(activations_up="bf16", activations_down="bf16"))
    assert workload(bf16).boundary_bytes == 2.0 * SMALL.model.context * SMALL.model.hidden


def test_memory_decides_who_holds_layers() -> None:
    """A machine too small for one layer is left out or named; sizes count optimizer states on servers."""
    sizes = sizes_of(SMALL)
    assert sizes.server_held_bytes > sizes.held_bytes > 4 * sizes.gradient_bytes / 4
    assert sizes_of(SMALL, recompute=True).kept_bytes < sizes.kept_bytes
    network = swarm(2, 0)
    tiny = NetworkFile(
        kind="network",
        machines=tuple(msgspec.structs.replace(m, memory_bytes=1000) for m in network.machines),
    )
    with pytest.raises(BadInputError, match="memory"):
        plan_run(SMALL, build_network(tiny), budget_s=0.1)


def test_run_command_draws_and_prints(tmp_path: Path) -> None:
    """`plan run` prints stages, traffic, speed and time to finish, and writes two well-formed pictures."""
    run = tmp_path / "RUN.toml"
    run.write_text('name = "trial"\nsteps = 10\n[model]\nlayers = 8\n[batch]\nmicrobatches = 8\nsamples = 4\n')
    picture = tmp_path / "map.svg"
    args = ["run", str(run), str(DATA / "network_two_sites.json"), "--budget-s", "0.3", "--svg", str(picture)]
    result = CliRunner().invoke(plan, args, catch_exceptions=False)
    for word in (
        "of 8 servers",
        "tokens per second",
        "all steps in",
        "sets it",
        "cut evenly",
        "drawn",
        "% of the bound",
        "2 stages of 1",
    ):
        assert word in result.output
    for path in (picture, tmp_path / "map-gantt.svg"):
        assert ElementTree.fromstring(path.read_text()).tag.endswith("svg")
    nowhere = [*args[:-1], str(tmp_path / "missing" / "map.svg")]
    with pytest.raises(BadInputError, match=f"--svg: {nowhere[-1]} cannot be written"):
        CliRunner().invoke(plan, nowhere, catch_exceptions=False)


def test_the_map_keeps_hops_clear_of_the_title_and_boxes_full(tmp_path: Path) -> None:
    """An arrow's seconds stand between two boxes beside their text; the tallest box ends below its last line."""
    run = tmp_path / "RUN.toml"
    run.write_text("")
    picture = tmp_path / "map.svg"
    args = ["run", str(run), str(DATA / "network_two_sites.json"), "--budget-s", "0.3", "--stages", "3"]
    CliRunner().invoke(plan, [*args, "--svg", str(picture)], catch_exceptions=False)
    root = ElementTree.fromstring(picture.read_text())
    texts = root.findall("{http://www.w3.org/2000/svg}text")
    title, hops = texts[0], [text for text in texts if text.get("text-anchor") == "middle"]
    boxes = [box for box in root.findall("{http://www.w3.org/2000/svg}rect") if box.get("rx")]
    assert len(boxes) == 3 and len(hops) == 2
    assert all(float(hop.attrib["y"]) > float(title.attrib["y"]) + 30 for hop in hops)
    for hop, (one, two) in zip(hops, pairwise(boxes), strict=True):
        assert float(one.attrib["x"]) + float(one.attrib["width"]) < float(hop.attrib["x"]) < float(two.attrib["x"])
    bottom = float(boxes[0].attrib["y"]) + float(boxes[0].attrib["height"])
    assert bottom - 34 < max(float(text.attrib["y"]) for text in texts) < bottom
    assert "stage 2" in (tmp_path / "map-gantt.svg").read_text()


def test_run_command_lets_routes_share_lines(tmp_path: Path) -> None:
    """With `--shared-uplinks` skipping routes count what parallel transfers share, and the plan says so."""
    run = tmp_path / "RUN.toml"
    run.write_text('name = "trial"\nsteps = 10\n[model]\nlayers = 8\n[batch]\nmicrobatches = 8\nsamples = 4\n')
    args = ["run", str(run), str(DATA / "network_two_sites.json"), "--budget-s", "0.3", "--shared-uplinks"]
    args += ["--skip", "1/3", "--stages", "3"]
    text = CliRunner().invoke(plan, args, catch_exceptions=False).output
    assert "shares its lines" in " ".join(text.split())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(24.53, "24.5 s"), (192.0, "3.2 minutes"), (25_560.0, "7.1 hours"), (1_036_800.0, "12.0 days")],
)
def test_durations_are_said_in_the_unit_that_suits_them(seconds: float, text: str) -> None:
    """A run of seconds does not take 0.0 hours."""
    assert duration(seconds) == text


def test_compare_command_lists_every_way() -> None:
    """`plan compare` prints all seven ways side by side with their fraction of the bound."""
    args = ["compare", str(DATA / "network_two_sites.json"), "--stages", "4", "--budget-s", "0.4"]
    text = CliRunner().invoke(plan, args, catch_exceptions=False).output
    for name in ("fixed chains", "online router", "greedy", "delay-blind", "collision-blind", "skipping, planned"):
        assert name in text
    assert len(re.findall(r"\d+%", text)) == 7


def test_compared_ways_are_above_their_bounds() -> None:
    """No way beats the bound of its rules, and the planned ones are the best of their kind."""
    raw = json.loads((DATA / "network_two_sites.json").read_text())
    network = build_network(msgspec.convert(raw, NetworkFile))
    world = world_of(network, sizes_of(SMALL), closed=True)
    placement = search_placement(world, 0, 0.2, stages=4).placement
    rows = compare(member_model(world, placement, skip_stages=1).model, 0, 1.0)
    for row in rows:
        assert row.bound_s <= row.makespan_s * (1 + 1e-9)
    planned = rows[3].makespan_s
    assert planned <= min(row.makespan_s for row in rows[:3]) * 1.001
    assert rows[-1].makespan_s <= min(row.makespan_s for row in rows[4:]) * 1.001


def test_same_seed_same_plan() -> None:
    """A plan depends on its input and seed only, not on the order of hashing."""
    network = swarm(6, 10, seed=2)
    plans = [search_placement(world_of(network, sizes_of(SMALL)), 5, 0.1, clock=lambda: 0.0) for _ in range(2)]
    assert plans[0].placement.stages == plans[1].placement.stages
    assert np.isfinite(plans[0].batch_s)


def test_the_bound_of_a_plan_that_skips_holds_for_other_numbers_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter can be skipped of four stages or of eight. Where nothing is found for four, eight are planned, and the
    bound is still below what four could do."""

    def search(*arguments: object, **options: object) -> PoolAnswer:
        if options["stages"] == 4:
            raise BadInputError("stages: nothing found")
        return search_pools(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("coordinator.planning.placement.run_plan.search_pools", search)
    found = plan_run(SMALL, swarm(20, 20, seed=1), skip=Fraction(1, 4), budget_s=0.3)
    assert len(found.plan.stages) == 8
    of_four = pool_bound(found.plan.pools, [4], lambda count: [1.0, *[(count - 2) / (count - 1)] * (count - 1)])
    assert found.found.lower_bound_s <= of_four
