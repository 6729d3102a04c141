"""The first plan's cost and its search: the cost of `plan run`, never worse than the even plan, for any course."""

from __future__ import annotations

import random

import msgspec
import pytest

from coordinator.planning.placement.pools import Pools, PoolStage
from coordinator.planning.placement.run_sizes import pool_sizes
from coordinator.planning.placement.seat_search import WORTH_SHARE, even_seats, search_seats
from coordinator.planning.placement.seats import SeatPlan, Seats
from protocol.base.errors import BadInputError
from protocol.run.course import course_of
from protocol.run.run import (
    BatchSection,
    BoundaryForm,
    ModelSection,
    RoutesSection,
    RunConfig,
    StagesSection,
    WireSection,
)
from protocol.schedule.profile import Link, Machine, NetworkFile, build_network

MODEL = ModelSection(layers=8, hidden=256, heads=4, kv_heads=2, feed_forward=768, context=256)


def run(tied: bool = False, skip: float = 0.0, swaps: int = 0, delay: int = 1, **stages: object) -> RunConfig:
    return RunConfig(
        model=msgspec.structs.replace(MODEL, tied_embeddings=tied),
        batch=BatchSection(delay=delay),  # type: ignore[arg-type]
        stages=StagesSection(**{"cut": "planned", **stages}),  # type: ignore[arg-type]
        routes=RoutesSection(skip=skip, swaps=swaps),
    )


def network(servers: int, volunteers: int, seed: int, spread: float = 4.0) -> NetworkFile:
    """Servers in three places, volunteers on home lines; powers and lines differ by up to `spread`."""
    rng = random.Random(seed)
    names = [f"s{i}" for i in range(servers)]
    place = [rng.randrange(3) for _ in names]
    machines = [
        _machine(name, "server", 2e11 * rng.uniform(1, spread), 1e7 * rng.uniform(1, spread), 1e8) for name in names
    ]
    links = [
        Link(source=a, target=b, latency_s=lat, bytes_per_s=rate)
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
        for lat, rate in [(0.001, 1e8) if place[i] == place[j] else (0.05, 5e6)]
    ]
    for i in range(volunteers):
        machines.append(
            _machine(f"v{i}", "volunteer", 1e12 * rng.uniform(1, spread), 2.5e6 * rng.uniform(1, spread), 2.5e7)
        )
        for name in names:
            links.append(Link(source=f"v{i}", target=name, latency_s=0.02, bytes_per_s=2.5e6))
            links.append(Link(source=name, target=f"v{i}", latency_s=0.02, bytes_per_s=2.5e7))
    return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links))


def _machine(name: str, role: str, flops_per_s: float, up: float, down: float) -> Machine:
    return Machine(
        name=name, role=role, forward_flops_per_s=flops_per_s, backward_flops_per_s=flops_per_s,  # type: ignore[arg-type]
        memory_bytes=1 << 40, uplink_bytes_per_s=up, downlink_bytes_per_s=down,
    )  # fmt: skip


@pytest.mark.parametrize("form", ["q8", "d4"])
@pytest.mark.parametrize("collocated", ["when_empty", "always"])
def test_a_line_costs_what_the_pools_of_plan_run_cost(collocated: str, form: BoundaryForm) -> None:
    """Two ways of counting, written apart: the same pace of every stage, hop and way, for random cuts and seats."""
    rng, fronts = random.Random(3), 2 if form == "q8" else 3
    for delay in (0, 1):
        config = run(count=3, delay=delay, collocated=collocated, front_servers=fronts, back_servers=3 - fronts)
        config = msgspec.structs.replace(config, wire=WireSection(activations_up=form))
        pools = Pools(build_network(network(9, 7, 5)), pool_sizes(config))
        for _ in range(10):
            order = rng.sample(range(9), 9)
            edges = tuple(sorted(rng.sample(range(1, config.block_count), 2)))
            owners = [rng.randrange(3) for _ in range(7)]
            crew = tuple(tuple(v for v in range(7) if owners[v] == k) for k in range(3))
            plan = SeatPlan(tuple(tuple(order[3 * k : 3 * k + 3]) for k in range(3)), edges, crew)
            cuts = (0, *edges, config.block_count)
            expected = pools.plan(
                [
                    PoolStage(
                        front=plan.servers[k][:fronts], back=plan.servers[k][fronts % 3 :], volunteers=crew[k],
                        first_block=cuts[k], end_block=cuts[k + 1],
                    )
                    for k in range(3)
                ]
            )  # fmt: skip
            cost = Seats(pools, config.settled(3)).cost(plan)
            assert [stage.pace_s for stage in cost.stages] == pytest.approx([pace.pace_s for pace in expected.paces])
            assert list(cost.hops_s.values()) == pytest.approx(expected.hops_s)
            assert cost.crossing_s == pytest.approx(expected.crossing_s)
            assert cost.step_s == pytest.approx(expected.step_s)


SHAPES = {
    "line": run(count=3),
    "skip": run(count=4, skip=0.25),
    "swaps": run(count=4, skip=0.25, swaps=1),
    "interleaved": run(count=2, chunks=2, placement="interleaved"),
    "v": run(count=2, chunks=2, placement="v"),
    "tied": run(count=3, tied=True),
    "both": run(count=3, front_servers=2, back_servers=0),
    "servers compute": run(count=3, collocated="always"),
    "open": run(count=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_answer_is_worse_than_the_even_plan_or_better_than_the_bound(shape: str) -> None:
    """For every shape of course; every server has one seat at most, and the cut is one that a run can name."""
    config = SHAPES[shape]
    for volunteers in (0, 6):
        found = search_seats(config, network(9, volunteers, len(shape) + volunteers), 10.0, clock=lambda: 0.0)
        assert 0 < found.bound_s <= found.step_s <= found.even_step_s * (1 + 1e-9)
        placed = [server for servers in found.servers for server in servers]
        assert len(set(placed)) == len(placed)
        settled = config.settled(len(found.servers), found.edges)
        settled.validate()
        course_of(settled)


def test_ten_random_networks_of_home_lines_are_planned_at_least_evenly() -> None:
    """The planned plan is at least as good as the even one by its own cost, on all ten, and better where it matters."""
    gains = []
    for seed in range(10):
        found = search_seats(run(count=3), network(7, 9, seed), 10.0, clock=lambda: 0.0)
        gains.append(found.even_step_s / found.step_s)
    assert min(gains) >= 1.0 - 1e-9 and max(gains) > 1.1, gains


def test_a_plan_that_is_hardly_faster_is_not_worth_to_be_another() -> None:
    """The cost is not truer than that: what a run begins with is the plan that needs no planner, and it says why."""
    found = search_seats(run(count=3), network(7, 9, 1), 10.0, clock=lambda: 0.0)
    plain, taken = found.without, found.worthwhile
    assert plain is not None
    share = 1.0 - found.step_s / plain.step_s
    assert 0.05 < share < WORTH_SHARE
    assert (taken.servers, taken.edges, taken.step_s) == (plain.servers, plain.edges, found.even_step_s)
    assert taken.servers == (("s0", "s1"), ("s2", "s3"), ("s4", "s5")), "as they came"
    assert f"takes {share:.0%} less by the cost" in taken.reason


def test_servers_that_differ_by_ten_times_in_line_are_not_seated_as_they_come() -> None:
    """Servers compute; every other line is ten times as slow: the planner finds seats and a cut that are faster."""
    file = network(8, 0, 2, spread=1.0)
    slow = {machine.name for machine in file.machines[::2]}
    links = [msgspec.structs.replace(link, bytes_per_s=1e6 if link.source in slow else 1e7) for link in file.links]
    machines = [
        msgspec.structs.replace(machine, uplink_bytes_per_s=1e6 if machine.name in slow else 1e7)
        for machine in file.machines
    ]
    config = run(count=2, collocated="always")
    found = search_seats(config, NetworkFile(kind="network", machines=tuple(machines), links=tuple(links)), 5.0)
    assert found.step_s < 0.7 * found.even_step_s and found.worthwhile is found
    seated = [server for stage in found.servers for server in stage]
    assert len(slow.intersection(seated)) <= 1, "there are four fast ones, and the first front hands nothing on"


def test_equal_problems_have_equal_answers() -> None:
    """With a clock that stands nothing but the problem counts: the simulated world replays its plans."""
    one, two = (search_seats(run(count=3), network(7, 5, 1), 10.0, clock=lambda: 0.0) for _ in range(2))
    assert one == two


def test_a_stage_that_nobodys_memory_holds_is_said() -> None:
    """Too little memory everywhere: one sentence that names the key; one server for two seats: the other key."""
    file = network(4, 2, 1)
    small = tuple(msgspec.structs.replace(machine, memory_bytes=1000) for machine in file.machines)
    with pytest.raises(BadInputError, match=r"^memory_bytes: "):
        search_seats(run(count=2), msgspec.structs.replace(file, machines=small), 1.0)
    with pytest.raises(BadInputError, match=r"^stages.count: 1 servers, and one stage alone takes 2"):
        search_seats(run(count=0), network(1, 2, 1), 1.0)


def test_the_even_plan_seats_servers_as_they_come() -> None:
    """What the search compares with is what the coordinator would do without it."""
    config = run(count=2, cut="even")
    seats = Seats(Pools(build_network(network(5, 4, 1)), pool_sizes(config)), config)
    plan = even_seats(seats)
    assert plan.servers == ((0, 1), (2, 3)) and plan.edges == (9,)
