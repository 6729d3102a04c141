"""Nodes into stages and microbatches onto routes at once, when a node's stage may still be chosen.

The published methods fix the stages by a cost that knows no routes. Here two nodes of different stages
exchange their places with all the routes that go through them, judged by the same simulation as the routes;
exchanging and re-routing take turns. Stage sizes, memory and every other rule stay as they are.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.routes.evaluate import Evaluator
from coordinator.routes.improve import anneal
from coordinator.routes.model import Route, RouteModel
from coordinator.routes.search import STEPS_PER_SECOND, RoutesAnswer, search_routes

TURNS = 5
Aggregation = Callable[[Sequence[Sequence[int]]], float]
"""Seconds that count on top of the makespan, given the nodes of every stage."""


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
    aggregation: Aggregation = lambda stages: 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> JointAnswer:
    """Improves stages and routes together, starting from the stages in `model`.

    The cost is the makespan plus `aggregation` of the stages. Raises `BadInputError` like `search_routes`.
    """
    began = clock()
    deadline = began + budget_s

    def expired() -> bool:
        return clock() >= deadline

    rng = random.Random(seed)
    first = search_routes(model, seed, 0.1 * budget_s, conflicts=False, clock=clock)
    evaluator = Evaluator(model)
    steps = sum(model.sends) * (2 * model.route_stages + 1)
    evaluations = max(TURNS * 40, int(0.55 * budget_s * STEPS_PER_SECOND / steps)) // TURNS
    best_model, best_routes, best_bias = model, list(first.routes), list(first.bias)
    best = first.makespan_s + aggregation(model.nodes_of_stage)
    for turn in range(TURNS):
        heat = 0.5**turn
        tried_model, routes = exchange_nodes(
            best_model, best_routes, best_bias, evaluator, rng, evaluations // 2, expired, aggregation, heat
        )
        tried = anneal(tried_model, evaluator, routes, rng, evaluations // 2, expired, bias=best_bias, heat=heat / 2)
        cost = tried.makespan_s + aggregation(tried_model.nodes_of_stage)
        if cost < best:
            best, best_model, best_routes, best_bias = cost, tried_model, tried.routes, tried.bias
    last = search_routes(
        best_model,
        seed,
        max(0.05, 0.9 * (deadline - clock())),
        start=best_routes,
        bias=best_bias,
        clock=clock,
    )
    return JointAnswer(best_model, last, aggregation(best_model.nodes_of_stage), clock() - began)


def exchange_nodes(
    model: RouteModel,
    routes: Sequence[Route],
    bias: Sequence[float],
    evaluator: Evaluator,
    rng: random.Random,
    rounds: int,
    expired: Callable[[], bool],
    aggregation: Aggregation,
    heat: float,
) -> tuple[RouteModel, list[Route]]:
    """Annealing over which node stands where; answers the best model and the routes renamed to it."""
    place = list(range(model.nodes))  # the node that now stands where node i stood
    used = [0] * model.nodes
    for route in routes:
        for node in route:
            used[node] += 1
    present = [node for node in range(model.nodes) if node not in model.gone]

    def renamed() -> list[Route]:
        return [tuple(place[node] for node in route) for route in routes]

    def cost() -> float:
        stages = [[place[node] for node in members] for members in model.nodes_of_stage]
        return max(evaluator.ends(renamed(), bias)) + aggregation(stages)

    value = best = cost()
    best_place = list(place)
    scale = value * 0.02 * heat
    for number in range(rounds):
        if number % 16 == 0 and expired():
            break
        a, b = rng.choice(present), rng.choice(present)
        if model.stage_of_node[a] == model.stage_of_node[b]:
            continue
        if used[a] > model.memory[place[b]] or used[b] > model.memory[place[a]]:
            continue
        place[a], place[b] = place[b], place[a]
        new = cost()
        if new <= value or rng.random() < math.exp((value - new) / (scale * 0.02 ** (number / rounds))):
            value = new
            if new < best:
                best, best_place = new, list(place)
        else:
            place[a], place[b] = place[b], place[a]
    place = best_place
    stage_of = list(model.stage_of_node)
    for node, now in enumerate(place):
        stage_of[now] = model.stage_of_node[node]
    moved = replace(model, stage_of_node=tuple(stage_of), heads=tuple(place[head] for head in model.heads))
    return moved, renamed()
