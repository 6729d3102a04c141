"""A lower bound on the cost of any placement, from what no stage can avoid."""

from __future__ import annotations

import math

import numpy as np

from coordinator.placement.problem import World


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
