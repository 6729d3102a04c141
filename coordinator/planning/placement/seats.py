"""What a plan costs whose stages have the seats that a run gives them: the cost of pools, for any course.

`pools` costs stages of consecutive blocks with any servers. A run fixes how many front and back servers a stage has,
and its course may bring a microbatch to a stage several times, or past it: chunks, closed loops, skips. Here a stage is
the sum of its visits: `ins` come over a front server, `outs` leave over a back server, and each pair of neighbours on a
route crosses a line between two stages. For a plain line through the stages both say the same (a test).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from coordinator.planning.placement.pools import NEVER_S, Capacity, Pools
from protocol.run.course import Course, course_of
from protocol.run.run import RunConfig
from protocol.schedule.profile import Floats

CACHED_MAX = 20_000
"""Paces of stages that were looked at before; each is a few hundred bytes."""


@dataclass(frozen=True)
class SeatPlan:
    """Who sits where. Servers and volunteers are numbers in the network, each counted from 0."""

    servers: tuple[tuple[int, ...], ...]
    """Of each stage in shard order: fronts first."""
    edges: tuple[int, ...]
    """The block that begins each part of the model but the first; the head's own chunk of a closed loop not counted."""
    volunteers: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StageCost:
    """Seconds of a step: what the members need, what their servers' lines need, and what most members wait for."""

    pool_s: float
    lines_s: float
    binds: str

    @property
    def pace_s(self) -> float:
        return max(self.pool_s, self.lines_s)


@dataclass(frozen=True)
class SeatCost:
    """Seconds of a step of a whole plan, and of what."""

    stages: tuple[StageCost, ...]
    hops_s: dict[tuple[int, int], float]
    """Of the slowest line between the servers of two stages."""
    crossing_s: float
    """One microbatch's way forward and backward, with nobody in the way."""
    delayed: bool

    @property
    def pace_s(self) -> float:
        return max(*(stage.pace_s for stage in self.stages), *self.hops_s.values(), 0.0)

    @property
    def step_s(self) -> float:
        """As `PoolPlan.step_s`."""
        return max(self.pace_s, self.crossing_s / 2) if self.delayed else self.pace_s + self.crossing_s

    @property
    def score(self) -> float:
        """The step, and a little of everything else, so that relief of any stage or way counts for something."""
        paces = sum(stage.pace_s for stage in self.stages) / len(self.stages)
        return self.step_s + 0.05 * paces + 0.01 * self.crossing_s

    @property
    def feasible(self) -> bool:
        return self.step_s < NEVER_S

    def reason(self) -> str:
        """What sets the pace, as a sentence without its full stop."""
        if self.delayed and self.crossing_s / 2 > self.pace_s:
            return "one microbatch's way through all stages sets the pace"
        worst = max(range(len(self.stages)), key=lambda k: self.stages[k].pace_s)
        pair = max(self.hops_s, key=lambda pair: self.hops_s[pair], default=None)
        if pair is not None and self.hops_s[pair] > self.stages[worst].pace_s:
            return f"the line between the servers of stages {pair[0]} and {pair[1]} sets the pace"
        if self.stages[worst].lines_s > self.stages[worst].pool_s:
            return f"the lines of stage {worst}'s servers set the pace"
        return f"the {self.stages[worst].binds} of stage {worst}'s members sets the pace"


class Seats:
    """The cost of plans for one run on one network. The run's number of stages is settled; its cut need not be."""

    def __init__(self, pools: Pools, config: RunConfig) -> None:
        self.pools, self.config = pools, config
        self.course: Course = course_of(config)
        self.count = config.stages.count
        self.blocks = len(pools.sizes.blocks)
        self.owners = [chunk.stage for chunk in self.course.chunks]
        self.parts = config.stages.count * config.stages.chunks
        self.shards = config.stages.front_servers + config.stages.back_servers
        routes, microbatches = self.course.routes, pools.sizes.microbatches
        self.shares = [self.course.share(chunk) for chunk in range(len(self.owners))]
        self.ins, self.outs = [0.0] * self.count, [0.0] * self.count
        """Inputs and outputs of each stage's visits in a step; of these at the beginnings and ends of routes: what a
        volunteer sends of them takes `activation_end_bytes`."""
        self.ends_in, self.ends_out = [0.0] * self.count, [0.0] * self.count
        crossings: Counter[tuple[int, int]] = Counter()
        for route in routes:
            stages = self.course.stages_of(route)
            if len(stages) > 1:
                self.ends_out[stages[0]] += microbatches / len(routes)
                self.ends_in[stages[-1]] += microbatches / len(routes)
            for source, target in pairwise(stages):
                self.outs[source] += microbatches / len(routes)
                self.ins[target] += microbatches / len(routes)
                crossings[source, target] += 1
        self.crossings = {pair: microbatches * count / len(routes) for pair, count in sorted(crossings.items())}
        """Microbatches of a step from one stage to another."""
        self.visits = [
            microbatches * sum(share for share, owner in zip(self.shares, self.owners, strict=True) if owner == k)
            for k in range(self.count)
        ]
        self._paces: dict[tuple[object, ...], StageCost] = {}
        self._capacities: dict[tuple[object, ...], Capacity] = {}

    @property
    def is_line(self) -> bool:
        """Whether every microbatch visits stage after stage, each with one range of blocks."""
        return self.course.routes == (tuple(range(self.count)),) and len(self.owners) == self.count

    def fronts(self, servers: tuple[int, ...]) -> list[int]:
        stages = self.config.stages
        return list(servers if stages.back_servers == 0 else servers[: stages.front_servers])

    def backs(self, servers: tuple[int, ...]) -> list[int]:
        stages = self.config.stages
        return list(servers if stages.back_servers == 0 else servers[stages.front_servers :])

    def ranges(self, k: int, edges: tuple[int, ...]) -> tuple[tuple[int, int, float], ...]:
        """(first block, end block, share of the microbatches) of each chunk of a stage."""
        last = self.blocks if len(self.owners) == self.parts else self.blocks - 1
        cuts = (0, *edges, last, self.blocks)
        return tuple(
            (cuts[chunk], cuts[chunk + 1], self.shares[chunk]) for chunk, owner in enumerate(self.owners) if owner == k
        )

    # ---- one stage -----------------------------------------------------------------------------------------------

    def capacity(self, k: int, servers: tuple[int, ...], edges: tuple[int, ...]) -> Capacity:
        """Of each machine, volunteers and servers, in stage k: seconds of compute, up and down per visit, and of the
        contribution and the version per step, each (machines,)."""
        ranges = self.ranges(k, edges)
        key = (k, servers, ranges)
        known = self._capacities.get(key)
        if known is None:
            if len(self._capacities) >= self.pools.capacities_max:
                self._capacities.clear()
            known = self._capacities[key] = self._capacity(k, servers, ranges)
        return known

    def _capacity(self, k: int, servers: tuple[int, ...], ranges: tuple[tuple[int, int, float], ...]) -> Capacity:
        pools, sizes = self.pools, self.pools.sizes
        whole = sum(share for _, _, share in ranges)
        compute: Floats = np.zeros(len(pools.memory))
        held: Floats = np.zeros(len(pools.memory))
        parameters = 0.0
        for first, end, share in ranges:
            compute = compute + share * pools.compute_s(first, end)
            count = float(sizes.parameters[end] - sizes.parameters[first])
            held += sizes.held_bytes * count + sizes.graphs * float(sizes.kept_bytes[end] - sizes.kept_bytes[first])
            parameters += count
        compute = np.where(pools.memory >= held, compute / max(whole, 1e-300), NEVER_S)
        visits = max(self.visits[k], 1e-300)
        ins, outs = self.ins[k] / visits, self.outs[k] / visits
        down_a = sizes.activation_down_bytes
        gradients_a, outputs_a = (each / visits for each in self.up_bytes(k))
        with np.errstate(divide="ignore", invalid="ignore"):
            up, down = (gradients_a + outputs_a) / pools.up, (ins + outs) * down_a / pools.down
            for role, share, up_a in ((self.fronts(servers), ins, gradients_a), (self.backs(servers), outs, outputs_a)):
                if share > 0:
                    up = np.maximum(up, up_a / len(role) * pools.to_s[:, role].max(axis=1))
                    down = np.maximum(down, share * down_a / len(role) * pools.from_s[role].max(axis=0))
            found = (
                compute, up, down, parameters * sizes.gradient_bytes / pools.up,
                parameters * sizes.parameter_bytes / pools.down,
            )  # fmt: skip
        return tuple(np.minimum(np.where(np.isnan(each), 0.0, each), NEVER_S) for each in found)  # type: ignore[return-value]

    def up_bytes(self, k: int) -> tuple[float, float]:
        """What volunteers of a stage send in a step: of input gradients, and of outputs."""
        sizes = self.pools.sizes
        more = (sizes.activation_end_bytes or sizes.activation_up_bytes) - sizes.activation_up_bytes
        gradients = self.ins[k] * sizes.activation_up_bytes + self.ends_in[k] * more
        return gradients, self.outs[k] * sizes.activation_up_bytes + self.ends_out[k] * more

    def rows(self, servers: tuple[int, ...], volunteers: tuple[int, ...]) -> list[int]:
        """The machines that compute for a stage."""
        rows = [self.pools.servers + v for v in volunteers]
        collocated = self.pools.sizes.collocated
        return rows + list(servers) if collocated == "always" or (collocated == "when_empty" and not rows) else rows

    def stage(self, k: int, plan: SeatPlan) -> StageCost:
        """What stage k of a plan costs."""
        servers, volunteers = plan.servers[k], plan.volunteers[k]
        key = (k, servers, volunteers, self.ranges(k, plan.edges))
        known = self._paces.get(key)
        if known is None:
            if len(self._paces) >= CACHED_MAX:
                self._paces.clear()
            rows = self.rows(servers, volunteers)
            capacity: Capacity = tuple(each[rows] for each in self.capacity(k, servers, plan.edges))  # type: ignore[assignment]
            pool_s = self.pools.pool_s(self.visits[k], capacity)
            lines_s = self._lines_s(k, servers, len(volunteers), plan.edges)
            known = StageCost(pool_s, lines_s, self.pools.binds(max(pool_s, lines_s), capacity))
            self._paces[key] = known
        return known

    def _lines_s(self, k: int, servers: tuple[int, ...], count: int, edges: tuple[int, ...]) -> float:
        """As `Pools.lines_s`: what the servers' lines carry of activations, contributions and versions; without end
        where their memory does not hold the stage."""
        pools, sizes = self.pools, self.pools.sizes
        parameters = sum(
            float(sizes.parameters[end] - sizes.parameters[first]) for first, end, _ in self.ranges(k, edges)
        )
        shard = parameters / len(servers)
        if not bool((pools.memory[list(servers)] >= sizes.server_held_bytes * shard).all()):
            return NEVER_S
        summed = max(float(count), self.visits[k] / sizes.contribution_tasks) if count else 0.0
        fronts, backs = self.fronts(servers), self.backs(servers)
        down_a, (gradients_a, outputs_a) = sizes.activation_down_bytes, self.up_bytes(k)
        worst = 0.0
        for server in servers:
            taken, given = summed * shard * sizes.gradient_bytes, count * shard * sizes.parameter_bytes
            for role, passing, up_a in ((fronts, self.ins[k], gradients_a), (backs, self.outs[k], outputs_a)):
                if server in role:
                    taken += (passing * down_a + up_a) / len(role)
                    given += passing / len(role) * 2 * down_a
            for moved, line in ((taken, float(pools.down[server])), (given, float(pools.up[server]))):
                if moved:
                    worst = max(worst, moved / line if line > 0 else NEVER_S)
        return min(worst, NEVER_S)

    # ---- whole plans ---------------------------------------------------------------------------------------------

    def cost(self, plan: SeatPlan) -> SeatCost:
        stages = tuple(self.stage(k, plan) for k in range(self.count))
        network, sizes = self.pools.network, self.pools.sizes
        crossing = 0.0
        for k in range(self.count):
            rows = self.rows(plan.servers[k], plan.volunteers[k])
            if not rows:
                crossing = NEVER_S
                break
            compute, up, down, _, _ = (each[rows] for each in self.capacity(k, plan.servers[k], plan.edges))
            front, back = self.fronts(plan.servers[k]), self.backs(plan.servers[k])
            latency = network.from_latency_s[np.ix_(front, rows)].min(axis=0)
            latency = latency + network.to_latency_s[np.ix_(rows, back)].min(axis=1)
            each = float(np.median(np.minimum(compute + up + down + 2 * latency, NEVER_S)))
            crossing += each * self.visits[k] / sizes.microbatches
        hops: dict[tuple[int, int], float] = {}
        for (source, target), count in self.crossings.items():
            back, after = self.backs(plan.servers[source]), self.fronts(plan.servers[target])
            there = self.pools.to_s[np.ix_(back, after)]
            rate_s = np.maximum(there, self.pools.to_s[np.ix_(after, back)].T)
            same = np.array(back)[:, None] == np.array(after)[None, :]
            moved = sizes.activation_down_bytes * count / (len(back) * len(after))
            hops[source, target] = min(float(np.where(same, 0.0, rate_s).max()) * moved, NEVER_S)
            delay = network.to_latency_s[np.ix_(back, after)] + sizes.activation_down_bytes * there
            delay = np.where(same, 0.0, np.minimum(delay, NEVER_S))
            crossing += 2 * float(np.median(delay)) * count / sizes.microbatches
        return SeatCost(stages, hops, min(crossing, NEVER_S), sizes.delayed)

    def compute_bound_s(self) -> float:
        """No plan of any stages of this course has a shorter step: all devices together need as long for the work."""
        forward, backward = self.pools.sizes.flops
        chunks = list(zip(self.course.chunks, self.shares, strict=True))
        work = [
            sum(share * float(part[chunk.end_block] - part[chunk.first_block]) for chunk, share in chunks)
            for part in (forward, backward)
        ]
        if any(share < 1.0 for share in self.shares):  # another cut may leave out the dearest blocks
            cheapest = min(self.shares)
            work = [cheapest * float(part[-1]) for part in (forward, backward)]
        device_s = work[0] / self.pools.forward + work[1] / self.pools.backward
        first = 0 if self.pools.sizes.collocated != "never" else self.pools.servers
        rate = float((1.0 / device_s[first:]).sum())
        return self.pools.sizes.microbatches / rate if rate > 0 else NEVER_S
