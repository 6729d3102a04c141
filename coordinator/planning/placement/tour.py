"""The order of stages: the cheapest tour through a coarse graph, open or closed.

Held and Karp's dynamic programme is exact up to `EXACT_MAX` stages; beyond, simulated annealing with
reversals and moves of a piece, from the best greedy tour.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np

from protocol.schedule.profile import Floats

EXACT_MAX = 13
ANNEAL_ROUNDS_PER_STAGE = 2_000


def tour_cost(cost: Sequence[Sequence[float]] | Floats, tour: Sequence[int], closed: bool = False) -> float:
    """Sum of `cost` along the tour, and back to its start when `closed`."""
    total = sum(float(cost[a][b]) for a, b in itertools.pairwise(tour))
    if closed and len(tour) > 1:
        total += float(cost[tour[-1]][tour[0]])
    return total


def best_tour(cost: Floats, closed: bool, rng: random.Random, start: int | None = None) -> list[int]:
    """The cheapest order of all rows of `cost` (n, n); begins with `start` when one is given."""
    count = len(cost)
    if count <= 1:
        return list(range(count))
    if count <= EXACT_MAX:
        return held_karp(cost, closed, start)
    return _annealed(cost, closed, rng, start)


def held_karp(cost: Floats, closed: bool = False, start: int | None = None) -> list[int]:
    """The exact cheapest tour; a closed one begins with `start` or with 0."""
    count = len(cost)
    size = 1 << count
    if closed and start is None:
        start = 0
    reach = np.full((size, count), math.inf)
    origin = np.zeros((size, count), dtype=np.int64)
    for first in range(count) if start is None else (start,):
        reach[1 << first, first] = 0.0
    for mask in range(1, size):
        row = reach[mask]
        if not np.isfinite(row).any():
            continue
        step = row[:, None] + cost
        best = step.argmin(axis=0)
        value = step[best, np.arange(count)]
        for node in range(count):
            longer = mask | 1 << node
            if longer != mask and value[node] < reach[longer, node]:
                reach[longer, node] = value[node]
                origin[longer, node] = best[node]
    final = reach[size - 1] + (cost[:, start] if closed else 0.0)
    node = int(np.argmin(final))
    mask = size - 1
    tour = [node]
    while mask & (mask - 1):
        before = int(origin[mask, node])
        mask ^= 1 << node
        node = before
        tour.append(node)
    return tour[::-1]


def _annealed(cost: Floats, closed: bool, rng: random.Random, start: int | None) -> list[int]:
    count = len(cost)
    best: list[int] = []
    for first in range(count) if start is None else (start,):
        tour = [first]
        left = [node for node in range(count) if node != first]
        while left:
            here = tour[-1]
            node = min(left, key=lambda other: (float(cost[here][other]), other))
            left.remove(node)
            tour.append(node)
        if not best or tour_cost(cost, tour, closed) < tour_cost(cost, best, closed):
            best = tour
    rows = cost.tolist()
    current, value = list(best), tour_cost(rows, best, closed)
    best_value = value
    low = 0 if start is None else 1
    rounds = min(ANNEAL_ROUNDS_PER_STAGE * count, 100_000)
    scale = max(value / count, 1e-12)
    for number in range(rounds):
        a, b = sorted((rng.randrange(low, count), rng.randrange(low, count)))
        if a == b:
            continue
        if rng.random() < 0.5:
            tried = current[:a] + current[a : b + 1][::-1] + current[b + 1 :]
        else:
            tried = current[:a] + current[a + 1 : b + 1] + [current[a]] + current[b + 1 :]
        cost_s = tour_cost(rows, tried, closed)
        heat = scale * 0.3 * (0.003 ** (number / rounds))
        if cost_s <= value or rng.random() < math.exp((value - cost_s) / heat):
            current, value = tried, cost_s
            if value < best_value:
                best, best_value = list(current), value
    return best
