"""Nodes into stages and microbatches onto routes at once, when a node's stage may still be chosen.

The published methods fix the stages by a cost that knows no routes. Here two nodes of different stages
exchange their places with all the routes that go through them, between and beside the moves of the route search, judged
by the same simulation. Stage sizes, memory and every other rule stay as they are.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.improve import StagesCost, anneal
from coordinator.planning.routes.model import Route, RouteModel
from coordinator.planning.routes.search import (
    SHARED_STEPS_PER_SECOND,
    STEPS_PER_SECOND,
    RoutesAnswer,
    search_routes,
    search_shared,
)
from coordinator.planning.routes.shared import SharedEvaluator, Sharing

FIRST_SHARE = 0.5
"""The part of the budget for choosing among several starts."""
HEATS = (0.25, 0.1)
SHARES = (0.85, 0.15)
"""Heat and part of the moves of each walk; one long walk ends lower than several short ones."""


@dataclass(frozen=True)
class JointAnswer:
    """The model with its new stages, the routes on it, and what the stages cost beside the routes."""

    model: RouteModel
    answer: RoutesAnswer
    aggregation_s: float
    search_s: float


def arrange_and_route(
    model: RouteModel,
    seed: int = 0,
    budget_s: float = 4.0,
    *,
    others: Sequence[RouteModel] = (),
    aggregation: StagesCost = lambda stages: 0.0,
    sharing: Sharing | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> JointAnswer:
    """Improves stages and routes together, from the stages in `model` or in one of `others` (the same but for stages
    and heads): each start gets a short search of routes, and the one that ends lowest is gone on with.

    The cost is the makespan plus `aggregation` of the stages. With `sharing` the second half of the budget goes on
    with links that are shared, and the answer's times are with sharing. Raises `BadInputError` like `search_routes`.
    """
    began = clock()
    deadline = began + budget_s
    rng = random.Random(seed)
    starts = [model, *others]
    short_s = (FIRST_SHARE / len(starts) if others else 0.1) * budget_s
    state, least = _State(model, [], []), math.inf
    for tried in starts:
        if least < math.inf and clock() >= began + FIRST_SHARE * budget_s:
            break
        first = search_routes(tried, seed, short_s, conflicts=False, clock=clock)
        cost = first.makespan_s + aggregation(tried.nodes_of_stage)
        if cost < least:
            state, least = _State(tried, list(first.routes), list(first.bias)), cost
    steps = sum(model.sends) * (2 * model.route_stages + 1)
    phases: list[tuple[Evaluator, float, float, float]] = [
        (Evaluator(model), 0.5, STEPS_PER_SECOND, began + 0.9 * budget_s)
    ]
    if sharing is not None:
        halfway = began + 0.4 * budget_s
        phases = [(Evaluator(model), 0.3, STEPS_PER_SECOND, halfway)]
        phases.append((SharedEvaluator(model, sharing), 0.45, SHARED_STEPS_PER_SECOND, deadline))
    for evaluator, share, rate, until in phases:
        evaluations = max(200, int(share * budget_s * rate / steps))
        state = _take_turns(state, evaluator, rng, evaluations, lambda until=until: clock() >= until, aggregation)  # type: ignore[misc]
    left_s = max(0.05, 0.9 * (deadline - clock()))
    if sharing is None:
        last = search_routes(state.model, seed, left_s, start=state.routes, bias=state.bias, clock=clock)
    else:
        last = search_shared(state.model, sharing, seed, left_s, start=state.routes, bias=state.bias, clock=clock)
    return JointAnswer(state.model, last, aggregation(state.model.nodes_of_stage), clock() - began)


class _State(NamedTuple):
    """Stages and routes as far as the search has come."""

    model: RouteModel
    routes: list[Route]
    bias: list[float]


def _take_turns(
    state: _State,
    evaluator: Evaluator,
    rng: random.Random,
    evaluations: int,
    expired: Callable[[], bool],
    aggregation: StagesCost,
) -> _State:
    """Anneals stages and routes together, a long walk and then a cooler one from the best so far."""
    best_s = math.inf
    for heat, share in zip(HEATS, SHARES, strict=True):
        found = anneal(
            state.model,
            evaluator,
            state.routes,
            rng,
            int(share * evaluations),
            expired,
            bias=state.bias,
            heat=heat,
            stages_cost=aggregation,
        )
        if found.cost_s < best_s:
            assert found.stage_of is not None, "stages were open to change"
            heads = tuple(route[0] for route in found.routes)
            model = replace(state.model, stage_of_node=found.stage_of, heads=heads)
            best_s, state = found.cost_s, _State(model, found.routes, found.bias)
    return state
