"""The hybrid parameter-server paper's recipe: cluster, order, assign roles, add volunteers (its section 3.3).

1. Servers that are near each other form a stage: average-linkage clustering, cut into p clusters; p grows
until the
   estimated time rises, then the step before is kept. Clusters of one server are filled from their
   neighbours.
2. The coarse graph (mean delay between clusters) gives the order of stages by a shortest tour.
3. Each server works in front or behind, whichever neighbour stage is nearer; a side left empty takes the
server
   least suited to the other.
4. Each volunteer joins the stage with the least mean delay.
5. Layers follow power (`cost.apportion`).

It clusters what should be spread: full activations cross between stages, not inside them. So it is only the
start of the search.
"""

from __future__ import annotations

import math
import random

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from coordinator.planning.placement.cost import Costs, Placement, Stage
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.tour import best_tour
from protocol.schedule.profile import Floats

UNREACHABLE_S = 1e6
"""Stands for the delay of a pair that cannot reach each other, so that means and clusters stay finite."""


def recipe(world: World, costs: Costs, rng: random.Random) -> list[Placement]:
    """The recipe's placement for each number of stages up to its stopping rule; the last is its choice.

    Numbers of stages that no memory allows are passed over; the rule starts at the first that is possible.
    """
    delay = np.minimum(world.server_delay_s, UNREACHABLE_S)
    tree = linkage(squareform(delay, checks=False), "average") if world.servers > 2 else None
    found: list[Placement] = []
    for count in range(world.stages_min, world.stages_max + 1):
        placement = recipe_with(world, costs, count, rng, tree, delay)
        if found and placement.cost_s > found[-1].cost_s and math.isfinite(found[-1].cost_s):
            break
        found.append(placement)
    return found


def recipe_with(
    world: World,
    costs: Costs,
    count: int,
    rng: random.Random,
    tree: Floats | None = None,
    delay: Floats | None = None,
) -> Placement:
    """The recipe with `count` stages."""
    if delay is None:
        delay = np.minimum(world.server_delay_s, UNREACHABLE_S)
    if tree is None and world.servers > 2:
        tree = linkage(squareform(delay, checks=False), "average")
    clusters = _clusters(world.servers, count, tree, delay)
    coarse = np.array([[delay[np.ix_(a, b)].mean() for b in clusters] for a in clusters])
    order = best_tour(coarse, world.closed, rng)
    ordered = [clusters[k] for k in order]
    stages = [Stage(front, back, ()) for front, back in (roles(ordered, k, delay, world.closed) for k in range(count))]
    joined = nearest_stage(world, stages)
    members: list[list[int]] = [[] for _ in stages]
    for volunteer, k in enumerate(joined):
        if k >= 0:
            members[k].append(volunteer)
    return Placement(costs, [Stage(s.front, s.back, tuple(v)) for s, v in zip(stages, members, strict=True)])


def _clusters(servers: int, count: int, tree: Floats | None, delay: Floats) -> list[list[int]]:
    """`count` clusters of near servers, each with at least two."""
    if tree is None or count == 1:
        return [list(range(servers))]
    label = fcluster(tree, count, "maxclust")
    clusters = [np.flatnonzero(label == name).tolist() for name in sorted(set(label.tolist()))]
    while len(clusters) < count:  # ties in the tree can leave fewer clusters than asked for
        largest = max(clusters, key=len)
        clusters.remove(largest)
        half = len(largest) // 2
        clusters += [largest[:half], largest[half:]]
    while min(map(len, clusters)) < 2:
        small = min(clusters, key=len)
        donors = [cluster for cluster in clusters if len(cluster) > 2]
        donor, server = min(
            ((c, j) for c in donors for j in c),
            key=lambda pair: (float(delay[small, pair[1]].mean()) if small else 0.0, pair[1]),
        )
        donor.remove(server)
        small.append(server)
    return [sorted(cluster) for cluster in clusters]


def roles(clusters: list[list[int]], k: int, delay: Floats, closed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Front and back servers of stage k: whichever neighbour stage is nearer; neither side stays empty."""
    count, members = len(clusters), clusters[k]
    before = clusters[k - 1] if (k > 0 or closed) and count > 1 else None
    after = clusters[(k + 1) % count] if (k < count - 1 or closed) and count > 1 else None

    def lean(server: int) -> float:
        """Below 0: nearer to the stage before."""
        to_before = float(delay[server, before].mean()) if before is not None else math.inf
        to_after = float(delay[server, after].mean()) if after is not None else math.inf
        if before is None and after is None:
            return 0.0
        if before is None or after is None:  # an end has one neighbour: the nearer half faces it
            mean = float(np.mean([delay[m, before if after is None else after].mean() for m in members]))
            return to_before - mean if after is None else mean - to_after
        return to_before - to_after

    ranked = sorted(members, key=lambda server: (lean(server), server))
    front = [server for server in ranked if lean(server) < 0]
    back = [server for server in ranked if lean(server) >= 0]
    if not front:
        front.append(back.pop(0))
    if not back:
        back.append(front.pop())
    return tuple(sorted(front)), tuple(sorted(back))


def nearest_stage(world: World, stages: list[Stage]) -> list[int]:
    """The stage with the least mean delay of each volunteer, -1 for one that reaches no stage."""
    if not world.volunteers:
        return []
    tokens = world.tokens / 2  # the share that a volunteer gets is not known yet
    front = world.front_latency_s + tokens * world.front_slowness
    back = world.back_latency_s + tokens * world.back_slowness
    delay = np.stack(
        [front[:, list(s.front)].mean(axis=1) + back[:, list(s.back)].mean(axis=1) for s in stages], axis=1
    )
    best = delay.argmin(axis=1)
    reachable = np.isfinite(delay[np.arange(len(best)), best])
    return [int(k) if ok else -1 for k, ok in zip(best, reachable, strict=True)]
