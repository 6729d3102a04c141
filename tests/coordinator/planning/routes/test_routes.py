"""Routes obey SkipPipe's rules, reach known optima, and never beat their own lower bound."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.commands.plan import plan
from coordinator.planning.problems import load_problem
from coordinator.planning.routes.astar import Forbidden, Planner, Reserved
from coordinator.planning.routes.baselines import (
    delay_blind,
    fixed_chains,
    full_length,
    greedy_full,
    no_collisions,
    online_router,
)
from coordinator.planning.routes.bounds import all_routes, jackson
from coordinator.planning.routes.evaluate import Evaluator, Timed, operations, steps_of
from coordinator.planning.routes.model import (
    ORDERS_LISTED_MAX,
    RouteModel,
    RoutesProblem,
    drawn_order,
    even_visits,
    swapped_orders,
)
from coordinator.planning.routes.search import coarse_routes, search_routes
from protocol.base.errors import BadInputError
from tests.oracles.joint import arrange_and_route
from tests.oracles.route_rules import is_legal_order, legal_orders, starts_violations, violations

PROBLEMS = Path(__file__).parents[3] / "data" / "problems"
OPTIMA = {"routes_8nodes.json": 909.0, "routes_9nodes.json": 786.0}


def hand_model() -> RouteModel:
    """a in stage 0, b in 1, c in 2; all links 1, forward 4, loss a quarter, backward twice."""
    return RouteModel(
        stage_of_node=(0, 1, 2),
        forward_s=(4.0,) * 3,
        backward_s=(8.0,) * 3,
        loss_s=(1.0,) * 3,
        link_s=[[0.0 if i == j else 1.0 for j in range(3)] for i in range(3)],
        heads=(0, 0),
        route_stages=2,
        swaps_max=0,
        memory=(2, 2, 2),
        visits=(2, 1, 1),
    )


def random_model(rng: random.Random, skip: bool = True) -> RouteModel:
    """Three to five stages of one to three nodes, unequal compute, memory and links; always feasible."""
    stages = rng.randint(2, 5)
    heads_at = rng.randint(1, 2)
    per_head = rng.randint(1, 3)
    routes = heads_at * per_head
    route_stages = rng.randint(2, stages) if skip else stages
    visits = even_visits(routes, stages, route_stages)
    stage_of = [0] * heads_at
    memory = [per_head] * heads_at
    for stage in range(1, stages):
        members = rng.randint(1, 3)
        room = [0] * members
        for _ in range(visits[stage] + rng.randint(0, 2)):
            room[rng.randrange(members)] += 1
        stage_of += [stage] * members
        memory += room
    nodes = len(stage_of)
    forward = [rng.randint(2, 9) / 2 for _ in range(nodes)]
    return RouteModel(
        stage_of_node=tuple(stage_of),
        forward_s=tuple(forward),
        backward_s=tuple(2 * work for work in forward),
        loss_s=tuple(work / 4 for work in forward),
        link_s=[[0.0 if i == j else rng.randint(1, 12) / 2 for j in range(nodes)] for i in range(nodes)],
        heads=tuple(head for head in range(heads_at) for _ in range(per_head)),
        route_stages=route_stages,
        swaps_max=rng.randint(0, 2),
        memory=tuple(memory),
        visits=visits,
    )


def test_legal_orders_match_hand_counts() -> None:
    """The counts of SkipPipe's rule with and without an exchange, and the five orders of the smallest case."""
    assert set(legal_orders(4, 3, 1)) == {(1, 2), (1, 3), (2, 1), (2, 3), (3, 2)}
    assert (len(legal_orders(6, 4, 1)), len(legal_orders(6, 4, 0))) == (22, 10)
    assert (2, 1, 4, 3) in legal_orders(5, 5, 2) and (3, 2, 1) not in legal_orders(4, 4, 2)
    for order in legal_orders(6, 5, 2):
        assert is_legal_order((0, *order), 2)
    assert not is_legal_order((0, 3, 1), 5) and not is_legal_order((1, 2), 5)


def test_hand_checked_times() -> None:
    """One route alone lasts 29; two on one node end at 30 and 38; on two nodes at 29 and 37, the optimum."""
    model = hand_model()
    assert steps_of(model, (0, 1)).alone_s == 29
    assert sorted(Evaluator(model).ends([(0, 1), (0, 1)])) == [30, 38]
    found = search_routes(model)
    assert sorted(found.timed.ends) == [29, 37]
    assert found.makespan_s == 37


@pytest.mark.parametrize("name", sorted(OPTIMA))
def test_known_problems_within_five_percent(name: str) -> None:
    """The problem files are solved to 1.05 of their proven optimum and the bound stays below it."""
    model = load_problem(PROBLEMS / name, "routes", RoutesProblem).model()
    found = search_routes(model, budget_s=2.0)
    assert OPTIMA[name] <= found.makespan_s <= 1.05 * OPTIMA[name]
    assert found.lower_bound_s <= OPTIMA[name]
    assert violations(model, found.routes) == []
    assert starts_violations(model, found.routes, found.timed) == []


def test_command_prints_what_format_asks(tmp_path: Path) -> None:
    """`plan routes FILE --json` prints one object whose operations are complete; a table without --json."""
    path = PROBLEMS / "routes_8nodes.json"
    result = CliRunner().invoke(plan, ["routes", str(path), "--json", "--budget-s", "0.3", "--seed", "2"])
    answer = json.loads(result.output)
    assert set(answer) == {
        "routes", "operations", "makespan_s", "lower_bound_s", "search_s", "stopped", "seed",
    }  # fmt: skip
    assert len(answer["operations"]) == 6 * 7
    assert max(row["end_s"] for row in answer["operations"]) == answer["makespan_s"]
    text = CliRunner().invoke(plan, ["routes", str(path), "--budget-s", "0.2"]).output
    assert "makespan" in text and "no routes take less" in text
    raw = json.loads(path.read_text())
    raw["memory"][2] = 0
    broken = tmp_path / "r.json"
    broken.write_text(json.dumps(raw))
    result = CliRunner().invoke(plan, ["routes", str(broken)])
    assert isinstance(result.exception, BadInputError)
    assert "more places are missing" in str(result.exception)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**9))
def test_random_problems_obey_every_rule(seed: int) -> None:
    """Any feasible problem gets an answer that keeps all rules, above its bound, and the same for its seed."""
    model = random_model(random.Random(seed))
    found = search_routes(model, seed % 3, 0.05, clock=lambda: 0.0)
    assert violations(model, found.routes) == []
    assert starts_violations(model, found.routes, found.timed) == []
    assert found.lower_bound_s <= found.makespan_s
    again = search_routes(model, seed % 3, 0.05, clock=lambda: 0.0)
    assert (again.routes, again.makespan_s) == (found.routes, found.makespan_s)


@pytest.mark.parametrize("seed", range(6))
def test_bound_and_search_against_every_set_of_routes(seed: int) -> None:
    """On tiny problems the bound is at most the best of all sets of routes, and the search is within 5 %."""
    rng = random.Random(seed)
    model = random_model(rng)
    while len(model.heads) > 3:
        model = random_model(rng)
    judge = Evaluator(model)
    best = float("inf")
    partial: list[tuple[tuple[int, ...], ...]] = [()]
    for head in model.heads:
        options = all_routes(model, head, 10_000)
        assert options is not None
        partial = [(*chosen, route) for chosen in partial for route in options]
        assert len(partial) < 200_000
    for chosen in partial:
        if not violations(model, chosen):
            best = min(best, max(judge.ends(chosen)))
    found = search_routes(model, 0, 1.0)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert found.makespan_s <= 1.05 * best


def test_jackson_is_exact_on_a_hand_case() -> None:
    """Jobs (0,4,7), (1,2,9), (3,3,1): the preemptive schedule runs 2 first where it must and ends at 13."""
    assert jackson([(0.0, 4.0, 7.0), (1.0, 2.0, 9.0), (3.0, 3.0, 1.0)]) == 13


def test_astar_finds_what_listing_finds_around_restrictions() -> None:
    """With nodes reserved at random, A* ends as early as the best of all routes tried one by one."""
    rng = random.Random(5)
    for _ in range(30):
        model = random_model(rng)
        reserved = Reserved(model.nodes)
        planner = Planner(model)
        for _ in range(3):
            route = rng.choice(all_routes(model, 0, 10_000) or [])
            plan_ = planner.timed(route, reserved, rng.random() * 10)
            reserved.add(steps_of(model, route), plan_.starts)
        options = all_routes(model, 0, 10_000)
        assert options
        best = min(planner.timed(route, reserved).end_s for route in options)
        found = planner.plan(0, reserved)
        assert found is not None and found.end_s == pytest.approx(best)


def test_forbidden_start_moves_to_the_end_of_its_interval() -> None:
    """A start inside a forbidden interval waits for its end, through several intervals in turn."""
    forbidden = Forbidden()
    forbidden.add(1, "F", 2.0, 5.0)
    forbidden.add(1, "F", 4.0, 7.0)
    assert forbidden.earliest(1, "F", 2.0, 1.0) == 7.0
    assert forbidden.earliest(1, "F", 1.0, 1.0) == 1.0
    assert forbidden.earliest(1, "B", 3.0, 1.0) == 3.0


def test_nothing_possible_says_what_is_missing() -> None:
    """Too little memory, a head that is no head and a wrong number of visits are each named."""
    model = hand_model()
    for change, says in (
        ({"memory": (2, 0, 2)}, "1 more places are missing"),
        ({"heads": (0, 1)}, "node 1 is not a present node of stage 0"),
        ({"visits": (2, 2, 1)}, "visits"),
        ({"memory": (1, 2, 2)}, "head 0 starts 2 routes"),
    ):
        with pytest.raises(BadInputError, match=says):
            search_routes(replace(model, **change))
    with pytest.raises(BadInputError, match="not a present node"):
        search_routes(model.without(frozenset((0,))))


def test_unreachable_nodes_are_avoided_or_named() -> None:
    """A node that nothing reaches gets no route; when every node of a stage is unreachable, that is said."""
    far = float("inf")
    model = RouteModel(
        stage_of_node=(0, 1, 1),
        forward_s=(1.0,) * 3,
        backward_s=(2.0,) * 3,
        loss_s=(0.25,) * 3,
        link_s=[[0.0, far, 1.0], [far, 0.0, far], [1.0, far, 0.0]],
        heads=(0, 0),
        route_stages=2,
        swaps_max=0,
        memory=(2, 2, 2),
        visits=(2, 2),
    )
    assert set(search_routes(model).routes) == {(0, 2)}
    with pytest.raises(BadInputError, match="no reachable route"):
        search_routes(replace(model, memory=(2, 2, 1)))


def test_degenerate_models_have_answers() -> None:
    """One node alone, one node per stage, and equal links all give a plan."""
    alone = RouteModel((0,), (1.0,), (2.0,), (0.25,), [[0.0]], (0,), 1, 0, (1,), (1,))
    assert search_routes(alone).makespan_s == 3.25
    rng = random.Random(1)
    for _ in range(5):
        model = random_model(rng, skip=False)
        model = replace(model, link_s=[[1.0] * model.nodes for _ in range(model.nodes)])
        assert violations(model, search_routes(model, budget_s=0.1).routes) == []


def test_baselines_obey_the_rules_on_equal_counts() -> None:
    """Every baseline routes as many microbatches as the search, and keeps the rules it has."""
    base = load_problem(PROBLEMS / "routes_8nodes.json", "routes", RoutesProblem).model()
    full = full_length(base)
    assert sum(full.sends) == sum(base.sends) == 6
    for routes in (fixed_chains(full), greedy_full(full)):
        assert violations(full, routes) == []
    for routes in (delay_blind(base), no_collisions(base, evaluations=300)):
        assert violations(base, routes) == []
    times = [online_router(full, seed) for seed in range(3)]
    shortest = Planner(full).shortest_s(full.heads[0])
    assert min(times) >= min(shortest, Planner(full).shortest_s(full.heads[-1]))
    assert online_router(full, 1) == times[1]


def test_no_collisions_is_short_alone() -> None:
    """Without TC2 the longest route alone is at most that of the search with TC2."""
    model = load_problem(PROBLEMS / "routes_9nodes.json", "routes", RoutesProblem).model()
    blind_to_collisions = no_collisions(model)
    found = search_routes(model, budget_s=0.5)
    alone = [max(steps_of(model, r).alone_s for r in routes) for routes in (blind_to_collisions, found.routes)]
    assert alone[0] <= alone[1]


def test_repeats_follow_their_route_one_after_the_other() -> None:
    """Two microbatches on one route start in turn and are both in the list of operations."""
    model = replace(hand_model(), repeats=(2, 1))
    timed = Evaluator(model).timed([(0, 1), (0, 2)])
    assert [len(of_route) for of_route in timed.starts] == [2, 1]
    assert timed.starts[0][1][0] >= timed.starts[0][0][-1] + 8
    assert len(operations(model, [(0, 1), (0, 2)], timed)) == 15
    assert starts_violations(model, [(0, 1), (0, 2)], timed) == []
    late = Timed(timed.makespan_s, timed.ends, ((timed.starts[0][0], timed.starts[0][0]), timed.starts[1]))
    assert starts_violations(model, [(0, 1), (0, 2)], late)


def test_coarse_routes_travel_in_groups() -> None:
    """Coarsening sends the microbatches of a head together where memory and visits divide."""
    model = replace(hand_model(), heads=(0, 0, 0, 0), memory=(4, 2, 2), visits=(4, 2, 2))
    routes = coarse_routes(model)
    assert routes is not None and violations(model, routes) == []
    assert routes[0] == routes[1] and routes[2] == routes[3]
    assert coarse_routes(hand_model()) is None


def test_joint_search_keeps_sizes_and_never_gets_worse() -> None:
    """Moving nodes between stages keeps every size and rule, and ends at most where routing alone ends."""
    model = load_problem(PROBLEMS / "routes_8nodes.json", "routes", RoutesProblem).model()
    joint = arrange_and_route(model, 0, 0.5)
    assert [len(s) for s in joint.model.nodes_of_stage] == [len(s) for s in model.nodes_of_stage]
    assert violations(joint.model, joint.answer.routes) == []
    assert joint.answer.makespan_s <= search_routes(model, 0, 0.1).makespan_s


def test_an_order_is_drawn_where_there_are_billions() -> None:
    """All legal orders of seven stages can be drawn; of sixty stages each that is drawn is legal."""
    rng = random.Random(1)
    seven = tuple(range(1, 8))
    every = list(swapped_orders(seven, 3))
    assert set(every) == {drawn_order(seven, 3, rng) for _ in range(2_000)} and len(every) == len(set(every)) == 21
    sixty = tuple(range(1, 61))
    drawn = [drawn_order(sixty, 30, rng) for _ in range(50)]
    assert len(set(drawn)) > 40 < ORDERS_LISTED_MAX
    for order in drawn:
        moved = [place for place, stage in enumerate(order, 1) if stage == place + 1]
        assert sorted(order) == list(sixty) and all(order[place] == place for place in moved)
