"""What a placement costs: Eq. 1 and 2 of the hybrid parameter-server paper, repaired, kept up to date under
moves.

Cost = microbatches x max over stages of (hop in + hop out + slowest member), and the slowest member is its
transfers plus a share of work that is the same for all members of a stage. So a move needs only the transfers
of the stages it touches; work and layers are a few additions per stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planning.placement.problem import World
from protocol.schedule.profile import Floats

MEAN_WEIGHT = 0.05
"""How much the mean over stages counts in a score beside the slowest stage."""


INFEASIBLE = 1e15
"""Scores of placements that cannot be are above this; the cost of such a placement is infinite."""


@dataclass(frozen=True)
class Stage:
    """Members of one stage; servers ascending in each role. The only server of a stage plays both."""

    front: tuple[int, ...]
    back: tuple[int, ...]
    volunteers: tuple[int, ...]

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.front, *self.back}))


def joined(stage: Stage, server: int, in_front: bool) -> Stage:
    """The stage with one more server; a server that has played both roles alone keeps the other one."""
    front, back = stage.front, stage.back
    if front == back:
        front, back = ((), back) if in_front else (front, ())
    if in_front:
        return Stage(tuple(sorted((*front, server))), back, stage.volunteers)
    return Stage(front, tuple(sorted((*back, server))), stage.volunteers)


@dataclass(frozen=True)
class StageCost:
    """What one stage costs per microbatch, in seconds."""

    layers: int
    power: float
    transfer_s: float
    work_s: float
    hop_in_s: float
    hop_out_s: float
    exchange_s: float
    visit_share: float
    """The share of the microbatches that visit the stage; the times are for one that does."""

    @property
    def total_s(self) -> float:
        return self.visit_share * (self.hop_in_s + self.hop_out_s + self.transfer_s + self.work_s)


def apportion(powers: Sequence[float], layers: int, most: Sequence[int]) -> list[int] | None:
    """Layers in proportion to power by largest remainder (ties to the lower stage), at least 1, at most
    `most`.

    None when `most` leaves no room for all layers. Powers 3, 5, 4 and 24 layers give 6, 10, 8.
    """
    count = len(powers)
    if count > layers or sum(most) < layers or min(most) < 1:
        return None
    total = sum(powers)
    ideal = [layers * power / total for power in powers]
    given = [min(max(int(share + 1e-9), 1), cap) for share, cap in zip(ideal, most, strict=True)]
    missing = layers - sum(given)
    while missing:
        step = 1 if missing > 0 else -1
        open_stages = [k for k in range(count) if (given[k] < most[k] if step > 0 else given[k] > 1)]
        if step > 0:
            best = max(open_stages, key=lambda k: (round(ideal[k] - given[k], 9), -k))
        else:
            best = min(open_stages, key=lambda k: (round(ideal[k] - given[k], 9), -k))
        given[best] += step
        missing -= step
    return given


class Costs:
    """Costs of stages and hops of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._latency = world.server_latency_s.tolist()
        self._slowness = world.server_slowness.tolist()
        self._server_power = world.server_power.tolist()

    def power(self, stage: Stage) -> float:
        servers = stage.front if stage.front == stage.back else stage.front + stage.back
        power = float(sum(self._server_power[j] for j in servers))
        if stage.volunteers:
            power += float(self.world.volunteer_power[list(stage.volunteers)].sum())
        return power

    def layers_max(self, stage: Stage) -> int:
        """What the member with the least memory holds."""
        world = self.world
        most = float(world.layers_max)
        if world.server_layers_max is not None:
            most = min(most, float(world.server_layers_max[list(stage.front + stage.back)].min()))
        if world.volunteer_layers_max is not None and stage.volunteers:
            most = min(most, float(world.volunteer_layers_max[list(stage.volunteers)].min()))
        return int(most)

    def transfer_s(self, stage: Stage, power: float) -> float:
        """The longest transfers of a member: activations in, outputs out, each to its nearest server."""
        world = self.world
        per_power = world.tokens / power
        worst = 0.0
        for mine, others in ((stage.front, stage.back), (stage.back, stage.front)):
            for j in mine:
                n = per_power * self._server_power[j]
                latency, slowness = self._latency[j], self._slowness[j]
                if j not in others:
                    worst = max(worst, min(latency[other] + n * slowness[other] for other in others))
        if not stage.volunteers:
            return worst
        rows = np.array(stage.volunteers)
        n = per_power * world.volunteer_power[rows]
        into = self._nearest(world.front_latency_s, world.front_slowness, rows, stage.front, n)
        out = self._nearest(world.back_latency_s, world.back_slowness, rows, stage.back, n)
        worst = max(worst, float((into[0] + out[0]).max()))
        if world.traffic is not None:  # a server cannot send to all its volunteers faster than its uplink
            up = np.bincount(into[1], n, len(stage.front)) * world.traffic.server_up[list(stage.front)]
            down = np.bincount(out[1], n, len(stage.back)) * world.traffic.server_down[list(stage.back)]
            worst = max(worst, float(up.max()), float(down.max()))
        return worst

    def member_s(self, stage: Stage, power: float) -> Floats:
        """Seconds of transfers of each volunteer of the stage, in its order."""
        rows = np.array(stage.volunteers, dtype=np.int64)
        n = self.world.tokens / power * self.world.volunteer_power[rows]
        world = self.world
        into = self._nearest(world.front_latency_s, world.front_slowness, rows, stage.front, n)
        out = self._nearest(world.back_latency_s, world.back_slowness, rows, stage.back, n)
        return np.asarray(into[0] + out[0])

    @staticmethod
    def _nearest(
        latency: Floats, slowness: Floats, rows: np.ndarray, servers: tuple[int, ...], n: Floats
    ) -> tuple[Floats, np.ndarray]:
        """For each volunteer of `rows` the least latency + n x slowness over `servers`, and which it is."""
        if len(servers) == 1:
            column = servers[0]
            return latency[rows, column] + n * slowness[rows, column], np.zeros(len(rows), dtype=np.int64)
        at = np.ix_(rows, np.array(servers))
        delay = latency[at] + n[:, None] * slowness[at]
        best = delay.argmin(axis=1)
        return delay[np.arange(len(rows)), best], best

    def hop_s(self, back: tuple[int, ...], front: tuple[int, ...]) -> float:
        """A microbatch from `back` servers to `front` servers, cut evenly over both by sample range."""
        tokens = self.world.tokens
        x, y = len(back), len(front)
        worst = 0.0
        i = j = 0
        while i < x and j < y:  # overlap of [i/x, (i+1)/x) with [j/y, (j+1)/y)
            low, high = max(i * y, j * x), min((i + 1) * y, (j + 1) * x)
            if back[i] != front[j]:
                cost = self._latency[back[i]][front[j]]
                cost += tokens * (high - low) / (x * y) * self._slowness[back[i]][front[j]]
                worst = max(worst, cost)
            if (i + 1) * y <= (j + 1) * x:
                i += 1
                j += i * y == (j + 1) * x
            else:
                j += 1
        return worst

    def exchange_s(self, stage: Stage) -> float:
        """Seconds per step and layer for the gradients of a stage up to its servers and the parameters down again."""
        traffic = self.world.traffic
        if traffic is None:
            return 0.0
        rows, servers = list(stage.volunteers), list(stage.servers)
        members = len(rows) + len(servers)
        shard = traffic.gradient_tokens / len(servers)
        worst = float((traffic.server_up[servers] + traffic.server_down[servers]).max()) * shard * (members - 1)
        if rows:
            slowest = float((traffic.volunteer_up[rows] + traffic.volunteer_down[rows]).max())
            worst = max(worst, slowest * traffic.gradient_tokens)
        return worst


class Placement:
    """Stages in pipeline order with their costs; `replaced` tells what changing some stages would cost.

    With `fixed` layers each stage keeps those, whatever its power: in a run, moving layers moves their state.
    """

    def __init__(self, costs: Costs, stages: Sequence[Stage], fixed: Sequence[int] | None = None) -> None:
        self.costs = costs
        self.fixed = list(fixed) if fixed is not None else None
        self.stages = list(stages)
        self.power = [costs.power(stage) for stage in stages]
        self.most = [costs.layers_max(stage) for stage in stages]
        self.transfer = [costs.transfer_s(s, power) for s, power in zip(stages, self.power, strict=True)]
        self.exchange = [costs.exchange_s(stage) for stage in stages]
        count = len(self.stages)
        self.hops = [self._hop(k, self.stages) for k in range(count)]
        self.cost_s, self.score = self._total()

    def _hop(self, k: int, stages: Sequence[Stage]) -> float:
        """From stage k to the next one; 0 after the last of an open line."""
        count = len(stages)
        if count == 1 or (k == count - 1 and not self.costs.world.closed):
            return 0.0
        return self.costs.hop_s(stages[k].back, stages[(k + 1) % count].front)

    def _total(self) -> tuple[float, float]:
        """The cost, and a score that also falls when stages other than the worst get better."""
        world, power, hops = self.costs.world, self.power, self.hops
        layers = self._layers(power, self.most)
        self.worst = 0
        """The stage that sets the pace."""
        if layers is None:
            return math.inf, INFEASIBLE * (2 + self._missing(power, self.most))
        count = len(layers)
        totals = [hops[k - 1] + hops[k] + self.transfer[k] + world.tokens * layers[k] / power[k] for k in range(count)]
        if world.skip_stages:
            totals = [share * total for share, total in zip(world.visit_shares(count), totals, strict=True)]
        worst = max(totals)
        self.worst = totals.index(worst)
        if not math.isfinite(worst):
            return math.inf, INFEASIBLE * (1 + sum(not math.isfinite(total) for total in totals) / len(totals))
        cost = world.microbatches * worst
        alone = [world.microbatches * total for total in totals]
        if world.traffic is not None:
            exchange = [each * n for each, n in zip(self.exchange, layers, strict=True)]
            if world.traffic.delayed:
                cost = max(cost, *exchange)
                alone = [max(pair) for pair in zip(alone, exchange, strict=True)]
            else:
                cost += max(exchange)
                alone = [sum(pair) for pair in zip(alone, exchange, strict=True)]
        return cost, cost + MEAN_WEIGHT * sum(alone) / len(alone)

    def replaced(self, changes: dict[int, Stage]) -> Placement:
        """The placement with some stages exchanged for others; only what they touch is computed again."""
        new = Placement.__new__(Placement)
        new.costs, new.fixed = self.costs, self.fixed
        new.stages, new.power, new.most = list(self.stages), list(self.power), list(self.most)
        new.transfer, new.hops, new.exchange = list(self.transfer), list(self.hops), list(self.exchange)
        count = len(new.stages)
        for k, stage in changes.items():
            new.stages[k] = stage
            new.power[k] = self.costs.power(stage)
            new.most[k] = self.costs.layers_max(stage)
            new.transfer[k] = self.costs.transfer_s(stage, new.power[k])
            new.exchange[k] = self.costs.exchange_s(stage)
        for k in sorted({place % count for changed in changes for place in (changed - 1, changed)}):
            new.hops[k] = new._hop(k, new.stages)
        new.cost_s, new.score = new._total()
        return new

    def _layers(self, power: Sequence[float], most: Sequence[int]) -> list[int] | None:
        if self.fixed is not None:
            return self.fixed if all(n <= cap for n, cap in zip(self.fixed, most, strict=True)) else None
        world = self.costs.world
        if world.skip_stages:  # a stage that is skipped more often can hold more layers for its power
            shares = world.visit_shares(len(power))
            power = [own / max(share, 1e-9) for own, share in zip(power, shares, strict=True)]
        if not world.strict_layers:
            return apportion(power, world.layers, most)
        layers = apportion(power, world.layers, [world.layers] * len(power))
        if layers is None or any(given > cap for given, cap in zip(layers, most, strict=True)):
            return None
        return layers

    def _missing(self, power: Sequence[float], most: Sequence[int]) -> float:
        """How many layers find no place, so that a search that starts without a solution knows its way."""
        world = self.costs.world
        homeless = sum(cap < 1 for cap in most)
        if self.fixed is not None:
            return homeless + sum(max(0, n - cap) for n, cap in zip(self.fixed, most, strict=True))
        if world.strict_layers:
            total = sum(power)
            wanted = [world.layers * own / total for own in power]
            return homeless + sum(max(0.0, w - cap) for w, cap in zip(wanted, most, strict=True))
        return homeless + max(0, world.layers - sum(most))

    def layers(self) -> list[int]:
        """Layers of each stage. The placement must be feasible (finite cost)."""
        layers = self._layers(self.power, self.most)
        assert layers is not None
        return layers

    def detail(self) -> list[StageCost]:
        """What each stage costs."""
        world = self.costs.world
        return [
            StageCost(
                layers=layers,
                power=self.power[k],
                transfer_s=self.transfer[k],
                work_s=world.tokens * layers / self.power[k],
                hop_in_s=self.hops[k - 1],
                hop_out_s=self.hops[k],
                exchange_s=self.exchange[k] * layers,
                visit_share=world.visit_shares(len(self.stages))[k],
            )
            for k, layers in enumerate(self.layers())
        ]
