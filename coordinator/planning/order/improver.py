"""Improves the orders of a task graph by swaps on its critical path: tabu search for job shops, with memory.

Moves exchange two neighbours on one node that both lie on a longest path (Nowicki & Smutnicki, Management
Science 42(6), 1996); what a move would give is estimated from heads and tails before it is tried (Taillard
1994). An order that would exceed a node's memory is no move. Deterministic but for the clock that ends it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planning.simulator.graph import TaskGraph

#: Moves that stay forbidden after they were undone, at least; a few more are drawn each time.
_TABU_MOVES = 8
#: Moves without a new best before the search goes back to the best orders and shakes them.
_PATIENCE = 400


@dataclass(frozen=True)
class Improved:
    """The best orders found.

    Attributes:
        moves: how many were tried.
        stopped: "bound", "time" or "moves".
    """

    orders: list[list[int]]
    makespan_s: float
    moves: int
    stopped: str


@dataclass
class _Times:
    """Of one set of orders: earliest starts, longest ways to the end, and the makespan."""

    head: list[float]
    tail: list[float]
    makespan: float


class OrderImprover:
    """Searches orders of one graph.

    Args:
        graph: without shared links, whose transfers have no time of their own.
        memory_max: per node, in the graph's unit of memory; None for no limit.
    """

    def __init__(self, graph: TaskGraph, memory_max: Sequence[float] | None = None) -> None:
        assert not graph.network.shares, "orders are improved against delays, not against shared links"
        self._graph = graph
        self._memory_max = memory_max
        self._before: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
        self._after: list[list[tuple[int, float]]] = [[] for _ in range(len(graph))]
        for task, edges in enumerate(graph.followers):
            for edge in edges:
                self._after[task].append((edge.to, edge.delay_s))
                self._before[edge.to].append((task, edge.delay_s))
        self._kind = [(key.op, graph.stages[task]) for task, key in enumerate(graph.keys)]
        self._node_before = [-1] * len(graph)
        self._node_after = [-1] * len(graph)

    def improve(
        self,
        orders: Sequence[Sequence[int]],
        bound_s: float,
        rng: random.Random,
        seconds_left: Callable[[], float],
        moves_max: int = 1_000_000,
    ) -> Improved:
        """The best orders reached from feasible `orders` until the bound, the time or the moves are
        reached."""
        current = [list(order) for order in orders]
        times = self._evaluate(current)
        assert times is not None, "the orders to improve deadlock"
        best, best_s = [list(order) for order in current], times.makespan
        tabu: dict[tuple[int, int], int] = {}
        since_best = 0
        for move in range(moves_max):
            if best_s <= bound_s * (1 + 1e-9):
                return Improved(best, best_s, move, "bound")
            if seconds_left() <= 0:
                return Improved(best, best_s, move, "time")
            if since_best > _PATIENCE:
                current, since_best = [list(order) for order in best], 0
                self._shake(current, rng)
                times = self._evaluate(current)
                assert times is not None, "a shaken order deadlocks"
                tabu.clear()
            swap = self._best_swap(current, times, tabu, move, best_s, rng)
            if swap is None:
                since_best = _PATIENCE + 1
                continue
            node, at = swap
            order = current[node]
            first, second = order[at], order[at + 1]
            order[at], order[at + 1] = second, first
            changed = self._evaluate(current)
            tabu[first, second] = move + _TABU_MOVES + rng.randrange(_TABU_MOVES)
            if changed is None:
                order[at], order[at + 1] = first, second
                tabu[second, first] = tabu[first, second]
                since_best += 1
                continue
            times = changed
            since_best += 1
            if times.makespan < best_s * (1 - 1e-12):
                best, best_s = [list(order) for order in current], times.makespan
                since_best = 0
        return Improved(best, best_s, moves_max, "moves")

    def _evaluate(self, orders: Sequence[Sequence[int]]) -> _Times | None:
        """Heads and tails by a topological pass; None when the orders deadlock."""
        seconds, after = self._graph.seconds, self._after
        node_before, node_after = self._node_before, self._node_after
        waits = list(self._graph.waits)
        for order in orders:
            previous = -1
            for task in order:
                node_before[task] = previous
                if previous >= 0:
                    node_after[previous] = task
                    waits[task] += 1
                previous = task
            if previous >= 0:
                node_after[previous] = -1
        head = [0.0] * len(waits)
        line = [task for task, count in enumerate(waits) if count == 0]
        for task in line:
            end = head[task] + seconds[task]
            for to, delay in after[task]:
                if end + delay > head[to]:
                    head[to] = end + delay
                waits[to] -= 1
                if waits[to] == 0:
                    line.append(to)
            to = node_after[task]
            if to >= 0:
                if end > head[to]:
                    head[to] = end
                waits[to] -= 1
                if waits[to] == 0:
                    line.append(to)
        if len(line) < len(waits):
            return None
        tail = [0.0] * len(waits)
        makespan = 0.0
        for task in reversed(line):
            longest = 0.0
            for to, delay in after[task]:
                way = delay + seconds[to] + tail[to]
                if way > longest:
                    longest = way
            to = node_after[task]
            if to >= 0 and seconds[to] + tail[to] > longest:
                longest = seconds[to] + tail[to]
            tail[task] = longest
            if head[task] + seconds[task] + longest > makespan:
                makespan = head[task] + seconds[task] + longest
        return _Times(head, tail, makespan)

    def _best_swap(
        self,
        orders: list[list[int]],
        times: _Times,
        tabu: dict[tuple[int, int], int],
        move: int,
        best_s: float,
        rng: random.Random,
    ) -> tuple[int, int] | None:
        """The allowed critical swap with the least estimate, as (node, index of the first)."""
        seconds, head, tail = self._graph.seconds, times.head, times.tail
        critical_s = times.makespan * (1 - 1e-9)
        found: tuple[float, float, int, int] | None = None
        for node, order in enumerate(orders):
            for at in range(len(order) - 1):
                first, second = order[at], order[at + 1]
                if head[first] + seconds[first] + tail[first] < critical_s:
                    continue
                if head[second] + seconds[second] + tail[second] < critical_s:
                    continue
                if self._kind[first] == self._kind[second] or self._directly_before(first, second):
                    continue
                if not self._memory_allows(node, order, at):
                    continue
                estimate = self._estimate(times, first, second)
                if tabu.get((second, first), -1) >= move and estimate >= best_s:
                    continue
                ranked = (estimate, rng.random(), node, at)
                if found is None or ranked < found:
                    found = ranked
        return None if found is None else (found[2], found[3])

    def _directly_before(self, first: int, second: int) -> bool:
        return any(task == first for task, _ in self._before[second])

    def _estimate(self, times: _Times, first: int, second: int) -> float:
        """The longest path through the two once they are exchanged."""
        seconds, head, tail = self._graph.seconds, times.head, times.tail
        ahead, behind = self._node_before[first], self._node_after[second]
        start = head[ahead] + seconds[ahead] if ahead >= 0 else 0.0
        for task, delay in self._before[second]:
            start = max(start, head[task] + seconds[task] + delay)
        later = start + seconds[second]
        for task, delay in self._before[first]:
            later = max(later, head[task] + seconds[task] + delay)
        end = seconds[behind] + tail[behind] if behind >= 0 else 0.0
        for task, delay in self._after[first]:
            end = max(end, delay + seconds[task] + tail[task])
        earlier_end = seconds[first] + end
        for task, delay in self._after[second]:
            earlier_end = max(earlier_end, delay + seconds[task] + tail[task])
        return max(later + seconds[first] + end, start + seconds[second] + earlier_end)

    def _memory_allows(self, node: int, order: Sequence[int], at: int) -> bool:
        """Whether the node's memory suffices when the task at `at` and the next are exchanged.

        Only an exchange that takes before it gives can exceed a limit.
        """
        if self._memory_max is None:
            return True
        taken, given = self._graph.memory_start, self._graph.memory_end
        if not taken[order[at + 1]]:
            return True
        held = sum(taken[task] + given[task] for task in order[:at])
        return held + taken[order[at + 1]] <= self._memory_max[node] + 1e-9 and (
            held + taken[order[at + 1]] + given[order[at + 1]] + taken[order[at]] <= self._memory_max[node] + 1e-9
        )

    def _shake(self, orders: list[list[int]], rng: random.Random) -> None:
        """A few random feasible exchanges, undone when they deadlock."""
        for _ in range(4 + rng.randrange(8)):
            node = rng.randrange(len(orders))
            order = orders[node]
            if len(order) < 2:
                continue
            at = rng.randrange(len(order) - 1)
            first, second = order[at], order[at + 1]
            if self._kind[first] == self._kind[second] or self._directly_before(first, second):
                continue
            if not self._memory_allows(node, order, at):
                continue
            order[at], order[at + 1] = second, first
            if self._evaluate(orders) is None:
                order[at], order[at + 1] = first, second
