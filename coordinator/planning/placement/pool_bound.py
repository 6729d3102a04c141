"""A lower bound on the step of any pool plan: what no number of stages, cut, or choice of members can beat.

A stage is described by x, its share of the model's parameters, and c, its boundaries (1 at an end, 2 between). In a
step of T seconds member v does at most

    n_v(c, x) = min( T / compute_v(x),  (T - x sum_v) / (c up_v),  (T - x version_v) / (c down_v) )

microbatches there, none where x of the model does not fit its memory; compute_v(x) is what the cheapest parameters
cost, and the embedding's cost nothing. Put a price max(0, a_c + x) on a microbatch's visit to such a stage. A plan with
S stages does M visits to each, so all its visits cost at least M (2 a_1 + (S - 2) a_2 + 1), whatever the cut; and each
member earns at most the greatest max(0, a_c + x) n_v(c, x) over all stages that there could be. Where all members
together cannot earn what the visits cost, no plan with S stages has a step of T: weak duality, with prices as
multipliers. The greatest such T over the prices that were tried is the bound for S, and the least over S the bound for
all plans.

Where servers compute for stages without volunteers, the volunteers' stages may be fewer, and lack the embedding and the
parameters of as many operations as the servers' devices can do in T. Where servers always compute, only devices and the
servers' own lines are counted. Servers' lines: each boundary's activation and gradient leave one server and reach
another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planning.placement.pools import Pools
from protocol.schedule.profile import Floats

LONGEST_S = 1e12
"""A bound above this says that there is no plan."""
GRID = 160
"""Shares x between which a member's earning is bounded from above: each interval is 4.4 percent wide."""
GRID_LARGE = 48
"""The same where there are more than `MANY` volunteers."""
MANY = 2_000
LEAST_SHARE = 1e-3
STARTS = (-0.8, -0.4, 0.0, 0.5, 2.0, 8.0, 64.0)
"""Prices a_1 and a_2 that are tried first, over the mean share 1 / S; from the best on, smaller and smaller steps."""
STEPS = (0.5, 0.25, 0.12, 0.06)
WIDE = 1.02
"""A bound is sought to this factor: what is given up is less than what the grid gives up."""


@dataclass(frozen=True)
class _Members:
    """Seconds per unit of every volunteer, each (n,): the whole model's compute by its cheapest parameters, a boundary
    up and down, the whole model's sum up and version down; and the greatest share of the model that fits its memory.
    """

    compute: Floats
    up: Floats
    down: Floats
    summed: Floats
    version: Floats
    most: Floats
    free: float
    """The share of the parameters that take no operations."""

    def compute_s(self, x: Floats) -> Floats:
        """Of one microbatch, (n, shares)."""
        return np.asarray(np.maximum(self.compute[:, None] * np.maximum(x - self.free, 0.0), 1e-300))

    def done(self, step_s: float, boundaries: int, x: Floats) -> Floats:
        """Microbatches of each member at each share, (n, shares)."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            n = np.minimum(
                step_s / self.compute_s(x),
                np.minimum(
                    (step_s - self.summed[:, None] * x) / (boundaries * self.up[:, None]),
                    (step_s - self.version[:, None] * x) / (boundaries * self.down[:, None]),
                ),
            )
        return np.where(x <= self.most[:, None] * (1 + 1e-9), np.maximum(n, 0.0), 0.0)


def pool_bound(
    pools: Pools, counts: Iterable[int], visit_shares: Callable[[int], Sequence[float]] | None = None
) -> float:
    """No plan with any of these numbers of stages has a shorter step, seconds."""
    best = math.inf
    for count in counts:
        shares = list(visit_shares(count)) if visit_shares is not None else [1.0] * count
        best = min(best, _bound_of(pools, count, max(min(shares), 1e-9), best))
    return best


def _bound_of(pools: Pools, count: int, share: float, enough_s: float) -> float:
    """The bound for `count` stages; may be given up once it is above `enough_s`, which another count has."""
    sizes = pools.sizes
    volunteers = pools.network.volunteers
    forward, backward = (float(part[-1]) for part in sizes.flops)
    device_s = forward / pools.forward + backward / pools.backward
    visits = sizes.microbatches * share
    rate = float((1.0 / device_s[pools.servers :]).sum()) if volunteers else 0.0
    server_rate = float((1.0 / device_s[: pools.servers]).sum()) if sizes.collocated != "never" else 0.0
    if rate + server_rate <= 0:
        return math.inf
    least = max(visits / (rate + server_rate), _servers_s(pools, count, share))
    if not volunteers or sizes.collocated == "always" or least >= enough_s:
        return least
    members = _members(pools, device_s)
    if sizes.collocated == "never":
        return _priced(members, count, visits, lambda _: 1.0, least)

    def left(step_s: float) -> float:
        """The least share of the parameters that servers cannot take."""
        return max(0.0, 1.0 - members.free - server_rate * step_s / visits / _cheapest(pools))

    found = math.inf
    for served in range(count, 0, -1):
        # With a volunteer in every stage no server computes.
        found = min(found, _priced(members, served, visits, left if served < count else lambda _: 1.0, least))
        if found <= least:
            break
    return found


def _members(pools: Pools, device_s: Floats) -> _Members:
    sizes = pools.sizes
    rows = slice(pools.servers, None)
    parameters = float(sizes.parameters[-1])
    free = sum(block.parameters for block in sizes.blocks if not block.forward_flops) / parameters
    with np.errstate(divide="ignore"):
        most = pools.memory[rows] / max(sizes.held_bytes * parameters, 1e-300)
        return _Members(
            compute=device_s[rows] * _cheapest(pools),
            up=sizes.activation_up_bytes / pools.up[rows],
            down=sizes.activation_down_bytes / pools.down[rows],
            summed=parameters * sizes.gradient_bytes / pools.up[rows],
            version=parameters * sizes.parameter_bytes / pools.down[rows],
            most=np.minimum(most, 1.0),
            free=free,
        )


def _cheapest(pools: Pools) -> float:
    """Operations of the cheapest parameters that take any, over the mean of all parameters; at most about 1."""
    heavy = [(b.forward_flops + b.backward_flops, b.parameters) for b in pools.sizes.blocks if b.forward_flops]
    mean = sum(flops for flops, _ in heavy) / float(pools.sizes.parameters[-1])
    return min((flops / max(parameters, 1) for flops, parameters in heavy), default=mean) / mean


def _priced(members: _Members, count: int, visits: float, left: Callable[[float], float], least_s: float) -> float:
    """The greatest step for which some prices show that `count` stages are too much for the members."""
    grid = GRID if len(members.up) <= MANY else GRID_LARGE
    x = np.concatenate([[0.0], np.geomspace(LEAST_SHARE, 1.0, grid)])

    def too_much(step_s: float, end: float, middle: float) -> bool:
        if left(step_s) <= 0:
            return False
        if count == 1:
            share = np.array([left(step_s)])
            return float(_alone(members, step_s, share).sum()) < visits
        earned = np.zeros(len(members.up))
        for boundaries, price in ((1, end), (2, middle))[: 1 if count == 2 else 2]:
            done = members.done(step_s, boundaries, x)
            # Between two shares a member does at most what it does at the lower, at most at the price of the upper.
            earned = np.maximum(earned, (done[:, :-1] * np.maximum(price + x[1:], 0.0)).max(axis=1))
        return float(earned.sum()) < visits * (2 * end + (count - 2) * middle + left(step_s))

    def raised(step_s: float, end: float, middle: float) -> float:
        """The greatest step from `step_s` on that these prices rule out; `step_s` where they rule out none."""
        high = step_s * WIDE
        if not too_much(high, end, middle):
            return step_s
        while too_much(high, end, middle) and high < LONGEST_S:
            step_s, high = high, 2 * high
        while high > step_s * WIDE:
            between = math.sqrt(step_s * high)
            if too_much(between, end, middle):
                step_s = between
            else:
                high = between
        return step_s

    best, prices = least_s, (0.0, 0.0)
    middles = STARTS if count > 2 else (0.0,)
    for end, middle in [(end / count, middle / count) for middle in middles for end in STARTS]:
        if (found := raised(best, end, middle)) > best:
            best, prices = found, (end, middle)
    for step in STEPS if count > 1 else ():
        moved = True
        while moved:
            moved = False
            for end, middle in _around(*prices, step, 1 / count):
                if (found := raised(best, end, middle)) > best:
                    best, prices, moved = found, (end, middle), True
                    break
    return best


def _around(end: float, middle: float, step: float, share: float) -> list[tuple[float, float]]:
    """Prices near the given ones: each moved towards and away from the point where a mean stage is free."""
    ends = (end, (end + share) * (1 + step) - share, (end + share) / (1 + step) - share)
    middles = (middle, (middle + share) * (1 + step) - share, (middle + share) / (1 + step) - share)
    return [(one, two) for one in ends for two in middles][1:]


def _alone(members: _Members, step_s: float, x: Floats) -> Floats:
    """Microbatches of a stage without boundaries: nothing travels but its sum and its version, (n, shares)."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        n = step_s / members.compute_s(x)
        stopped = (members.summed[:, None] * x > step_s) | (members.version[:, None] * x > step_s)
    return np.where(stopped | (x > members.most[:, None] * (1 + 1e-9)), 0.0, n)


def _servers_s(pools: Pools, count: int, share: float) -> float:
    """What the servers' lines need: each boundary's activation and gradient leaves two servers and reaches two."""
    sizes = pools.sizes
    crossings = max(0, count - 1) * sizes.microbatches * share
    if sizes.collocated != "never":  # a server may compute for itself: only the way between two servers is sure
        out = taken = crossings * 2 * sizes.activation_down_bytes
    else:
        out = crossings * 4 * sizes.activation_down_bytes
        taken = crossings * 2 * (sizes.activation_down_bytes + sizes.activation_up_bytes)
    up, down = float(pools.up[: pools.servers].sum()), float(pools.down[: pools.servers].sum())
    return max(out / up if up else (math.inf if out else 0.0), taken / down if down else (math.inf if taken else 0.0))
