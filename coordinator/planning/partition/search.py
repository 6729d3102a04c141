"""The search for cuts: AutoPipe's heuristic, a local search around what it finds, then an exact search.

AutoPipe (section III-B) starts from a balanced partition and pushes the *master stage*, which sets the pace
of the steady phase, toward the front, because what stands before it is waited for only once. Its moves find
the optimum often, not always, and know neither memory nor unequal nodes. So what it finds is improved by
moving cuts, and then all partitions are enumerated but those that `coordinator.planning.partition.bounds` rules out:
for a few stages that ends with a proof.

Everything is counted, not timed: the same input gives the same answer on every machine, unless the caller's
`out_of_time` ends it early.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from math import inf

from coordinator.planning.partition.bounds import BoundTable
from coordinator.planning.partition.costs import PartitionCosts
from coordinator.planning.partition.one_f_one_b import makespan_s, timeline

#: Stage d holds blocks edges[d] … edges[d + 1] - 1; edges[0] is 0, the last is the number of blocks.
Edges = tuple[int, ...]

#: Work of each search unless the caller says otherwise, in stage-steps: an evaluation has
#: stages · (stages + microbatches) of them and takes about 0.3 microseconds for each.
WORK_MAX = 500_000
#: Evaluations that even the largest problem gets.
EVALUATIONS_MIN = 20
#: Differences smaller than this share are rounding.
PRECISION = 1e-10


class PartitionSearch:
    """One search; `best` is the fastest partition so far and `stopped` says why it ended.

    Args:
        costs: the problem.
        rng: for the kicks of the local search.
        work_max: stage-steps after which each of the two searches ends.
        out_of_time: asked before every evaluation after the first.
    """

    def __init__(
        self,
        costs: PartitionCosts,
        rng: random.Random,
        work_max: int = WORK_MAX,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._costs = costs
        self._rng = rng
        self._out_of_time = out_of_time
        self._table = BoundTable(costs)
        self._known: dict[Edges, float] = {}
        self._evaluations_max = max(EVALUATIONS_MIN, work_max // (costs.stages * (costs.stages + costs.microbatches)))
        self.best: Edges = ()
        self.best_s = inf
        self.proven = False
        self.stopped = ""

    @property
    def lower_bound_s(self) -> float:
        """No partition is faster than this."""
        return self.best_s if self.proven else self._table.value_s

    def run(self) -> None:
        """Finds the best partition it can; `best` stays empty only when none keeps the memory limits."""
        if self._table.value_s == inf:
            self.proven, self.stopped = True, "no partition keeps the memory limits"
            return
        for search in (self._autopipe, self._local_search, self._exhaust):
            search()
            if self.best_s <= self._table.value_s * (1 + PRECISION):
                self.proven, self.stopped = True, "optimal: the bound is reached"
            if self.proven:
                return
            if self._out_of_time():
                self.stopped = "out of time"
                return
        self.stopped = "no better neighbour, and too many partitions to try them all"

    def evaluate(self, edges: Edges) -> float:
        """Makespan of a partition, inf if a stage cannot hold its blocks; remembers it, and the best."""
        known = self._known.get(edges)
        if known is not None:
            return known
        costs = self._costs
        value_s = inf
        if all(costs.fits(d, edges[d], edges[d + 1]) for d in range(costs.stages)):
            value_s = makespan_s(*costs.stage_times(edges), costs.link_s, costs.microbatches)
        self._known[edges] = value_s
        if value_s < self.best_s * (1 - PRECISION):
            self.best, self.best_s = edges, value_s
        return value_s

    # AutoPipe's heuristic.

    def _autopipe(self) -> None:
        table = BalanceTable(self._costs)
        start = table.edges(self._costs.stages, self._costs.blocks)
        self.evaluate(start)
        queue, seen = deque([start]), {start}
        limit = len(self._known) + self._evaluations_max
        while queue and len(self._known) < limit and not self._out_of_time():
            edges = queue.popleft()
            master = self._master(edges)
            relieved = self._relieve_after(edges, master)
            if relieved != edges and self.evaluate(relieved) < inf:
                edges, master = relieved, self._master(relieved)
            for candidate in _forward_shifts(edges, master, table):
                if candidate in seen or self.evaluate(candidate) == inf:
                    continue
                seen.add(candidate)
                if self._master(candidate) <= master:
                    queue.append(candidate)

    def _master(self, edges: Edges) -> int:
        costs = self._costs
        return timeline(*costs.stage_times(edges), costs.link_s, costs.microbatches).master_stage

    def _relieve_after(self, edges: Edges, master: int) -> Edges:
        """Equation 1: stages behind the master get no more work than the master's backwards take.

        Each stage behind takes as many blocks as the equation allows. It cannot always hold (with b = 2 f
        the stages behind would need a third less work than the master): then the partition stays as it is.
        """
        costs = self._costs
        allowance_s = costs.backward_s(master, edges[master], edges[master + 1])
        relieved = list(edges[: master + 2])
        spent_s = 0.0
        for d in range(master + 1, costs.stages):
            first = end = relieved[-1]
            end_max = costs.blocks - (costs.stages - 1 - d)
            while end < end_max and spent_s + costs.work_s(d, first, end + 1) <= (d - master) * allowance_s:
                end += 1
            if end == first:
                return edges
            spent_s += costs.work_s(d, first, end)
            relieved.append(end)
        return tuple(relieved) if relieved[-1] == costs.blocks else edges

    # Local search.

    def _local_search(self) -> None:
        """Descends from the best, then again and again from a kicked copy of it."""
        if self._costs.stages == 1:
            return
        limit = len(self._known) + self._evaluations_max
        self._descend(self.best, limit)
        while len(self._known) < limit and not self._out_of_time():
            before = len(self._known)
            self._descend(self._kick(self.best), limit)
            if len(self._known) == before:
                return  # every partition near the best is known

    def _descend(self, edges: Edges, limit: int) -> None:
        """Takes the best of all neighbours while that is faster."""
        value_s = self.evaluate(edges)
        while True:
            best, best_s = edges, value_s
            for candidate in _neighbours(edges):
                if len(self._known) >= limit or self._out_of_time():
                    return
                candidate_s = self.evaluate(candidate)
                if candidate_s < best_s * (1 - PRECISION):
                    best, best_s = candidate, candidate_s
            if best == edges:
                return
            edges, value_s = best, best_s

    def _kick(self, edges: Edges) -> Edges:
        """Moves a few cuts by a few blocks."""
        cuts = list(edges[1:-1])
        for _ in range(3):
            index = self._rng.randrange(len(cuts))
            low = (cuts[index - 1] if index else 0) + 1
            high = (cuts[index + 1] if index + 1 < len(cuts) else edges[-1]) - 1
            cuts[index] = min(high, max(low, cuts[index] + self._rng.choice((-3, -2, -1, 1, 2, 3))))
        return (0, *cuts, edges[-1])

    # Exact search.

    def _exhaust(self) -> None:
        """Tries every partition that the bounds do not rule out; `proven` when none was left out."""
        limit = len(self._known) + self._evaluations_max
        steps_left = self._evaluations_max * self._costs.stages
        open_ranges: list[Iterator[tuple[float, int]]] = [iter(self._table.choices[0][0])]
        edges = [0]
        while open_ranges:
            choice = next(open_ranges[-1], None)
            if choice is None:
                open_ranges.pop()
                edges.pop()
                continue
            bound_s, end = choice
            stage = len(edges)  # the stage that comes next
            if max(bound_s, self._table.of_rest_s[stage][end]) >= self.best_s * (1 - PRECISION):
                continue
            steps_left -= 1
            if steps_left < 0 or len(self._known) >= limit or self._out_of_time():
                return
            if stage == self._costs.stages:
                self.evaluate((*edges, end))
                continue
            edges.append(end)
            open_ranges.append(iter(self._table.choices[stage][end]))
        self.proven, self.stopped = True, "optimal: every other partition is tried or ruled out"


class BalanceTable:
    """AutoPipe's Algorithm 1, repaired: the least maximum of work over j stages, for every prefix of blocks.

    T[j][i] = min over k of max(T[j - 1][k], work of blocks k … i - 1 on stage j - 1), with T[0][0] = 0 and
    everything else unreachable, and k ≥ j - 1, so that no stage is empty (the published listing leaves both
    out). Ties take the largest cut, which gives the later stages, waited for twice, less work.
    """

    def __init__(self, costs: PartitionCosts) -> None:
        self._cut = [[-1] * (costs.blocks + 1) for _ in range(costs.stages + 1)]
        least = [0.0] + [inf] * costs.blocks
        for j in range(1, costs.stages + 1):
            new = [inf] * (costs.blocks + 1)
            for i in range(j, costs.blocks + 1):
                for k in range(i - 1, j - 2, -1):
                    work_s = costs.work_s(j - 1, k, i)
                    if work_s >= new[i] or not costs.fits(j - 1, k, i):
                        break  # longer ranges work longer and hold more
                    value = max(least[k], work_s)
                    if value < new[i]:
                        new[i], self._cut[j][i] = value, k
            least = new

    def edges(self, stages: int, blocks: int) -> Edges:
        """The balanced cut of the first `blocks` blocks over the first `stages` stages; () if none fits."""
        edges = [blocks]
        for j in range(stages, 0, -1):
            edges.append(self._cut[j][edges[-1]])
            if edges[-1] < 0:
                return ()
        return tuple(reversed(edges))


def _forward_shifts(edges: Edges, master: int, table: BalanceTable) -> Iterator[Edges]:
    """AutoPipe's moves: the master gives its first block to the stage before or its last to the stage after,
    with and without balancing the stages before it (or up to it) anew."""
    if master == 0 or edges[master + 1] - edges[master] < 2:
        return
    first = edges[master] + 1
    yield (*edges[:master], first, *edges[master + 1 :])
    if balanced := table.edges(master, first):
        yield (*balanced, *edges[master + 1 :])
    if master + 2 < len(edges):
        end = edges[master + 1] - 1
        yield (*edges[: master + 1], end, *edges[master + 2 :])
        if balanced := table.edges(master + 1, end):
            yield (*balanced, *edges[master + 2 :])


def _neighbours(edges: Edges) -> Iterator[Edges]:
    """Every run of neighbouring cuts shifted by one block, so that a block passes from one stage to another
    through all between, and every single cut shifted by two."""
    cuts = range(1, len(edges) - 1)
    for step in (-1, 1):
        for low in cuts:
            for high in range(low, len(edges) - 1):
                moved = tuple(edge + step if low <= d <= high else edge for d, edge in enumerate(edges))
                if moved[low - 1] < moved[low] and moved[high] < moved[high + 1]:
                    yield moved
    for step in (-2, 2):
        for d in cuts:
            if edges[d - 1] < edges[d] + step < edges[d + 1]:
                yield (*edges[:d], edges[d] + step, *edges[d + 1 :])
