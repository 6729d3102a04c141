"""Servers that a placement leaves out as spares: where a search starts without some, and moves out and in.

A stage is as slow as its slowest link, so a server far from all others can cost more than its power brings. Whoever
is left out waits as a spare, as servers beyond the plan do in a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from coordinator.planning.placement.cost import Costs, Placement, Stage, joined
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.recipe import UNREACHABLE_S, recipe_with

NEAR = 2
"""A server counts as well linked when so many others are near: it needs one in its stage and one in the next."""
FEW_SERVERS = 12
"""Up to so many, every set that comes into question gets every number of stages, and every pair is tried alone."""
MANY_CLUSTERS, MANY_COUNTS = 4, 2
"""Beyond: so many clusters, and so many numbers of stages, those that are best with all servers."""
STARTS_MAX = 3
"""So many of the best go into the search; of many servers one, because evening them out takes long."""


def spare_servers(placement: Placement) -> tuple[int, ...]:
    """The servers that stand in no stage."""
    placed = {j for stage in placement.stages for j in stage.servers}
    return tuple(j for j in range(placement.costs.world.servers) if j not in placed)


def starts_with_spares(
    world: World, costs: Costs, counts: Sequence[int], rng: random.Random, expired: Callable[[], bool]
) -> list[Placement]:
    """The recipe on sets without the worst linked servers, for these numbers of stages (those that promise most
    first); the best few.
    """
    found: dict[tuple[Stage, ...], Placement] = {}
    if 1 in counts and world.servers <= FEW_SERVERS:
        for front, back in permutations(range(world.servers), 2):
            everybody = tuple(range(world.volunteers))
            single = [(v,) for v in everybody] if world.may_bench and world.volunteers <= FEW_SERVERS else []
            for volunteers in dict.fromkeys((everybody, (), *single) if world.may_bench else (everybody,)):
                pair = (Stage((front,), (back,), volunteers),)
                found[pair] = Placement(costs, pair)
    few = world.servers <= FEW_SERVERS
    for servers in _subsets(world, 2 * min(counts), few):
        if expired():
            break
        part = world.part(servers, range(world.volunteers))
        possible = [count for count in counts if 2 * count <= len(servers)]
        for count in possible if few else possible[:MANY_COUNTS]:
            stages = tuple(_renumbered(stage, servers) for stage in recipe_with(part, Costs(part), count, rng).stages)
            found[stages] = Placement(costs, stages)
            if world.may_bench:
                alone = tuple(Stage(stage.front, stage.back, ()) for stage in stages)
                found[alone] = Placement(costs, alone)
    return varied(sorted(found.values(), key=lambda placement: placement.score))[: STARTS_MAX if few else 1]


def varied(ranked: Sequence[Placement]) -> list[Placement]:
    """The best of each number of stages first, then the others; walks seldom find from one number to another."""
    first: dict[int, Placement] = {}
    for placement in ranked:
        first.setdefault(len(placement.stages), placement)
    return [*first.values(), *(placement for placement in ranked if first[len(placement.stages)] is not placement)]


def _renumbered(stage: Stage, servers: Sequence[int]) -> Stage:
    """A stage of a part of the world in the numbers of the whole; `servers` ascend, so roles stay sorted."""
    return Stage(tuple(servers[j] for j in stage.front), tuple(servers[j] for j in stage.back), stage.volunteers)


def _subsets(world: World, least: int, few: bool) -> list[tuple[int, ...]]:
    """Sets of at least `least` servers, each without some: the clusters of near ones, and all but the worst linked."""
    if world.servers <= max(2, least):
        return []
    delay = np.minimum(world.server_delay_s, UNREACHABLE_S)
    groups: list[list[int]] = [[j] for j in range(world.servers)]
    for one, two, *_ in linkage(squareform(delay, checks=False), "average")[:-1]:
        groups.append(sorted(groups[int(one)] + groups[int(two)]))
    clusters = sorted((group for group in groups if len(group) >= least), key=lambda group: -len(group))
    found = {tuple(group): None for group in clusters[: None if few else MANY_CLUSTERS]}
    for near in (NEAR, world.servers):
        left = list(range(world.servers))
        while len(left) > least:
            # The first column of each sorted row is the server itself.
            reach = np.sort(delay[np.ix_(left, left)], axis=1)[:, 1 : near + 1].mean(axis=1)
            left.pop(len(left) - 1 - int(reach[::-1].argmax()))
            out = world.servers - len(left)
            if few or out & (out - 1) == 0:  # of many servers 1, 2, 4, 8, … are left out
                found[tuple(left)] = None
    return list(found)


def propose_spare(placement: Placement, rng: random.Random, a: int) -> dict[int, Stage] | None:
    """A server of stage `a` becomes a spare, a spare comes in, or they change places."""
    stage = placement.stages[a]
    spares = spare_servers(placement)
    kind = rng.random()
    if not spares or kind < 0.4:
        left = without(stage, rng.choice(stage.servers))
        return None if left is None else {a: left}
    spare = rng.choice(spares)
    if kind < 0.6:
        return {a: joined(stage, spare, rng.random() < 0.5)}
    out = rng.choice(stage.servers)
    return {a: exchanged(stage, out, spare)}


def exchanged(stage: Stage, out: int, into: int) -> Stage:
    """`into` takes the role of `out`."""
    front, back = (tuple(sorted(into if j == out else j for j in side)) for side in (stage.front, stage.back))
    return Stage(front, back, stage.volunteers)


def without(stage: Stage, server: int) -> Stage | None:
    """The stage without one of its servers, or None when its role would stay empty."""
    front = tuple(j for j in stage.front if j != server)
    back = tuple(j for j in stage.back if j != server)
    return Stage(front, back, stage.volunteers) if front and back else None


def settle(placement: Placement, expired: Callable[[], bool]) -> Placement:
    """The placement after every change of one machine out, in, or for a spare that makes it better, best first."""
    world = placement.costs.world
    benches = world.may_bench and world.volunteers <= FEW_SERVERS
    while not expired():
        best = placement
        spares = spare_servers(placement)
        placed = {v for stage in placement.stages for v in stage.volunteers}
        out = [v for v in range(world.volunteers) if v not in placed]
        for k, stage in enumerate(placement.stages):
            options = [left for j in stage.servers if (left := without(stage, j)) is not None]
            options += [joined(stage, j, in_front) for j in spares for in_front in (True, False)]
            for j in spares:
                options += [exchanged(stage, i, j) for i in stage.servers]
            if benches:
                options += [
                    replace(stage, volunteers=tuple(i for i in stage.volunteers if i != v)) for v in stage.volunteers
                ]
                options += [replace(stage, volunteers=(*stage.volunteers, v)) for v in out]
            for option in options:
                tried = placement.replaced({k: option})
                if tried.score < best.score * (1 - 1e-12):
                    best = tried
        if best is placement:
            break
        placement = best
    return placement
