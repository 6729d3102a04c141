"""The warm starts: plan one microbatch after the other, each ending as early as it can around those before
it.

With hundreds of nodes an A* around a full calendar is slow, so large models take a dynamic programme over the
stages instead, which sees how long each node is booked rather than its exact gaps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from coordinator.planning.routes.astar import Choice, Plan, Planner, Reserved
from coordinator.planning.routes.evaluate import steps_of
from coordinator.planning.routes.model import Route, RouteModel
from protocol.base.errors import BadInputError

LARGE_NODES = 80


class Rooms:
    """How many more routes each node and each stage takes (CC3, TC1), given the routes chosen so far."""

    def __init__(self, model: RouteModel, kept: Sequence[Route | None]) -> None:
        self.model = model
        self.to_plan = sum(route is None for route in kept)
        self.visits = list(model.visits)
        self.memory = [0 if node in model.gone else room for node, room in enumerate(model.memory)]
        for route in kept:
            if route is not None:
                self._take(route)

    def _take(self, route: Route) -> None:
        for node in route:
            self.memory[node] -= 1
            self.visits[self.model.stage_of_node[node]] -= 1

    def take(self, route: Route) -> None:
        self._take(route)
        self.to_plan -= 1

    def choice(self) -> Choice:
        """What the next route may and must use so that the rest can still be finished.

        Every route visits a stage at most once, so a stage that lacks as many visits as routes are left is on
        all of them; with that rule kept, equal visits stay possible to the end.
        """
        later = range(1, self.model.stages)
        return Choice(
            not_nodes=frozenset(node for node, room in enumerate(self.memory) if room <= 0),
            not_stages=frozenset(stage for stage in later if self.visits[stage] <= 0),
            must_stages=frozenset(stage for stage in later if self.visits[stage] >= self.to_plan),
        )


def greedy(
    model: RouteModel,
    planner: Planner,
    order: Sequence[int],
    kept: Sequence[Route | None] | None = None,
) -> list[Route]:
    """Routes for every head, planned in `order`, each the earliest to finish around the earlier ones.

    `kept` are routes that stay as they are. Raises `BadInputError` when no route is left for some head.
    """
    routes: list[Route | None] = list(kept) if kept is not None else [None] * len(model.heads)
    rooms = Rooms(model, routes)
    if model.nodes > LARGE_NODES:
        return _greedy_large(model, rooms, order, routes)
    reserved = Reserved(model.nodes)
    for number in order:
        route = routes[number]
        if route is not None:
            plan: Plan | None = planner.timed(route, reserved)
        else:
            plan = planner.plan(model.heads[number], reserved, rooms.choice())
            if plan is None:
                raise BadInputError(_missing(model, number))
            rooms.take(plan.route)
            routes[number] = plan.route
        assert plan is not None
        reserved.add(steps_of(model, plan.route), plan.starts)
    return [route for route in routes if route is not None]


def _missing(model: RouteModel, number: int) -> str:
    return (
        f"heads[{number}]: no reachable route of {model.route_stages} stages is left for node "
        f"{model.heads[number]} within memory, visits_per_stage and swaps_max"
    )


def _greedy_large(model: RouteModel, rooms: Rooms, order: Sequence[int], routes: list[Route | None]) -> list[Route]:
    """One dynamic programme over the stages per microbatch; skipped stages are those with most visits to
    spare.
    """
    link = np.asarray(model.link_s, dtype=np.float64)
    both = link + link.T
    forward = np.asarray(model.forward_s)
    backward = np.asarray(model.backward_s)
    booked = np.zeros(model.nodes)
    memory = np.asarray(rooms.memory)
    members = [np.array(nodes, dtype=np.int64) for nodes in model.nodes_of_stage]
    work = forward + backward + model.rest_forward_s + model.rest_backward_s
    for number in order:
        kept = routes[number]
        if kept is not None:
            booked[list(kept)] += work[list(kept)]
    for number in order:
        if routes[number] is not None:
            continue
        head = model.heads[number]
        stages = _stages_for(model, rooms)
        label = np.array([booked[head] + work[head]])
        nodes = np.array([head])
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        for stage in stages:
            there = members[stage][memory[members[stage]] > 0]
            if not len(there):
                raise BadInputError(_missing(model, number))
            cost = label[:, None] + both[np.ix_(nodes, there)]
            best = cost.argmin(axis=0)
            label = np.maximum(cost[best, np.arange(len(there))], booked[there]) + work[there]
            trail.append((nodes, best))
            nodes = there
        end = label + (both[nodes, head] if stages else 0.0)
        at = int(end.argmin())
        if not math.isfinite(end[at]):
            raise BadInputError(_missing(model, number))
        path = []
        for before, best in reversed(trail):
            path.append(int(nodes[at]))
            at = int(best[at])
            nodes = before
        route = (head, *reversed(path))
        for node in route:
            booked[node] += work[node]
            memory[node] -= 1
        rooms.take(route)
        routes[number] = route
    return [route for route in routes if route is not None]


def _stages_for(model: RouteModel, rooms: Rooms) -> list[int]:
    """An ascending set of stages for the next route: those that lack most visits."""
    lacking = sorted(range(1, model.stages), key=lambda stage: (-rooms.visits[stage], stage))
    return sorted(lacking[: model.route_stages - 1])
