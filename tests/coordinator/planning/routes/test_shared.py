"""Parallel transfers share lines: the quick simulation agrees with the simulator's links, and searching on it pays."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.placement.run_plan import sizes_of
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import member_model, world_of
from coordinator.planning.placement.uplinks import swarm_sharing
from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.model import RouteModel, even_visits
from coordinator.planning.routes.search import search_routes, search_shared
from coordinator.planning.routes.shared import SharedEvaluator, Sharing
from coordinator.planning.simulator.links import Network
from protocol.run.run import BatchSection, ModelSection, RunConfig, WireSection
from tests.benchmarks.swarms import swarm
from tests.oracles.joint import arrange_and_route
from tests.oracles.route_rules import starts_violations, violations
from tests.oracles.shared import shared_ends as plain_shared_ends


def lined_model(rng: random.Random) -> tuple[RouteModel, Network, float]:
    """Two or three stages of one to three nodes each, whose lines are drawn, and the bytes of an activation."""
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))]
    stage_of = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
    nodes = len(stage_of)
    heads = tuple(head for head in range(sizes[0]) for _ in range(2))
    size = 12.0
    latency = [[0.0 if i == j else rng.randint(0, 3) / 2 for j in range(nodes)] for i in range(nodes)]
    path = [[float(rng.choice([2, 4, 8])) for _ in range(nodes)] for _ in range(nodes)]
    up, down = ([float(rng.choice([2, 3, 6])) for _ in range(nodes)] for _ in range(2))
    network = Network(latency, path, up, down)
    forward = tuple(rng.randint(1, 6) / 2 for _ in range(nodes))
    model = RouteModel(
        stage_of_node=stage_of,
        forward_s=forward,
        backward_s=tuple(2 * work for work in forward),
        loss_s=tuple(work / 4 for work in forward),
        link_s=[[network.alone_s(i, j, size) for j in range(nodes)] for i in range(nodes)],
        heads=heads,
        route_stages=len(sizes),
        swaps_max=0,
        memory=(len(heads),) * nodes,
        visits=even_visits(len(heads), len(sizes), len(sizes)),
        repeats=tuple(rng.randint(1, 3) for _ in heads),
    )
    return model, network, size


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_quick_sharing_equals_the_simulators_links(seed: int) -> None:
    """On random lines every end is that of the plain simulation with max-min fair shares; sharing never helps much."""
    rng = random.Random(seed)
    model, network, size = lined_model(rng)
    routes = [(head, *(rng.choice(nodes) for nodes in model.nodes_of_stage[1:])) for head in model.heads]
    bias = [rng.uniform(-5, 5) for _ in routes]
    shared = plain_shared_ends(model, routes, network, size, bias)
    assert SharedEvaluator(model, Sharing(network, size)).ends(routes, bias) == pytest.approx(shared)
    evaluator = SharedEvaluator(model, Sharing(network, size))
    timed = evaluator.timed(routes, bias)
    assert timed.ends == pytest.approx(shared)  # and nothing is left over from one simulation to the next
    assert evaluator.ends(routes, bias) == pytest.approx(shared)
    assert starts_violations(model, routes, timed) == []


def test_endless_lines_change_nothing() -> None:
    """With endless rates the shared simulation is the plain one; a shared uplink delays exactly by its share."""
    rng = random.Random(1)
    model, network, _ = lined_model(rng)
    assert network.latency_s is not None
    free = Network(latency_s=network.latency_s)
    untied = tuple(work + rng.random() for work in model.forward_s)  # where two arrive at once the two may differ
    plain = replace(model, link_s=network.latency_s, forward_s=untied)
    routes = search_routes(plain, 0, 0.05).routes
    assert SharedEvaluator(plain, Sharing(free, 0.0)).ends(routes) == pytest.approx(Evaluator(plain).ends(routes))
    two = RouteModel((0, 0, 1), (1.0,) * 3, (1.0,) * 3, (0.0,) * 3, np.ones((3, 3)), (0, 1), 2, 0, (2,) * 3, (2, 2))
    wide, narrow = (Network(downlink_bytes_per_s=[9.0, 9.0, rate]) for rate in (9.0, 1.0))
    apart = SharedEvaluator(two, Sharing(wide, 1.0)).ends([(0, 2), (1, 2)])
    together = SharedEvaluator(two, Sharing(narrow, 1.0)).ends([(0, 2), (1, 2)])
    assert min(together) > min(apart) and max(together) > max(apart)


def test_searching_on_shared_lines_finds_what_judging_does_not() -> None:
    """A quick node on a thin line attracts every route until lines are shared; the search then spreads them."""
    heads, nodes = 4, 6
    latency = [[0.1] * nodes for _ in range(nodes)]
    down = [10.0] * 4 + [1.0, 1.0]
    up = [10.0] * 4 + [1.0, 10.0]
    network = Network(latency, None, up, down)
    size = 1.0
    model = RouteModel(
        stage_of_node=(0, 0, 0, 0, 1, 1),
        forward_s=(0.1,) * 4 + (0.05, 0.3),
        backward_s=(0.1,) * 4 + (0.05, 0.3),
        loss_s=(0.0,) * nodes,
        link_s=[[network.alone_s(i, j, size) for j in range(nodes)] for i in range(nodes)],
        heads=tuple(range(heads)),
        route_stages=2,
        swaps_max=0,
        memory=(4,) * nodes,
        visits=(4, 4),
        repeats=(3,) * heads,
    )
    sharing = Sharing(network, size)
    judged = max(SharedEvaluator(model, sharing).ends(search_routes(model, 0, 0.2).routes))
    found = search_shared(model, sharing, 0, 0.5)
    assert found.makespan_s < judged
    assert violations(model, found.routes) == [] and found.lower_bound_s <= found.makespan_s
    assert found.makespan_s == max(SharedEvaluator(model, sharing).ends(found.routes, found.bias))
    joint = arrange_and_route(model, 0, 0.5, sharing=sharing)
    assert violations(joint.model, joint.answer.routes) == []
    own = SharedEvaluator(joint.model, sharing).ends(joint.answer.routes, joint.answer.bias)
    assert joint.answer.makespan_s == max(own)


def test_members_of_a_swarm_share_their_servers_lines() -> None:
    """Alone, a route over servers takes what the route model says; together they wait for each other's lines."""
    config = RunConfig(
        model=ModelSection(layers=6),
        batch=BatchSection(microbatches=12, samples=8),
        wire=WireSection(activations_up="fp32"),  # wide enough for lines to matter beside the work
    )
    world = world_of(swarm(8, 12, seed=3), sizes_of(config), may_bench=False)
    placement = search_placement(world, 0, 0.1, stages=2).placement
    routed = member_model(world, placement)
    sharing = swarm_sharing(placement, routed)
    model = routed.model
    answer = search_routes(model, 0, 0.1)
    alone = replace(model, heads=model.heads[:1], repeats=(1,))
    assert SharedEvaluator(alone, sharing).ends(answer.routes[:1]) == pytest.approx(
        Evaluator(alone).ends(answer.routes[:1]), rel=1e-3
    )
    plain, shared = (max(judge.ends(answer.routes)) for judge in (Evaluator(model), SharedEvaluator(model, sharing)))
    assert shared > plain
    assert search_shared(model, sharing, 0, 0.3).makespan_s <= shared
