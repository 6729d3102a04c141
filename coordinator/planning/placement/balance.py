"""Evening out a large swarm in bulk: volunteers move from stages with time to spare to the one that sets the
pace.

The recipe gives each volunteer its nearest stage, so a stage in a crowded place has too many. Annealing would
move them one by one; here many go at once, those first that lose least.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from coordinator.planning.placement.cost import Placement, Stage

LARGE_VOLUNTEERS = 64
PASSES = 200


def even_out(placement: Placement, expired: Callable[[], bool]) -> Placement:
    """The placement after as many bulk moves as help; small swarms are left to the annealing."""
    world = placement.costs.world
    if world.volunteers < LARGE_VOLUNTEERS:
        return placement
    share = 0.5
    if world.may_bench:
        placement = trim(placement, expired)
    for _ in range(PASSES):
        if expired() or share < 1e-3:
            break
        better = _best_shift(placement, share)
        if better is None:
            share /= 2
        else:
            placement = better
    if world.may_bench:
        placement = trim(placement, expired)
    return placement


def _best_shift(placement: Placement, share: float) -> Placement | None:
    """A part of the volunteers of some stage moves to the slowest stage; None when no donor helps."""
    if not math.isfinite(placement.cost_s):
        return None
    slow = placement.worst
    best: Placement | None = None
    for donor, stage in enumerate(placement.stages):
        if donor == slow or len(stage.volunteers) < 2:
            continue
        changed = placement.replaced(_shift(placement, donor, slow, max(1, int(share * len(stage.volunteers) / 2))))
        if changed.score < (best or placement).score * (1 - 1e-9):
            best = changed
    return best


def _shift(placement: Placement, donor: int, slow: int, count: int) -> dict[int, Stage]:
    """The `count` volunteers of the donor that lose least by going to the slow stage."""
    costs, stages = placement.costs, placement.stages
    rows = stages[donor].volunteers
    there = Stage(stages[slow].front, stages[slow].back, rows)
    loss = costs.member_s(there, placement.power[slow]) - costs.member_s(stages[donor], placement.power[donor])
    order = np.argsort(loss, kind="stable")
    going = {rows[int(i)] for i in order[:count]}
    return {
        donor: Stage(stages[donor].front, stages[donor].back, tuple(v for v in rows if v not in going)),
        slow: Stage(
            stages[slow].front, stages[slow].back, stages[slow].volunteers + tuple(v for v in rows if v in going)
        ),
    }


def trim(placement: Placement, expired: Callable[[], bool]) -> Placement:
    """Leaves out the volunteers of each stage that cost the stage more time than their power brings.

    Volunteers are ranked by their transfers per microbatch, by their exchange of gradients, and by their
    memory; the best cut of any ranking is kept.
    """
    world = placement.costs.world
    for k in range(len(placement.stages)):
        for ranking in ("memory", "transfers", "exchange"):
            stage = placement.stages[k]
            rows = list(stage.volunteers)
            if not rows or expired():
                break
            if ranking == "transfers":
                burden = placement.costs.member_s(stage, placement.power[k])
            elif ranking == "exchange" and world.traffic is not None:
                burden = world.traffic.volunteer_up[rows] + world.traffic.volunteer_down[rows]
            elif ranking == "memory" and world.volunteer_layers_max is not None:
                burden = -world.volunteer_layers_max[rows]
            else:
                continue
            ranked = [stage.volunteers[int(i)] for i in np.argsort(burden, kind="stable")]
            size = len(ranked)
            cuts = sorted({size - round(size * part / 24) for part in range(1, 25)} | {max(size - 1, 0)})
            for cut in cuts:
                tried = placement.replaced({k: Stage(stage.front, stage.back, tuple(ranked[:cut]))})
                if tried.score < placement.score:
                    placement = tried
    return placement
