"""How long a set of routes takes: an event simulation of one node at a time, small enough to sit inside a
search.

A microbatch on a route of l nodes is a chain of 2l + 1 steps: F on each node, L on the head, B in reverse
order. Whenever a node is free it starts the waiting step that has the most work still behind it (ties: the
lower route).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from coordinator.planning.routes.model import Route, RouteModel


class Steps(NamedTuple):
    """The chain of one route: lists by step."""

    nodes: list[int]
    work_s: list[float]
    busy_s: list[float]
    link_s: list[float]
    """From the step before to this one."""
    tail_s: list[float]
    """From the start of the step to the end of the chain, alone."""

    @property
    def alone_s(self) -> float:
        return self.tail_s[0]


def steps_of(model: RouteModel, route: Route) -> Steps:
    """The chain of `route`, with its times when nobody else is about."""
    back = route[::-1]
    nodes = [*route, route[0], *back]
    work = [model.forward_s[n] for n in route] + [model.loss_s[route[0]]] + [model.backward_s[n] for n in back]
    rest_f, rest_b = model.rest_forward_s, model.rest_backward_s
    length = len(route)
    busy = [w + (rest_f if k < length else rest_b if k > length else 0.0) for k, w in enumerate(work)]
    link = [0.0] * len(nodes)
    for k in range(1, len(nodes)):
        if nodes[k] != nodes[k - 1]:
            link[k] = model.link_s[nodes[k - 1]][nodes[k]]
    tail = [0.0] * len(nodes)
    after = 0.0
    for k in range(len(nodes) - 1, -1, -1):
        tail[k] = after = after + work[k]
        after += link[k]
    return Steps(nodes, work, busy, link, tail)


@dataclass(frozen=True)
class Timed:
    """What a set of routes costs; `starts[a][r][k]`: step k of the r-th microbatch on route a."""

    makespan_s: float
    ends: tuple[float, ...]
    starts: tuple[tuple[tuple[float, ...], ...], ...]


class Evaluator:
    """Simulates routes of one model; keeps the chains of the routes it has seen."""

    def __init__(self, model: RouteModel) -> None:
        self.model = model
        self.evaluations = 0
        self._steps: dict[Route, Steps] = {}

    def steps(self, route: Route) -> Steps:
        found = self._steps.get(route)
        if found is None:
            if len(self._steps) > 200_000:
                self._steps.clear()
            found = self._steps[route] = steps_of(self.model, route)
        return found

    def ends(
        self,
        routes: Sequence[Route],
        bias: Sequence[float] | None = None,
        record: list[list[list[float]]] | None = None,
        limit_s: float = math.inf,
    ) -> list[float]:
        """When the last microbatch of each route ends.

        `bias` (one number per route) is added to a step's remaining work where a node chooses; `record[a]`
        receives the start times of each microbatch of route a. As soon as some route is certain to end after
        `limit_s` the simulation is given up and every end is infinite.
        """
        self.evaluations += 1
        chains = [self.steps(route) for route in routes]
        left = list(self.model.sends)
        extra = [
            (bias[a] if bias is not None else 0.0) + (left[a] - 1) * chain.tail_s[0] for a, chain in enumerate(chains)
        ]
        free_at = [0.0] * self.model.nodes
        waiting: list[list[tuple[float, int, int]] | None] = [None] * self.model.nodes
        ends = [0.0] * len(chains)
        events: list[tuple[float, int, int, int]] = []
        number = 0
        for a in range(len(chains)):
            if left[a]:
                events.append((0.0, number, a, 0))
                number += 1
        while events:
            now, _, a, k = heappop(events)
            if k < 0:  # node a may be free
                queue = waiting[a]
                assert queue is not None
                node = a
                _, a, k = heappop(queue)
                if not queue:
                    waiting[node] = None
                chain = chains[a]
            else:
                chain = chains[a]
                node = chain.nodes[k]
                queue = waiting[node]
                if queue is not None or now < free_at[node]:
                    if queue is None:
                        queue = waiting[node] = []
                        heappush(events, (free_at[node], number, node, -1))
                        number += 1
                    heappush(queue, (-chain.tail_s[k] - extra[a], a, k))
                    continue
            if now + chain.tail_s[k] + (left[a] - 1) * chain.tail_s[0] > limit_s:
                return [math.inf] * len(chains)
            if record is not None:
                if k == 0:
                    record[a].append([])
                record[a][-1].append(now)
            done = now + chain.work_s[k]
            free = free_at[node] = now + chain.busy_s[k]
            if waiting[node] is not None:
                heappush(events, (free, number, node, -1))
                number += 1
            k += 1
            if k < len(chain.nodes):
                heappush(events, (done + chain.link_s[k], number, a, k))
            else:
                ends[a] = done
                left[a] -= 1
                extra[a] -= chain.tail_s[0]
                if left[a]:
                    heappush(events, (done, number, a, 0))
            number += 1
        return ends

    def alone_s(self, routes: Sequence[Route]) -> float:
        """The mean over the routes of what their microbatches take one after the other with nobody else about."""
        ends = [sent * self.steps(route).tail_s[0] for route, sent in zip(routes, self.model.sends, strict=True)]
        return sum(ends) / len(ends)

    def timed(self, routes: Sequence[Route], bias: Sequence[float] | None = None) -> Timed:
        """The same with every start time."""
        record: list[list[list[float]]] = [[] for _ in routes]
        ends = self.ends(routes, bias, record)
        starts = tuple(tuple(tuple(mb) for mb in of_route) for of_route in record)
        return Timed(max(ends), tuple(ends), starts)


def operations(model: RouteModel, routes: Sequence[Route], timed: Timed) -> list[dict[str, Any]]:
    """The complete list of operations of coordinator/README.md, by start time; microbatches of one route are numbered
    apart.
    """
    found = []
    first = 0
    for route, sent in zip(routes, timed.starts, strict=True):
        steps = steps_of(model, route)
        length = len(route)
        for repeat, starts in enumerate(sent):
            for k, start in enumerate(starts):
                op, position = ("F", k) if k < length else ("L", length) if k == length else ("B", 2 * length - k)
                found.append(
                    {
                        "node": steps.nodes[k],
                        "op": op,
                        "microbatch": first + repeat,
                        "position": position,
                        "segment": 0,
                        "slice": 0,
                        "start_s": start,
                        "end_s": start + steps.work_s[k],
                    }
                )
        first += len(sent)
    found.sort(key=lambda row: (row["start_s"], row["node"], row["microbatch"], row["end_s"]))
    return found
