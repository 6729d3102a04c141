"""Which equal nodes form which stage: DT-FM's arrangement (Yuan et al. 2022), without its genetic search.

Cost = max over stages of max over members of sum over the other members of 2 (latency + gradient share /
bandwidth), plus 2 x the tour over stages, where a hop costs the bottleneck of the best matching between the
two stages. The tour is closed when the loss is computed back on stage 0. The start follows a rule that ties
the genetic search on its own test networks: pipelines stay inside a site, stages span sites; annealing by
exchanges goes on from there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.cluster.hierarchy import fcluster, leaves_list, linkage
from scipy.spatial.distance import squareform

from coordinator.planning.placement.tour import best_tour, tour_cost
from protocol.base.errors import BadInputError
from protocol.schedule.profile import Floats


@dataclass(frozen=True)
class Arrangement:
    """Nodes of each stage in pipeline order, and the two parts of the cost."""

    stages: tuple[tuple[int, ...], ...]
    data_s: float
    pipeline_s: float

    @property
    def cost_s(self) -> float:
        return self.data_s + self.pipeline_s


def bottleneck(cost: Floats) -> float:
    """The smallest largest entry of a matching of rows to columns in which everybody takes part.

    With more rows than columns (or the other way round) the fewer side is used equally often, to within one.
    """
    rows, columns = cost.shape
    if rows > columns:
        return bottleneck(cost.T)
    copies = -(-columns // rows)
    values = np.unique(np.maximum(cost, cost.min(axis=0)[None, :]))
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _matches(cost <= values[middle], copies):
            high = middle
        else:
            low = middle + 1
    return float(values[low])


def matching(cost: Floats, limit: float, copies: int) -> list[int] | None:
    """A row for every column with cost at most `limit`, each row at most `copies` times; None if there is
    none.
    """
    allowed = [np.flatnonzero(column).tolist() for column in (cost <= limit).T]
    taken: list[list[int]] = [[] for _ in range(len(cost))]

    def place(column: int, seen: set[int]) -> bool:
        for row in allowed[column]:
            if row in seen:
                continue
            seen.add(row)
            if len(taken[row]) < copies:
                taken[row].append(column)
                return True
            for other in taken[row]:
                if place(other, seen):
                    taken[row].remove(other)
                    taken[row].append(column)
                    return True
        return False

    for column in range(cost.shape[1]):
        if not place(column, set()):
            return None
    answer = [0] * cost.shape[1]
    for row, columns in enumerate(taken):
        for column in columns:
            answer[column] = row
    return answer


def _matches(allowed: np.ndarray, copies: int) -> bool:
    return matching(np.where(allowed, 0.0, 1.0), 0.5, copies) is not None


class _Cost:
    """The cost of an arrangement, with hops remembered by the two sets of nodes."""

    def __init__(self, hop_s: Floats, exchange: Callable[[int], Floats], closed: bool) -> None:
        self.hop_s = hop_s
        self.exchange = exchange
        self.closed = closed
        self._hops: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
        self._exchange: dict[int, Floats] = {}

    def data_s(self, members: Sequence[int]) -> float:
        size = len(members)
        if size < 2:
            return 0.0
        if size not in self._exchange:
            self._exchange[size] = self.exchange(size)
        there = list(members)
        block = self._exchange[size][np.ix_(there, there)]
        return float((block.sum(axis=1) - block.diagonal()).max())

    def hop(self, one: tuple[int, ...], two: tuple[int, ...]) -> float:
        key = (one, two) if one <= two else (two, one)
        found = self._hops.get(key)
        if found is None:
            if len(self._hops) > 200_000:
                self._hops.clear()
            found = self._hops[key] = bottleneck(self.hop_s[np.ix_(list(key[0]), list(key[1]))])
        return found

    def hops(self, stages: Sequence[tuple[int, ...]]) -> Floats:
        count = len(stages)
        cost = np.zeros((count, count))
        for a in range(count):
            for b in range(a):
                cost[a, b] = cost[b, a] = self.hop(stages[a], stages[b])
        return cost


def arrange(
    latency_s: Floats,
    bytes_per_s: Floats,
    sizes: Sequence[int],
    activation_bytes: float,
    gradient_bytes: float,
    seed: int = 0,
    *,
    closed: bool = False,
    start: Sequence[Sequence[int]] | None = None,
    rounds: int = 600,
    expired: Callable[[], bool] = lambda: False,
) -> Arrangement:
    """The best arrangement found of all nodes into stages of the given `sizes`, in pipeline order.

    `latency_s` and `bytes_per_s` have shape (n, n); both directions are averaged. `sizes[0]` is stage 0
    wherever its size differs from the others'. `start` is an arrangement to begin from instead of our own;
    with 0 `rounds` its cost is counted, in the best order. Raises `BadInputError` when the sizes do not add
    up to n.
    """
    count = len(latency_s)
    if sum(sizes) != count or min(sizes) < 1:
        raise BadInputError(f"sizes: {list(sizes)} must be positive and add up to {count} nodes")
    rng = random.Random(seed)
    with np.errstate(divide="ignore"):
        hop = latency_s + activation_bytes / bytes_per_s
        hop = (hop + hop.T) / 2
        np.fill_diagonal(hop, 0.0)

    def exchange(size: int) -> Floats:
        with np.errstate(divide="ignore"):
            block = 2 * (latency_s + gradient_bytes / size / bytes_per_s)
        return (block + block.T) / 2

    cost = _Cost(hop, exchange, closed)
    pinned = 0 if len(set(sizes)) > 1 else None

    def ordered(stages: Sequence[tuple[int, ...]]) -> tuple[list[int], float]:
        hops = cost.hops(stages)
        tour = best_tour(hops, closed, random.Random(seed), pinned)
        return tour, 2 * tour_cost(hops, tour, closed)

    best_stages: list[tuple[int, ...]] = []
    best = math.inf
    for stages in _starts(hop, sizes) if start is None else [[tuple(sorted(members)) for members in start]]:
        value = max(map(cost.data_s, stages)) + ordered(stages)[1]
        if value < best:
            best, best_stages = value, stages
    tour, _ = ordered(best_stages)
    current, value = [best_stages[k] for k in tour], best  # kept in pipeline order
    data = [cost.data_s(members) for members in current]
    for number in range(rounds):
        if expired() or len(current) < 2:
            break
        a, b = rng.sample(range(len(current)), 2)
        x, y = rng.choice(current[a]), rng.choice(current[b])
        tried = list(current)
        tried[a] = tuple(sorted((set(current[a]) - {x}) | {y}))
        tried[b] = tuple(sorted((set(current[b]) - {y}) | {x}))
        new_data = list(data)
        new_data[a], new_data[b] = cost.data_s(tried[a]), cost.data_s(tried[b])
        in_this_order = sum(cost.hop(one, two) for one, two in pairwise(tried))
        if closed:
            in_this_order += cost.hop(tried[-1], tried[0])
        new = max(new_data) + 2 * in_this_order
        heat = best * 0.02 * 0.02 ** (number / rounds)
        if new <= value or rng.random() < math.exp((value - new) / heat):
            tour, pipeline_s = ordered(tried)  # the exact tour only where somebody moves in
            current, data = [tried[k] for k in tour], [new_data[k] for k in tour]
            value = max(data) + pipeline_s
            if value < best:
                best, best_stages = value, list(current)
    tour, pipeline_s = ordered(best_stages)
    stages = [best_stages[k] for k in tour]
    return Arrangement(tuple(stages), max(map(cost.data_s, stages)), pipeline_s)


def _starts(hop: Floats, sizes: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Where to begin: near nodes dealt along pipelines (stages span sites), and near nodes in one stage."""
    count = len(hop)
    if count > 2:
        finite = np.where(np.isfinite(hop), hop, np.nanmax(np.where(np.isfinite(hop), hop, 0.0)) * 10 + 1)
        tree = linkage(squareform(finite, checks=False), "average", optimal_ordering=True)
        near = leaves_list(tree).tolist()
        apart = finite[~np.eye(count, dtype=bool)]
        threshold = math.sqrt(max(float(apart.min()), 1e-12) * max(float(apart.max()), 1e-12))
        label = fcluster(tree, threshold, "distance").tolist()
    else:
        near, label = list(range(count)), list(range(count))
    dealt: list[list[int]] = [[] for _ in sizes]
    room = list(sizes)
    stage = 0
    for node in near:
        while not room[stage]:
            stage = (stage + 1) % len(sizes)
        dealt[stage].append(node)
        room[stage] -= 1
        stage = (stage + 1) % len(sizes)
    blocks, first = [], 0
    for size in sizes:
        blocks.append(tuple(sorted(near[first : first + size])))
        first += size
    return [[tuple(sorted(nodes)) for nodes in dealt], _columns(near, label, sizes), blocks]


def _columns(near: Sequence[int], label: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Stage after stage takes one node of each of the sites that the stage before used, the largest sites
    first.

    So the pipelines of large sites stay together in few stages instead of lending one fast hop to each.
    """
    left: dict[int, list[int]] = {}
    for node in near:
        left.setdefault(label[node], []).append(node)
    stages: list[tuple[int, ...]] = []
    used: list[int] = []
    for size in sizes:
        members: list[int] = []
        while len(members) < size:
            fresh = sorted(left, key=lambda site: (site not in used, -len(left[site]), site))
            for site in [site for site in fresh if left[site]][: size - len(members)]:
                members.append(left[site].pop(0))
                used.append(site)
        used = [label[node] for node in members]
        stages.append(tuple(sorted(members)))
    return stages
