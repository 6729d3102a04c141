"""Simulated annealing on whole sets of routes, judged by the event simulation.

Every move keeps the rules: two routes exchange their nodes of a stage, a route takes another node of its
stage, two routes exchange a stage that only one of them visits, a route changes the order of two neighbours,
or a route gets more or less right of way. Where a node's stage may still be chosen, two nodes of different stages may
also exchange their places with all the routes through them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.model import Route, RouteModel, drawn_order

HOT, COLD = 0.03, 0.0005
"""Temperatures as fractions of the first makespan."""
MEAN_WEIGHT = 0.05
"""How much the mean end counts beside the last end: it tells apart sets whose last end is the same."""
PLACES_WEIGHT = 3
"""How often two nodes exchange their stages, where a route takes another node three times and gets way once."""
StagesCost = Callable[[Sequence[Sequence[int]]], float]
"""Seconds that count on top of the makespan, given the nodes of every stage."""


@dataclass
class Best:
    """The best set of routes so far, with the right of way that made it."""

    makespan_s: float
    routes: list[Route]
    bias: list[float]
    stage_of: tuple[int, ...] | None = None
    """The stage of every node, where stages were open to change."""
    cost_s: float = math.inf
    """The makespan, and what the stages cost beside it."""


def anneal(
    model: RouteModel,
    evaluator: Evaluator,
    start: Sequence[Route],
    rng: random.Random,
    evaluations: int,
    expired: Callable[[], bool],
    *,
    goal_s: float = 0.0,
    bias: Sequence[float] | None = None,
    free: Sequence[int] | None = None,
    heat: float = 1.0,
    stages_cost: StagesCost | None = None,
) -> Best:
    """The best set found from `start`; ends early at `goal_s`. Only the routes in `free` are changed.

    With `stages_cost` nodes exchange their stages too, at what the stages cost then; `evaluator` must not depend on
    the model's stages.
    """
    routes = list(start)
    right_of_way = list(bias) if bias is not None else [0.0] * len(routes)
    ends = evaluator.ends(routes, right_of_way)
    best = Best(max(ends), list(routes), list(right_of_way))
    numbers = list(free) if free is not None else list(range(len(routes)))
    if not numbers:
        return best
    moves = _Moves(model, routes, right_of_way, numbers, best.makespan_s, stages_cost is not None)

    def beside() -> float:
        return stages_cost(moves.members) if stages_cost is not None else 0.0

    stages_s = beside()
    best.cost_s, best.stage_of = best.makespan_s + stages_s, tuple(moves.stage_of)
    score = _score(ends) + stages_s
    scale = best.makespan_s * heat
    for number in range(evaluations):
        if best.makespan_s <= goal_s or (number % 16 == 0 and expired()):
            break
        temperature = scale * HOT * (COLD / HOT) ** (number / evaluations)
        undo = moves.propose(rng)
        if undo is None:
            continue
        stages_s = beside()
        most = score - temperature * math.log(1.0 - rng.random())  # a higher score is not accepted
        least = MEAN_WEIGHT * evaluator.alone_s(routes)
        ends = evaluator.ends(routes, right_of_way, limit_s=most - stages_s - least)
        new = _score(ends) + stages_s
        if new <= most:
            score = new
            if (cost_s := max(ends) + stages_s) < best.cost_s:
                best = Best(max(ends), list(routes), list(right_of_way), tuple(moves.stage_of), cost_s)
        else:
            undo()
    return best


def _score(ends: Sequence[float]) -> float:
    return max(ends) + MEAN_WEIGHT * sum(ends) / len(ends)


class _Moves:
    """Changes `routes` and `bias` in place; each proposal answers how to take itself back."""

    def __init__(
        self,
        model: RouteModel,
        routes: list[Route],
        bias: list[float],
        free: list[int],
        scale_s: float,
        exchange_places: bool = False,
    ) -> None:
        self.model = model
        self.stage_of = list(model.stage_of_node)
        self.members = [list(nodes) for nodes in model.nodes_of_stage]
        self.routes = routes
        self.bias = bias
        self.free = free
        self.scale_s = scale_s
        self.used = [0] * model.nodes
        for route in routes:
            for node in route:
                self.used[node] += 1
        skips = model.route_stages < model.stages
        self.kinds: list[Callable[[random.Random], Callable[[], None] | None]] = [self._right_of_way]
        if model.route_stages > 1:
            self.kinds += [self._exchange_node] * 4 + [self._other_node] * 3
        if skips and len(free) > 1:
            self.kinds += [self._exchange_stage] * 4
        if model.swaps_max:
            self.kinds.append(self._reorder)
        if exchange_places and model.stages > 1:
            self.kinds += [self._exchange_places] * PLACES_WEIGHT

    def propose(self, rng: random.Random) -> Callable[[], None] | None:
        return rng.choice(self.kinds)(rng)

    def _set(self, *changes: tuple[int, Route]) -> Callable[[], None]:
        before = [(a, self.routes[a]) for a, _ in changes]
        for a, route in changes:
            for node in self.routes[a]:
                self.used[node] -= 1
            for node in route:
                self.used[node] += 1
            self.routes[a] = route

        def undo() -> None:
            self._set(*before)

        return undo

    def _right_of_way(self, rng: random.Random) -> Callable[[], None]:
        a = rng.choice(self.free)
        before = self.bias[a]
        self.bias[a] = rng.gauss(0.0, 0.15) * self.scale_s if rng.random() < 0.7 else 0.0

        def undo() -> None:
            self.bias[a] = before

        return undo

    def _exchange_node(self, rng: random.Random) -> Callable[[], None] | None:
        a, b = rng.choice(self.free), rng.choice(self.free)
        one, two = self.routes[a], self.routes[b]
        place = rng.randrange(1, len(one))
        stage = self.stage_of[one[place]]
        for other, node in enumerate(two):
            if self.stage_of[node] == stage and node != one[place]:
                return self._set(
                    (a, (*one[:place], node, *one[place + 1 :])),
                    (b, (*two[:other], one[place], *two[other + 1 :])),
                )
        return None

    def _other_node(self, rng: random.Random) -> Callable[[], None] | None:
        a = rng.choice(self.free)
        route = self.routes[a]
        place = rng.randrange(1, len(route))
        members = self.members[self.stage_of[route[place]]]
        node = rng.choice(members)
        if node == route[place] or self.used[node] >= self.model.memory[node]:
            return None
        return self._set((a, (*route[:place], node, *route[place + 1 :])))

    def _exchange_stage(self, rng: random.Random) -> Callable[[], None] | None:
        a, b = rng.choice(self.free), rng.choice(self.free)
        stage_of = self.stage_of
        mine = {stage_of[node]: node for node in self.routes[a]}
        theirs = {stage_of[node]: node for node in self.routes[b]}
        give = [stage for stage in mine if stage not in theirs]
        take = [stage for stage in theirs if stage not in mine]
        if not give:
            return None
        out, into = rng.choice(give), rng.choice(take)
        mine[into], theirs[out] = theirs.pop(into), mine.pop(out)
        return self._set((a, self._ordered(mine, rng)), (b, self._ordered(theirs, rng)))

    def _exchange_places(self, rng: random.Random) -> Callable[[], None] | None:
        a, b = rng.randrange(len(self.members)), rng.randrange(len(self.members))
        if a == b:
            return None
        x, y = rng.randrange(len(self.members[a])), rng.randrange(len(self.members[b]))
        one, two = self.members[a][x], self.members[b][y]
        if self.used[one] > self.model.memory[two] or self.used[two] > self.model.memory[one]:
            return None

        def exchange() -> None:
            one, two = self.members[a][x], self.members[b][y]
            self.members[a][x], self.members[b][y] = two, one
            self.stage_of[one], self.stage_of[two] = b, a
            self.used[one], self.used[two] = self.used[two], self.used[one]
            name = {one: two, two: one}
            for number, route in enumerate(self.routes):
                if one in route or two in route:
                    self.routes[number] = tuple(name.get(node, node) for node in route)

        exchange()
        return exchange

    def _reorder(self, rng: random.Random) -> Callable[[], None] | None:
        a = rng.choice(self.free)
        route = self._ordered({self.stage_of[node]: node for node in self.routes[a]}, rng, 1.0)
        return self._set((a, route)) if route != self.routes[a] else None

    def _ordered(self, nodes: dict[int, int], rng: random.Random, swapped: float = 0.3) -> Route:
        """The route over `nodes` (by stage) in a legal order, exchanged with probability `swapped`."""
        chosen = tuple(sorted(stage for stage in nodes if stage))
        order = chosen
        if self.model.swaps_max and rng.random() < swapped:
            order = drawn_order(chosen, self.model.swaps_max, rng)
        return (nodes[0], *(nodes[stage] for stage in order))
