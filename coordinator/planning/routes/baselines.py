"""The other ways to route, wired correctly and with as many microbatches: what the search must beat.

* `fixed_chains`: DT-FM. No skipping; each microbatch slot keeps one node per stage, matched hop by hop.
* `greedy_full`: no skipping; each microbatch takes the nodes that let it end first.
* `delay_blind`: skipping by the rules, but links are not looked at.
* `no_collisions`: skipping with the least time of each route alone (SkipPipe without TC2).
* `online_router`: no skipping; the next hop is drawn by measured throughput, as SWARM does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from coordinator.planning.placement.arrange import matching
from coordinator.planning.routes.astar import Planner
from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.greedy import Rooms, greedy
from coordinator.planning.routes.improve import anneal
from coordinator.planning.routes.model import Route, RouteModel, drawn_order
from coordinator.planning.simulator.kernel import EventHeap
from protocol.base.errors import BadInputError


def full_length(model: RouteModel) -> RouteModel:
    """The same nodes and as many microbatches, but every route visits every stage.

    As many routes as the tightest stage holds at once; the microbatches are spread over them evenly, so some
    routes may be used once more than others.
    """
    microbatches = sum(model.sends)
    heads = sorted(set(model.heads))
    at_once = min(
        microbatches,
        min(sum(model.memory[n] for n in model.nodes_of_stage[stage]) for stage in range(1, model.stages))
        if model.stages > 1
        else microbatches,
        sum(model.memory[head] for head in heads),
    )
    room = {head: model.memory[head] for head in heads}
    chosen: list[int] = []
    while len(chosen) < at_once:
        for head in heads:
            if room[head] and len(chosen) < at_once:
                room[head] -= 1
                chosen.append(head)
    share, surplus = divmod(microbatches, at_once)
    return replace(
        model,
        heads=tuple(chosen),
        route_stages=model.stages,
        visits=(at_once,) * model.stages,
        repeats=tuple(share + (number < surplus) for number in range(at_once)),
    )


def fixed_chains(model: RouteModel) -> list[Route]:
    """DT-FM: the chains of a full-length model, each hop the matching of stages with the least bottleneck.

    Routes of one node go on together; where two neighbouring stages differ in size they are spread as evenly
    as memory allows.
    """
    link = np.asarray(model.link_s, dtype=np.float64)
    both = link + link.T
    routes: list[Route] = [(head,) for head in model.heads]
    for stage in range(1, model.route_stages):
        slots = [node for node in model.nodes_of_stage[stage] for _ in range(model.memory[node])]
        last_hop = stage == model.route_stages - 1
        cost = np.empty((len(slots), len(routes)))
        for column, route in enumerate(routes):
            home = both[slots, route[0]] if last_hop else 0.0
            cost[:, column] = both[route[-1], slots] + home
        values = np.unique(cost)
        low, high = 0, len(values) - 1
        best: list[int] | None = matching(cost, float(values[high]), 1)
        if best is None or not np.isfinite(values[low]):
            raise BadInputError(f"memory: stage {stage} has no room for {len(routes)} routes")
        while low < high:
            middle = (low + high) // 2
            tried = matching(cost, float(values[middle]), 1)
            if tried is None:
                low = middle + 1
            else:
                high, best = middle, tried
        routes = [(*route, slots[row]) for route, row in zip(routes, best, strict=True)]
    return routes


def greedy_full(model: RouteModel) -> list[Route]:
    """Greedy earliest-finish routes for a full-length model."""
    return greedy(model, Planner(model), range(len(model.heads)))


def delay_blind(model: RouteModel, seed: int = 0) -> list[Route]:
    """Routes by the rules, drawn without looking at any link."""
    rng = random.Random(seed)
    rooms = Rooms(model, [None] * len(model.heads))
    routes: list[Route] = []
    for head in model.heads:
        choice = rooms.choice()
        free = [s for s in range(1, model.stages) if s not in choice.not_stages and s not in choice.must_stages]
        rng.shuffle(free)
        wanted = model.route_stages - 1 - len(choice.must_stages)
        stages = sorted([*choice.must_stages, *free[:wanted]])
        nodes = {}
        for stage in stages:
            open_nodes = [node for node in model.nodes_of_stage[stage] if rooms.memory[node] > 0]
            if not open_nodes:
                raise BadInputError(f"memory: stage {stage} has no room left")
            nodes[stage] = max(open_nodes, key=lambda node: (rooms.memory[node], rng.random()))
        order = drawn_order(tuple(stages), model.swaps_max, rng)
        route = (head, *(nodes[stage] for stage in order))
        rooms.take(route)
        routes.append(route)
    return routes


class _Alone(Evaluator):
    """Ends of routes as if every node could do everything at once."""

    def ends(
        self,
        routes: Sequence[Route],
        bias: Sequence[float] | None = None,
        record: list[list[list[float]]] | None = None,
        limit_s: float = math.inf,
    ) -> list[float]:
        return [sent * self.steps(route).alone_s for sent, route in zip(self.model.sends, routes, strict=True)]


def no_collisions(
    model: RouteModel, seed: int = 0, evaluations: int = 6_000, expired: Callable[[], bool] = lambda: False
) -> list[Route]:
    """Routes that obey every rule but TC2 and are as short as can be when each is alone."""
    start = delay_blind(model, seed)
    return anneal(model, _Alone(model), start, random.Random(seed), evaluations, expired).routes


def online_router(model: RouteModel, seed: int = 0) -> float:
    """The makespan when nobody plans: SWARM's stochastic wiring on a full-length model.

    A microbatch that leaves a node draws its next node among those of the next stage with a free place, by
    the throughput that the sender sees (one over link plus work); it waits at the sender when no place is
    free. Nodes take what came first, backward before forward. Heads send their next microbatch when one came
    home.
    """
    rng = random.Random(seed)
    per_head: dict[int, int] = {}
    for head, sent in zip(model.heads, model.sends, strict=True):
        per_head[head] = per_head.get(head, 0) + sent
    places = list(model.memory)
    free_at = [0.0] * model.nodes
    queues: list[list[tuple[int, int, int]]] = [[] for _ in range(model.nodes)]
    trails: list[list[int]] = []
    events: EventHeap[tuple[str, int, int]] = EventHeap()
    blocked: list[list[int]] = [[] for _ in range(model.stages)]
    arrivals = 0
    last = 0.0
    length = model.route_stages

    def start(head: int, now: float) -> None:
        while per_head[head] and places[head]:
            per_head[head] -= 1
            places[head] -= 1
            trails.append([head])
            events.push(now, ("ready", len(trails) - 1, 0))

    def hop(microbatch: int, now: float) -> None:
        trail = trails[microbatch]
        stage = len(trail)
        here = trail[-1]
        there = [node for node in model.nodes_of_stage[stage] if places[node]]
        if not there:
            blocked[stage].append(microbatch)
            return
        weights = [1.0 / (model.link_s[here][n] + model.forward_s[n] + 1e-9) for n in there]
        node = rng.choices(there, weights)[0]
        places[node] -= 1
        trail.append(node)
        events.push(now + model.link_s[here][node], ("ready", microbatch, stage))

    for head in sorted(per_head):
        start(head, 0.0)
    while events:
        now, instant = events.pop_instant()
        for what, subject, step in instant:
            if what == "ready":
                trail = trails[subject]
                node = trail[0] if step == length else trail[step if step < length else 2 * length - step]
                arrivals += 1
                heappush(queues[node], (0 if step >= length else 1, arrivals, subject * (2 * length + 1) + step))
                events.push(now, ("free", node, 0))
            elif what == "free":
                if now < free_at[subject] - 1e-12 or not queues[subject]:
                    continue
                microbatch, step = divmod(heappop(queues[subject])[2], 2 * length + 1)
                work, rest = _work(model, subject, step, length)
                free_at[subject] = now + work + rest
                events.push(now + work + rest, ("free", subject, 0))
                events.push(now + work, ("done", microbatch, step))
            elif step == 2 * length:
                last = max(last, now)
                places[trails[subject][0]] += 1
                start(trails[subject][0], now)
            elif step < length - 1:
                hop(subject, now)
            else:
                trail = trails[subject]
                here = trail[step if step < length else 0 if step == length else 2 * length - step]
                there = trail[0] if step + 1 == length else trail[2 * length - step - 1]
                way_s = float(model.link_s[here][there]) if here != there else 0.0
                events.push(now + way_s, ("ready", subject, step + 1))
                if step > length:
                    places[here] += 1
                    if blocked[2 * length - step]:
                        hop(blocked[2 * length - step].pop(0), now)
    return last


def _work(model: RouteModel, node: int, step: int, length: int) -> tuple[float, float]:
    """Seconds of work and of rest after it for a step of a chain on `node`."""
    if step < length:
        return model.forward_s[node], model.rest_forward_s
    if step == length:
        return model.loss_s[node], 0.0
    return model.backward_s[node], model.rest_backward_s
