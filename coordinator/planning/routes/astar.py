"""The best route of one microbatch given what it may not do: A* with an admissible estimate.

The estimate is exact when nothing is forbidden: the least time of what is still to come (forward over the
best legal completion, loss, backward over it), from a table per head that ignores every restriction, plus the
backward over the nodes already chosen. Restrictions only ever delay, so it never overestimates. A step that
must wait starts as early as it can; starting later never helps the steps after it, so the timing of a route
needs no search.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

from coordinator.planning.routes.evaluate import Steps, steps_of
from coordinator.planning.routes.model import Route, RouteModel, next_stages

EXPANSIONS_MAX = 50_000


class Delays(Protocol):
    """When a step may start: never before `at`, given what it does and how long it keeps the node."""

    def earliest(self, node: int, op: str, at: float, busy_s: float) -> float: ...


class Reserved:
    """Nodes kept busy by routes that are already planned: a step waits for a gap that it fits."""

    def __init__(self, nodes: int) -> None:
        self._busy: list[list[tuple[float, float]]] = [[] for _ in range(nodes)]

    def add(self, steps: Steps, starts: Sequence[float]) -> None:
        for node, start, busy_s in zip(steps.nodes, starts, steps.busy_s, strict=True):
            insort(self._busy[node], (start, start + busy_s))

    def remove(self, steps: Steps, starts: Sequence[float]) -> None:
        for node, start, busy_s in zip(steps.nodes, starts, steps.busy_s, strict=True):
            self._busy[node].remove((start, start + busy_s))

    def earliest(self, node: int, op: str, at: float, busy_s: float) -> float:
        intervals = self._busy[node]
        place = bisect_right(intervals, (at, math.inf))
        if place:
            at = max(at, intervals[place - 1][1])
        for start, end in intervals[place:]:
            if at + busy_s <= start + 1e-12:
                break
            at = max(at, end)
        return at


class Forbidden:
    """Start times that the conflict search took away from one route: open intervals per (node, operation)."""

    def __init__(self) -> None:
        self.starts: dict[tuple[int, str], list[tuple[float, float]]] = {}

    def add(self, node: int, op: str, low: float, high: float) -> None:
        insort(self.starts.setdefault((node, op), []), (low, high))

    def earliest(self, node: int, op: str, at: float, busy_s: float) -> float:
        for low, high in self.starts.get((node, op), ()):
            if low - 1e-12 <= at < high - 1e-12:
                at = high
        return at


class Choice(NamedTuple):
    """Which nodes and stages a route may and must use."""

    not_nodes: frozenset[int] = frozenset()
    must_nodes: frozenset[int] = frozenset()
    not_stages: frozenset[int] = frozenset()
    must_stages: frozenset[int] = frozenset()


class Plan(NamedTuple):
    """A route with the start of each of its steps."""

    route: Route
    starts: tuple[float, ...]
    end_s: float


ANY = Choice()


class Planner:
    """A* for one model; the tables of the estimate are built once per head."""

    def __init__(self, model: RouteModel) -> None:
        self.model = model
        self.exact = True
        """Whether every plan so far is the best one; False once a search was cut short."""
        self._suffix: dict[tuple[int, int, int, int, int, int], float] = {}

    def suffix_s(self, head: int, node: int, highest: int, pending: int, left: int, swaps: int) -> float:
        """Least time from the end of F on `node` to the start of B on it, with nothing forbidden."""
        key = (head, node, highest, pending, left, swaps)
        found = self._suffix.get(key)
        if found is not None:
            return found
        model = self.model
        link = model.link_s
        if left == 0:
            best = (link[node][head] + link[head][node] if node != head else 0.0) + model.loss_s[head]
        else:
            best = math.inf
            for stage, high, owed, still in next_stages(model, highest, pending, left, swaps):
                for other in model.nodes_of_stage[stage]:
                    cost = link[node][other] + link[other][node] + model.forward_s[other] + model.backward_s[other]
                    if cost < best:
                        best = min(best, cost + self.suffix_s(head, other, high, owed, left - 1, still))
        self._suffix[key] = best
        return best

    def shortest_s(self, head: int) -> float:
        """The least time of any route of `head`, alone."""
        model = self.model
        tail = self.suffix_s(head, head, 0, -1, model.route_stages - 1, model.swaps_max)
        return model.forward_s[head] + tail + model.backward_s[head]

    def plan(
        self, head: int, delays: Delays, choice: Choice = ANY, start_s: float = 0.0, below_s: float = math.inf
    ) -> Plan | None:
        """The route of `head` that ends first and before `below_s`, or None when there is none.

        The answer is the best one; only after `EXPANSIONS_MAX` partial routes the best complete one found so
        far is returned instead, which happens when hundreds of nodes are all busy.
        """
        model = self.model
        link = model.link_s
        rest_s = model.rest_forward_s
        left = model.route_stages - 1
        begin = delays.earliest(head, "F", start_s, model.forward_s[head] + rest_s)
        done = begin + model.forward_s[head]
        back_s = model.backward_s[head]
        heap: list[tuple[float, int, Route, float, float, tuple[int, int, int, int], Plan | None]] = []
        estimate = done + self.suffix_s(head, head, 0, -1, left, model.swaps_max) + back_s
        if estimate < below_s:
            heappush(heap, (estimate, 0, (head,), done, back_s, (0, -1, left, model.swaps_max), None))
        number = 1
        while heap:
            estimate, _, route, done, back_s, (highest, pending, left, swaps), plan = heappop(heap)
            if plan is not None:
                return plan
            if left == 0:
                if not choice.must_nodes.issubset(route):
                    continue
                plan = self.timed(route, delays, start_s)
                if plan.end_s < below_s:
                    below_s = plan.end_s  # nothing worse than this needs to be kept
                    heappush(heap, (plan.end_s, number, route, done, back_s, (0, -1, 0, 0), plan))
                    number += 1
                continue
            if number > EXPANSIONS_MAX:
                self.exact = False
                complete = [entry for entry in heap if entry[6] is not None]
                if complete:
                    return min(complete, key=lambda entry: entry[0])[6]
                heap = [max(heap, key=lambda entry: (len(entry[2]), -entry[0]))] if heap else []
                number = 0
            for stage, high, owed, still in next_stages(model, highest, pending, left, swaps):
                if stage in choice.not_stages or owed in choice.not_stages:
                    continue
                for node in model.nodes_of_stage[stage]:
                    if node in choice.not_nodes:
                        continue
                    came = done + link[route[-1]][node]
                    end = delays.earliest(node, "F", came, model.forward_s[node] + rest_s) + model.forward_s[node]
                    behind = back_s + link[node][route[-1]] + model.backward_s[node]
                    estimate = end + self.suffix_s(head, node, high, owed, left - 1, still) + behind
                    if estimate >= below_s:
                        continue
                    longer = (*route, node)
                    if choice.must_stages and not _can_still_visit(model, longer, choice, high, owed, left - 1):
                        continue
                    heappush(heap, (estimate, number, longer, end, behind, (high, owed, left - 1, still), None))
                    number += 1
        return None

    def timed(self, route: Route, delays: Delays, start_s: float = 0.0) -> Plan:
        """The earliest starts along a given route."""
        steps = steps_of(self.model, route)
        length = len(route)
        ready = start_s
        starts = []
        free: dict[int, float] = {}  # a node rests after its own forward, too, before it goes on with the microbatch
        for k, node in enumerate(steps.nodes):
            op = "F" if k < length else "L" if k == length else "B"
            came = max(ready + steps.link_s[k], free.get(node, 0.0))
            start = delays.earliest(node, op, came, steps.busy_s[k])
            starts.append(start)
            free[node] = start + steps.busy_s[k]
            ready = start + steps.work_s[k]
        return Plan(route, tuple(starts), ready)


def _can_still_visit(model: RouteModel, route: Route, choice: Choice, highest: int, pending: int, left: int) -> bool:
    """Whether a partial route with `left` stages to come can still be on every stage that it must visit."""
    missing = choice.must_stages.difference([model.stage_of_node[node] for node in route])
    return len(missing) <= left and all(stage > highest or stage == pending for stage in missing)
