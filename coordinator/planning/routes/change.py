"""When a node drops, joins or slows down: everybody else keeps their route, and the rest is repaired at once.

A repair is a greedy plan of the broken routes alone around the kept ones; improving all routes is for the
background (`improve_in_background`), because a changed route costs the work in flight on it. Every change
raises the generation, and an answer for an older generation is refused, so two plans are never mixed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.planning.routes.astar import Planner
from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.greedy import greedy
from coordinator.planning.routes.improve import anneal
from coordinator.planning.routes.model import Route, RouteModel, even_visits
from coordinator.planning.routes.search import RoutesAnswer, search_routes
from protocol.base.errors import BadInputError, LocalProtocolError

REPAIR_STEPS = 200_000
"""Simulated steps that a repair may spend on making the new routes better: a fraction of a second."""
IMPROVE_AT_LEAST = 0.02
"""A background plan replaces the present one only when its makespan is so much shorter."""


@dataclass(frozen=True)
class Repair:
    """Routes after a change.

    `kept[i]` is the number, before the change, of the route that is now route i, or -1 for a new one;
    `redone_steps` is how many forward steps of microbatches in flight the change can throw away at most (one
    per node of every route that is gone), which is what moving costs.
    """

    model: RouteModel
    routes: tuple[Route, ...]
    kept: tuple[int, ...]
    makespan_s: float
    redone_steps: int

    @property
    def changed(self) -> int:
        return sum(number < 0 for number in self.kept)


def drop(model: RouteModel, routes: Sequence[Route], node: int) -> Repair:
    """The routes after `node` left.

    Raises `BadInputError` with what is missing when the remaining nodes cannot carry a single route.
    """
    stage = model.stage_of_node[node]
    left = model.without(frozenset((node,)))
    if not left.nodes_of_stage[stage]:
        raise BadInputError(f"stage {stage} lost its last node {node}")
    return drop_gone(left, routes)


def drop_gone(model: RouteModel, routes: Sequence[Route]) -> Repair:
    """The routes where those through nodes that are gone from `model` are planned again.

    Its times and links may be others than those that the routes were planned for, and it may have more nodes. Raises
    `BadInputError` with what is missing when the remaining nodes cannot carry a single route.
    """
    for stage, nodes in enumerate(model.nodes_of_stage):
        if not nodes:
            raise BadInputError(f"stage {stage} has no node left")
    broken = {number for number, route in enumerate(routes) if model.gone.intersection(route)}
    return _repair(model, routes, broken) if broken else _kept_as_they_are(model, routes)


def join(model: RouteModel, routes: Sequence[Route], node: int) -> Repair:
    """The routes after `node`, already numbered in `model`, is there (again): nobody's route changes.

    The new node takes work when the background plan finds that it pays, or at the next repair.
    """
    back = replace(model, gone=model.gone - {node})
    return _kept_as_they_are(back, routes)


def slow_down(model: RouteModel, routes: Sequence[Route], node: int, factor: float) -> Repair:
    """The routes after `node` turned out to take `factor` times as long.

    Only routes through the node are planned again, and only when that makes the whole faster.
    """
    if not factor > 0:
        raise BadInputError(f"factor: {factor} must be above 0")
    slower = replace(
        model,
        forward_s=_scaled(model.forward_s, node, factor),
        backward_s=_scaled(model.backward_s, node, factor),
        loss_s=_scaled(model.loss_s, node, factor),
    )
    return relieve(slower, routes, node)


def relieve(model: RouteModel, routes: Sequence[Route], node: int) -> Repair:
    """The routes where those through `node` are planned again, if that makes the whole faster."""
    as_before = _kept_as_they_are(model, routes)
    broken = {number for number, route in enumerate(routes) if node in route and model.stage_of_node[node] > 0}
    if not broken:
        return as_before
    repaired = _repair(model, routes, broken)
    return repaired if repaired.makespan_s < as_before.makespan_s else as_before


def _scaled(values: tuple[float, ...], node: int, factor: float) -> tuple[float, ...]:
    return (*values[:node], values[node] * factor, *values[node + 1 :])


def _kept_as_they_are(model: RouteModel, routes: Sequence[Route]) -> Repair:
    makespan = max(Evaluator(model).ends(routes))
    return Repair(model, tuple(routes), tuple(range(len(routes))), makespan, 0)


def _repair(model: RouteModel, routes: Sequence[Route], broken: set[int]) -> Repair:
    """Plans the broken routes again; drops as many routes as no longer fit, with their microbatches spread."""
    microbatches = sum(model.sends)
    numbers, heads = _heads_after(model, routes, broken)
    visits = _visits_after(model, routes, broken, numbers)
    share = list(model.sends)
    per_route = [share[number] for number in numbers]
    missing = microbatches - sum(per_route)
    for place in sorted(range(len(numbers)), key=lambda i: (per_route[i], i)) * (missing // len(numbers) + 1):
        if not missing:
            break
        per_route[place] += 1
        missing -= 1
    new = replace(model, heads=tuple(heads), visits=visits, repeats=tuple(per_route))
    kept: list[Route | None] = [None if number in broken else routes[number] for number in numbers]
    _free_surplus(new, kept)
    free = [place for place, route in enumerate(kept) if route is None]
    new.check()
    repaired = greedy(new, Planner(new), _order(kept), kept)
    evaluator = Evaluator(new)
    steps = sum(new.sends) * (2 * new.route_stages + 1)
    rounds = min(20 * len(free), REPAIR_STEPS // steps)
    if rounds:
        best = anneal(new, evaluator, repaired, random.Random(0), rounds, lambda: False, free=free)
        repaired, makespan = best.routes, max(evaluator.ends(best.routes))
    else:
        makespan = max(evaluator.ends(repaired))
    came_from = tuple(-1 if kept[place] is None else number for place, number in enumerate(numbers))
    survivors = {number for number in came_from if number >= 0}
    redone = sum(len(route) for number, route in enumerate(routes) if number not in survivors)
    return Repair(new, tuple(repaired), came_from, makespan, redone)


def _order(kept: Sequence[Route | None]) -> list[int]:
    """Kept routes first, so that the calendar is full before the others are planned around it."""
    return sorted(range(len(kept)), key=lambda place: (kept[place] is None, place))


def _heads_after(model: RouteModel, routes: Sequence[Route], broken: set[int]) -> tuple[list[int], list[int]]:
    """Which routes go on, and from which head: those of a head that left go to heads with room, or end."""
    room = {head: model.memory[head] for head in model.nodes_of_stage[0]}
    for head in model.heads:
        if head in room:
            room[head] -= 1
    numbers, heads = [], []
    for number, head in enumerate(model.heads):
        if head in model.gone:
            free = [other for other, places in room.items() if places > 0]
            if not free:
                continue
            head = max(free, key=lambda other: (room[other], -other))
            room[head] -= 1
        numbers.append(number)
        heads.append(head)
    most = _most_routes(model)
    while len(numbers) > most:  # broken routes end first, then those with the highest number
        place = max(range(len(numbers)), key=lambda i: (numbers[i] in broken, i))
        broken.add(numbers[place])
        del numbers[place], heads[place]
    if not numbers:
        raise BadInputError("heads: no node of stage 0 has room for a route")
    return numbers, heads


def _most_routes(model: RouteModel) -> int:
    """As many routes as every stage has room for at equal visits."""
    most = len(model.heads)
    while most:
        visits = even_visits(most, model.stages, model.route_stages)
        rooms = (sum(model.memory[node] for node in model.nodes_of_stage[stage]) for stage in range(1, model.stages))
        if all(need <= room for need, room in zip(visits[1:], rooms, strict=True)):
            return most
        most -= 1
    raise BadInputError("memory: some stage has no room for a route")


def _visits_after(
    model: RouteModel, routes: Sequence[Route], broken: set[int], numbers: Sequence[int]
) -> tuple[int, ...]:
    """Equal visits for the routes that go on; where they cannot be equal, the surplus stays where it was."""
    count = len(numbers)
    if count == len(model.heads):
        return model.visits
    even = even_visits(count, model.stages, model.route_stages)
    if model.stages == 1:
        return even
    low, high = min(even[1:]), max(even[1:])
    kept = [0] * model.stages
    for number in numbers:
        if number not in broken:
            for node in routes[number]:
                kept[model.stage_of_node[node]] += 1
    room = [sum(model.memory[node] for node in nodes) for nodes in model.nodes_of_stage]
    surplus = sum(stage_visits - low for stage_visits in even[1:])
    fullest = sorted(range(1, model.stages), key=lambda stage: (room[stage] < high, -kept[stage], stage))
    raised = set(fullest[:surplus])
    return (count, *(high if stage in raised else low for stage in range(1, model.stages)))


def _free_surplus(model: RouteModel, kept: list[Route | None]) -> None:
    """Gives up kept routes until no stage or node is on more of them than it may be."""
    while True:
        visits = [0] * model.stages
        used = [0] * model.nodes
        for route in kept:
            for node in route or ():
                visits[model.stage_of_node[node]] += 1
                used[node] += 1
        free = sum(route is None for route in kept)
        crowded = [s for s in range(1, model.stages) if visits[s] > model.visits[s]]
        starved = [s for s in range(1, model.stages) if model.visits[s] - visits[s] > free]
        full = [node for node in range(model.nodes) if used[node] > model.memory[node]]
        if not crowded and not starved and not full:
            return
        place = max(
            (place for place, route in enumerate(kept) if route is not None),
            key=lambda place: (_relief(model, kept[place] or (), crowded, starved, full), place),
        )
        kept[place] = None


def _relief(model: RouteModel, route: Route, crowded: list[int], starved: list[int], full: list[int]) -> int:
    """How many of the troubles giving up this route helps against."""
    stages = {model.stage_of_node[node] for node in route}
    return (
        sum(stage in stages for stage in crowded)
        + sum(stage not in stages for stage in starved)
        + sum(node in route for node in full)
    )


@dataclass
class LivePlan:
    """The routes in force, with the generation that fences them."""

    generation: int
    model: RouteModel
    routes: tuple[Route, ...]
    makespan_s: float

    @classmethod
    def of(cls, model: RouteModel, answer: RoutesAnswer, generation: int = 1) -> LivePlan:
        return cls(generation, model, answer.routes, answer.makespan_s)

    def apply(self, repair: Repair, made_for: int) -> None:
        """Puts a repair in force. Raises `LocalProtocolError` when it was made for another generation."""
        if made_for != self.generation:
            raise LocalProtocolError(f"a plan made for generation {made_for} came at generation {self.generation}")
        self.generation += 1
        self.model, self.routes, self.makespan_s = repair.model, repair.routes, repair.makespan_s


def improve_in_background(plan: LivePlan, seed: int, budget_s: float) -> Repair | None:
    """Better routes for everybody, or None when they do not save `IMPROVE_AT_LEAST` of the makespan.

    Runs beside the training on a copy; the answer is applied with the generation that `plan` had at the
    start.
    """
    found = search_routes(plan.model, seed, budget_s, start=plan.routes)
    if found.makespan_s > plan.makespan_s * (1 - IMPROVE_AT_LEAST):
        return None
    before: dict[Route, list[int]] = {}
    for number, route in enumerate(plan.routes):
        before.setdefault(route, []).append(number)
    kept = tuple(before[route].pop(0) if before.get(route) else -1 for route in found.routes)
    gone = set(range(len(plan.routes))) - set(kept)
    redone = sum(len(plan.routes[number]) for number in gone)
    return Repair(plan.model, found.routes, kept, found.makespan_s, redone)
