"""Lower bounds on the cost of any placement and of any arrangement, from what no stage can avoid."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from coordinator.planning.placement.problem import World
from protocol.schedule.profile import Floats

GAPS_MAX = 16
"""How many lengths `arrangement_bound` tries as the border between short and long hops: each costs milliseconds."""


def lower_bound(world: World, stages: int | None = None) -> float:
    """No placement (with `stages` stages, if given) costs less than this.

    Every stage has at least two servers that send to each other and, with two stages or more, at least one
    hop; and since stage k takes at least hop + transfer + tokens x layers_k / power_k, adding up layers_k
    over all stages gives layers <= (T - hop - transfer) x power / tokens.
    """
    counts = range(world.stages_min, world.stages_max + 1) if stages is None else (stages,)
    power = float(world.server_power.sum() + world.volunteer_power.sum())
    work = world.tokens * world.layers / power
    best = math.inf
    off = ~np.eye(world.servers, dtype=bool)
    for count in counts:
        lightest = float(np.sort(world.server_power)[: 2 * (count - 1)].sum())
        per_power = world.tokens / (power - lightest)  # tokens per power of a member of the most powerful stage
        n = per_power * world.server_power
        reach = np.where(off, world.server_latency_s + n[:, None] * world.server_slowness, math.inf)
        transfer = float(np.sort(reach.min(axis=1))[1])  # two servers at least, so the second least
        hop = 0.0
        if count > 1:
            # x senders and y receivers share a piece of 1/max(x, y); neither side has more than this many.
            piece = world.tokens / (world.servers - 2 * count + 1)
            hop = float(np.where(off, world.server_latency_s + piece * world.server_slowness, math.inf).min())
            hop *= 2 if world.closed else 1
        share = min(world.visit_shares(count))
        best = min(best, world.microbatches * share * (transfer + hop + work))
    return best


def arrangement_bound(hop_s: Floats, exchange_s: Floats, stages: int, closed: bool = False) -> float:
    """No arrangement of all nodes into `stages` equal stages costs less (`arrange.arrange`).

    `hop_s[i, j]` is one activation and `exchange_s[i, j]` twice one share of gradients from i to j, both symmetric,
    (n, n). Whatever length u is called short: a pipeline with j hops longer than u falls apart into runs of stages
    joined by short hops, and along a run every stage has equally many nodes of each cluster that short hops connect,
    because they match the nodes one to one. So few long hops force a long run, a long run spreads every cluster
    thinly over its stages, and their members exchange over long links. The least over j is a bound, and every u
    gives one.
    """
    count = len(hop_s)
    size = count // stages
    if size * stages != count or count < 2:
        raise ValueError(f"{count} nodes do not make {stages} equal stages")
    off = ~np.eye(count, dtype=bool)
    nearest = np.where(off, hop_s, math.inf).min(axis=1)
    # A stage's hops cost at least the longest of its members' nearest; on a line all stages but one have a hop of
    # their own, and sorting the nodes into stages makes the sum of those maxima as small as it can be.
    longest = np.sort(nearest)[size - 1 :: size]
    hops = (stages if closed and stages > 1 else stages - 1) if stages > 1 else 0
    base = float(longest.sum()) if hops == stages else float(longest[1:].sum())
    free = _exchange_at_least(exchange_s, np.array([size]), size, np.zeros(count, dtype=np.int64))
    best = 2 * base + float(free.max())
    for short, longer in _widest_gaps(hop_s):
        _, cluster = connected_components(csr_matrix((hop_s <= short * (1 + 1e-9)) & off), directed=False)
        members = np.bincount(cluster)
        least = math.inf
        for long_hops in range(hops + 1):
            runs = max(1, long_hops if closed else long_hops + 1)
            pipeline = max(base, long_hops * float(longer) + (hops - long_hops) * float(nearest.min()))
            if runs == 1:
                if (members % stages).any():
                    continue
                exchange = float(_exchange_at_least(exchange_s, members // stages, size, cluster).max())
            else:
                thin = _exchange_at_least(exchange_s, members // -(-stages // runs), size, cluster)
                exchange = max(float(thin.min()), float(free.max()))
            least = min(least, 2 * pipeline + exchange)
        best = max(best, least)
    return best


def _widest_gaps(hop_s: Floats) -> list[tuple[float, float]]:
    """(short, next longer) lengths between which nothing new is connected, those farthest apart first."""
    # Edges of length 0 would be no edges of a sparse graph; the shift keeps the tree the same.
    tree = minimum_spanning_tree(np.where(np.isfinite(hop_s), hop_s, 0.0) + np.isfinite(hop_s))
    joins = np.unique(tree.data) - 1.0
    gaps = sorted(pairwise(joins.tolist()), key=lambda gap: (gap[0] - gap[1], gap[0]))
    return gaps[:GAPS_MAX]


def _exchange_at_least(exchange_s: Floats, most: np.ndarray, size: int, cluster: np.ndarray) -> Floats:
    """The least that each node pays in a stage of `size` with at most `most[c]` nodes of cluster c, itself one."""
    count = len(exchange_s)
    groups = [np.flatnonzero(cluster == name) for name in range(len(most))]
    found = np.full(count, math.inf)
    for node in range(count):
        pool = []
        for name, group in enumerate(groups):
            own = cluster[node] == name
            pool.append(np.sort(exchange_s[node, group[group != node]])[: max(0, int(most[name]) - own)])
        cheapest = np.sort(np.concatenate(pool))[: size - 1]
        if most[cluster[node]] >= 1 and len(cheapest) == size - 1:
            found[node] = float(cheapest.sum())
    return found
