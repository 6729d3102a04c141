"""Routes against a constraint solver: our bound never above what it finds, our makespan within 5 %."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coordinator.planning.problems import load_problem
from coordinator.planning.routes.model import RouteModel, RoutesProblem, even_visits
from coordinator.planning.routes.search import search_routes
from tests.oracles.routes import solve_routes

PROBLEMS = Path(__file__).parents[3] / "data" / "problems"


def wave(rng: random.Random) -> RouteModel:
    """Eight or nine nodes on four stages, six microbatches, unequal nodes and near and far links."""
    stage_of = (0, 0, 1, 1, 2, 2, 3, 3) if rng.random() < 0.5 else (0, 0, 0, 1, 1, 2, 2, 3, 3)
    nodes = len(stage_of)
    forward = tuple(float(4 * rng.randint(10, 15)) for _ in range(nodes))
    link = [[0.0] * nodes for _ in range(nodes)]
    for i in range(nodes):
        for j in range(i):
            link[i][j] = link[j][i] = float(rng.choice([rng.randint(2, 8), rng.randint(30, 120)]))
    heads_at = stage_of.count(0)
    heads = tuple(head for head in range(heads_at) for _ in range(6 // heads_at))
    return RouteModel(
        stage_of_node=stage_of,
        forward_s=forward,
        backward_s=tuple(2 * work for work in forward),
        loss_s=tuple(work / 4 for work in forward),
        link_s=link,
        heads=heads,
        route_stages=3,
        swaps_max=1,
        memory=tuple(3 if stage == 0 else 2 for stage in stage_of),
        visits=even_visits(6, 4, 3),
    )


@pytest.mark.slow
def test_solver_agrees_with_the_problem_files() -> None:
    """The oracle finds the optimum that the problem file states, so it counts as coordinator/README.md does."""
    model = load_problem(PROBLEMS / "routes_8nodes.json", "routes", RoutesProblem).model()
    assert solve_routes(model, 1) == (909, 909)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_waves_within_five_percent_of_proven_optima(seed: int) -> None:
    """Six microbatches on eight or nine nodes: 1.05 of the proven optimum, and never a bound above it."""
    model = wave(random.Random(seed))
    best, bound = solve_routes(model, 1)
    found = search_routes(model, 0, 4.0)
    assert found.lower_bound_s <= best
    assert found.makespan_s >= bound * (1 - 1e-9)
    assert found.makespan_s <= 1.05 * best
