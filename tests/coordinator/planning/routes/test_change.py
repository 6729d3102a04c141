"""After a drop, a join or a slowdown everybody else keeps their route, and every rule still holds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.planning.routes.change import LivePlan, drop, improve_in_background, join, slow_down
from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.model import RouteModel, even_visits, violations
from coordinator.planning.routes.search import search_routes
from protocol.base.errors import BadInputError, LocalProtocolError


def roomy_model(rng: random.Random) -> RouteModel:
    """Three or four stages with two to four nodes each, and memory to spare."""
    stages = rng.randint(2, 4)
    sizes = [rng.randint(2, 4) for _ in range(stages)]
    stage_of = tuple(stage for stage, size in enumerate(sizes) for _ in range(size))
    nodes = len(stage_of)
    heads = tuple(head for head in range(sizes[0]) for _ in range(2))
    route_stages = rng.randint(2, stages)
    forward = tuple(rng.randint(2, 8) / 2 for _ in range(nodes))
    return RouteModel(
        stage_of_node=stage_of,
        forward_s=forward,
        backward_s=tuple(2 * work for work in forward),
        loss_s=tuple(work / 4 for work in forward),
        link_s=[[0.0 if i == j else rng.randint(1, 9) / 3 for j in range(nodes)] for i in range(nodes)],
        heads=heads,
        route_stages=route_stages,
        swaps_max=rng.randint(0, 1),
        memory=(len(heads),) * nodes,
        visits=even_visits(len(heads), stages, route_stages),
        repeats=tuple(rng.randint(1, 2) for _ in heads),
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**9))
def test_churn_keeps_rules_microbatches_and_other_routes(seed: int) -> None:
    """Through random drops, joins and slowdowns no microbatch is lost, rules hold, untouched routes stay."""
    rng = random.Random(seed)
    model = roomy_model(rng)
    plan = LivePlan.of(model, search_routes(model, 0, 0.02, clock=lambda: 0.0))
    for _ in range(6):
        present = [node for node in range(model.nodes) if node not in plan.model.gone]
        node = rng.choice(present)
        kind = rng.choice(["drop", "drop", "join", "slow"])
        before = plan.routes
        if kind == "join" and plan.model.gone:
            repair = join(plan.model, plan.routes, sorted(plan.model.gone)[0])
        elif kind == "slow":
            repair = slow_down(plan.model, plan.routes, node, rng.choice([0.5, 2.0, 5.0]))
        elif len(plan.model.nodes_of_stage[plan.model.stage_of_node[node]]) > 1:
            repair = drop(plan.model, plan.routes, node)
            assert all(node not in route for route in repair.routes)
            untouched = [route for route in before if node not in route]
            if len(repair.routes) == len(before):
                assert repair.changed == len(before) - len(untouched)
        else:
            continue
        assert violations(repair.model, repair.routes) == []
        assert sum(repair.model.sends) == sum(model.sends)
        for route, number in zip(repair.routes, repair.kept, strict=True):
            assert number < 0 or route == before[number]
        plan.apply(repair, plan.generation)


def test_a_drop_changes_only_routes_through_the_node() -> None:
    """Dropping one node re-plans exactly its routes and says how much work in flight that can cost."""
    model = roomy_model(random.Random(3))
    answer = search_routes(model, 0, 0.2)
    node = answer.routes[0][-1]
    through = [number for number, route in enumerate(answer.routes) if node in route]
    repair = drop(model, answer.routes, node)
    assert [i for i, number in enumerate(repair.kept) if number < 0] == through
    assert repair.redone_steps == len(through) * model.route_stages


def test_losing_a_head_moves_its_microbatches() -> None:
    """The microbatches of a head that left start from the others; the count stays."""
    model = roomy_model(random.Random(4))
    answer = search_routes(model, 0, 0.2)
    repair = drop(model, answer.routes, 0)
    assert 0 not in repair.model.heads
    assert sum(repair.model.sends) == sum(model.sends)
    assert violations(repair.model, repair.routes) == []


def test_fewer_routes_when_memory_is_gone() -> None:
    """Where the others have no memory left, there are fewer routes at once, used more often."""
    model = roomy_model(random.Random(5))
    model = replace(model, route_stages=model.stages)
    tight = [len(model.heads)] * model.nodes
    stage1 = model.nodes_of_stage[1]
    for place, node in enumerate(stage1):
        tight[node] = len(model.heads) // len(stage1) + (place < len(model.heads) % len(stage1))
    model = replace(model, memory=tuple(tight), visits=even_visits(len(model.heads), model.stages, model.stages))
    answer = search_routes(model, 0, 0.2)
    repair = drop(model, answer.routes, stage1[0])
    assert len(repair.routes) == len(model.heads) - tight[stage1[0]]
    assert sum(repair.model.sends) == sum(model.sends)
    assert violations(repair.model, repair.routes) == []


def test_the_last_node_of_a_stage_is_missed_by_name() -> None:
    """When a stage has nobody left the sentence names the stage."""
    model = roomy_model(random.Random(6))
    answer = search_routes(model, 0, 0.1)
    stage1 = model.nodes_of_stage[1]
    repair = drop(model, answer.routes, stage1[0])
    for node in stage1[1:-1]:
        repair = drop(repair.model, repair.routes, node)
    with pytest.raises(BadInputError, match="stage 1 lost its last node"):
        drop(repair.model, repair.routes, stage1[-1])


def test_a_slow_node_is_relieved_only_if_that_helps() -> None:
    """A node ten times slower loses routes to its neighbours; doing so never costs time."""
    model = roomy_model(random.Random(7))
    answer = search_routes(model, 0, 0.3)
    node = answer.routes[0][1]
    before = sum(node in route for route in answer.routes)
    slower = slow_down(model, answer.routes, node, 10.0)
    assert sum(node in route for route in slower.routes) < before
    assert slower.makespan_s <= max(Evaluator(slower.model).ends(answer.routes))
    same = slow_down(model, answer.routes, node, 1.0)
    assert same.makespan_s <= answer.makespan_s * (1 + 1e-9)
    with pytest.raises(BadInputError, match="factor"):
        slow_down(model, answer.routes, node, 0.0)


def test_generations_fence_old_plans() -> None:
    """A repair made for an older generation is refused, and nothing changes."""
    model = roomy_model(random.Random(8))
    plan = LivePlan.of(model, search_routes(model, 0, 0.1), generation=7)
    repair = drop(plan.model, plan.routes, plan.routes[0][1])
    plan.apply(repair, 7)
    assert plan.generation == 8
    routes = plan.routes
    with pytest.raises(LocalProtocolError, match="generation 7"):
        plan.apply(repair, 7)
    assert plan.routes == routes


def test_background_improvement_must_be_worth_a_move() -> None:
    """Bad routes are improved and say what moving costs; routes that are good already stay."""
    model = roomy_model(random.Random(9))
    good = search_routes(model, 0, 0.5)
    plan = LivePlan.of(model, good)
    assert improve_in_background(plan, 1, 0.2) is None
    worst = max((search_routes(model, s, 0.0001, conflicts=False) for s in range(3)), key=lambda a: a.makespan_s)
    crowded = LivePlan(1, model, worst.routes, worst.makespan_s * 2)
    better = improve_in_background(crowded, 0, 0.5)
    assert better is not None and better.makespan_s <= worst.makespan_s
    assert violations(model, better.routes) == []
    crowded.apply(better, 1)
    assert crowded.makespan_s == better.makespan_s
