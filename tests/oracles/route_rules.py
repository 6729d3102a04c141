"""The rules of routes, read off an answer afterwards: what no search of ours looks at while it searches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import combinations

from coordinator.planning.routes.evaluate import Timed, steps_of
from coordinator.planning.routes.model import Route, RouteModel, swapped_orders


def violations(model: RouteModel, routes: Sequence[Route]) -> list[str]:
    """What is wrong with a set of routes, one sentence each; empty when every rule is obeyed."""
    wrong: list[str] = []
    if len(routes) != len(model.heads):
        wrong.append(f"{len(routes)} routes for {len(model.heads)} heads")
    used = [0] * model.nodes
    visits = [0] * model.stages
    for number, (route, head) in enumerate(zip(routes, model.heads, strict=False)):
        order = tuple(model.stage_of_node[node] for node in route)
        if route[0] != head:
            wrong.append(f"route {number} starts on node {route[0]}, not on its head {head}")
        if len(route) != model.route_stages or not is_legal_order(order, model.swaps_max):
            wrong.append(f"route {number} visits the stages {order}")
        for node in route:
            used[node] += 1
            visits[model.stage_of_node[node]] += 1
            if node in model.gone:
                wrong.append(f"route {number} uses node {node}, which is gone")
    for node, count in enumerate(used):
        if count > model.memory[node]:
            wrong.append(f"node {node} is on {count} routes and holds {model.memory[node]}")
    for stage in range(1, model.stages):
        if visits[stage] != model.visits[stage]:
            wrong.append(f"stage {stage} is on {visits[stage]} routes, not {model.visits[stage]}")
    return wrong


def starts_violations(model: RouteModel, routes: Sequence[Route], timed: Timed) -> list[str]:
    """Rules of time that a timed set of routes breaks: a link or a step cut short, two things at once."""
    wrong: list[str] = []
    busy: list[list[tuple[float, float]]] = [[] for _ in range(model.nodes)]
    slack = 1e-9 * max(1.0, timed.makespan_s)
    for number, (route, sent) in enumerate(zip(routes, timed.starts, strict=True)):
        steps = steps_of(model, route)
        ready = 0.0
        for starts in sent:
            for k, start in enumerate(starts):
                if start < ready + steps.link_s[k] - slack:
                    wrong.append(f"route {number}: step {k} starts before its input is there")
                ready = start + steps.work_s[k]
                busy[steps.nodes[k]].append((start, start + steps.busy_s[k]))
    for node, intervals in enumerate(busy):
        intervals.sort()
        if any(b[0] < a[1] - slack for a, b in itertools.pairwise(intervals)):
            wrong.append(f"node {node} does two things at once")
    return wrong


def legal_orders(stages: int, route_stages: int, swaps_max: int) -> list[tuple[int, ...]]:
    """Every legal order of the stages after stage 0, plain ones first."""
    orders: list[tuple[int, ...]] = []
    for chosen in combinations(range(1, stages), route_stages - 1):
        orders.extend(swapped_orders(chosen, swaps_max))
    return orders


def is_legal_order(order: Sequence[int], swaps_max: int) -> bool:
    """Whether the stages of a route, stage 0 included, are in a legal order (CC1, CC2)."""
    if not order or order[0] != 0:
        return False
    highest, place, swaps = 0, 1, 0
    while place < len(order):
        stage = order[place]
        if stage <= highest:
            return False
        if place + 1 < len(order) and order[place + 1] == stage - 1 > highest:
            swaps += 1
            place += 1
        highest = stage
        place += 1
    return swaps <= swaps_max
