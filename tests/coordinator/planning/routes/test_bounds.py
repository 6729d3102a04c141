"""A proven bound on routes is below what the best set of routes takes, also where some nodes are of no use to it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from coordinator.planning.routes.astar import Planner
from coordinator.planning.routes.baselines import full_length, online_router
from coordinator.planning.routes.bounds import _large_bound, all_routes, lower_bound, unplanned_bound
from coordinator.planning.routes.evaluate import Evaluator, steps_of
from coordinator.planning.routes.model import RouteModel, even_visits
from coordinator.planning.routes.search import search_routes
from protocol.base.errors import BadInputError


def far_node(distance_s: float) -> RouteModel:
    """Three microbatches, and a second node of stage 1 that is far away and not needed."""
    return RouteModel(
        stage_of_node=(0, 1, 1),
        forward_s=(1.0, 1.0, 1.0),
        backward_s=(1.0, 1.0, 1.0),
        loss_s=(0.0, 0.0, 0.0),
        link_s=[[0.0, 0.0, distance_s], [0.0, 0.0, distance_s], [distance_s, distance_s, 0.0]],
        heads=(0, 0, 0),
        route_stages=2,
        swaps_max=0,
        memory=(3, 3, 3),
        visits=(3, 3),
    )


def scattered(rng: random.Random) -> RouteModel | None:
    """Up to nine nodes whose times and links are often 0 and sometimes long; None where the rules cannot be kept."""
    stages = rng.randint(1, 4)
    per_stage = [rng.randint(1, 2) for _ in range(stages)]
    nodes, routes, length = sum(per_stage), rng.randint(1, 3), rng.randint(1, stages)
    zeros = rng.random()

    def seconds() -> float:
        return 0.0 if rng.random() < zeros else float(rng.choice((1, 2, 5, 40)))

    model = RouteModel(
        stage_of_node=tuple(stage for stage, count in enumerate(per_stage) for _ in range(count)),
        forward_s=tuple(seconds() for _ in range(nodes)),
        backward_s=tuple(seconds() for _ in range(nodes)),
        loss_s=tuple(seconds() for _ in range(nodes)),
        link_s=[[0.0 if i == j else seconds() for j in range(nodes)] for i in range(nodes)],
        heads=tuple(rng.randrange(per_stage[0]) for _ in range(routes)),
        route_stages=length,
        swaps_max=rng.randint(0, 2),
        memory=tuple(rng.randint(1, 3) for _ in range(nodes)),
        visits=even_visits(routes, stages, length),
    )
    try:
        model.check()
    except BadInputError:
        return None
    return model


def quickest_s(model: RouteModel) -> float:
    """The best makespan that some legal set of routes has, of all those there are; infinity for none."""
    judge, best = Evaluator(model), float("inf")
    for routes in product(*(all_routes(model, head, 10**5) or [] for head in model.heads)):
        visited = [sum(model.stage_of_node[node] == stage for route in routes for node in route) for stage in
                   range(1, model.stages)]  # fmt: skip
        used = [sum(node in route for route in routes) for node in range(model.nodes)]
        if visited == list(model.visits[1:]) and all(n <= most for n, most in zip(used, model.memory, strict=True)):
            best = min(best, max(judge.ends(routes)))
    return best


def test_a_node_that_is_far_away_and_not_needed_does_not_raise_the_bound() -> None:
    """Six seconds of work on the head, and on its neighbour: the third node could be on the moon."""
    near, far = (lower_bound(model, Planner(model)) for model in (far_node(1.0), far_node(1e3)))
    assert far == pytest.approx(near, rel=1e-3)
    found = search_routes(far_node(1e3), 0, 1.0)
    assert found.lower_bound_s <= found.makespan_s < 20


@pytest.mark.parametrize("seed", range(60))
def test_no_set_of_routes_beats_the_bound(seed: int) -> None:
    """Both bounds, as they are, before an answer takes them down to its own makespan."""
    model = scattered(random.Random(seed))
    if model is None:
        return
    best = quickest_s(model)
    for bound_s in (lower_bound(model, Planner(model)), _large_bound(model)):
        assert bound_s <= best * (1 + 1e-9), f"seed {seed}"


def test_routes_that_take_no_time_leave_room_for_those_that_do() -> None:
    """The shortest route takes nothing and has room for one; the bound goes on from there and ends."""
    model = replace(far_node(0.0), forward_s=(0.0, 0.0, 4.0), backward_s=(0.0, 0.0, 8.0), memory=(3, 1, 3))
    assert lower_bound(model, Planner(model)) == pytest.approx(24.0, rel=1e-3)


def test_a_stage_that_nobody_visits_does_not_raise_the_bound_of_many_nodes() -> None:
    """One microbatch that visits one of three other stages, of which two are far away."""
    model = RouteModel(
        stage_of_node=(0, 1, 2, 3),
        forward_s=(1.0,) * 4,
        backward_s=(2.0,) * 4,
        loss_s=(0.0,) * 4,
        link_s=[[0.0 if i == j else 0.5 if {i, j} == {0, 1} else 100.0 for j in range(4)] for i in range(4)],
        heads=(0,),
        route_stages=2,
        swaps_max=0,
        memory=(1,) * 4,
        visits=even_visits(1, 4, 2),
    )
    assert _large_bound(model) <= quickest_s(model) == 8.0


def test_a_node_that_rests_does_not_begin_the_loss_meanwhile() -> None:
    """A route of one stage: forward, rest, loss, backward, one after the other, as the simulation has it."""
    model = replace(far_node(0.0), heads=(0,), route_stages=1, visits=(1, 0), loss_s=(1.0,) * 3, rest_forward_s=5.0)
    plan = Planner(model).plan(0, NobodyElse())
    assert plan is not None
    assert plan.starts == (0.0, 6.0, 7.0) and plan.end_s == 8.0 == Evaluator(model).ends([(0,)])[0]
    assert steps_of(model, (0,)).alone_s == 3.0


@pytest.mark.parametrize("seed", range(30))
def test_a_router_that_repeats_no_routes_has_a_bound_of_its_own(seed: int) -> None:
    """Two microbatches of one planned route go one after the other; a router may send them at once."""
    rng = random.Random(seed)
    model = scattered(rng)
    if model is None:
        return
    model = full_length(replace(model, repeats=tuple(rng.randint(1, 3) for _ in model.heads)))
    bound_s = unplanned_bound(model, Planner(model))
    assert all(bound_s <= online_router(model, draw) * (1 + 1e-9) for draw in range(5)), f"seed {seed}"


def test_the_bound_of_planned_routes_is_none_for_a_router() -> None:
    """Two microbatches on one route take twice its length; at once, on two nodes, less."""
    model = replace(far_node(1.0), heads=(0,), repeats=(2,), visits=(1, 1), forward_s=(1.0, 20.0, 20.0))
    quickest = min(online_router(model, draw) for draw in range(8))
    assert unplanned_bound(model, Planner(model)) <= quickest < lower_bound(model, Planner(model))


class NobodyElse:
    """Nobody else is about."""

    def earliest(self, node: int, op: str, at: float, busy_s: float) -> float:
        return at
