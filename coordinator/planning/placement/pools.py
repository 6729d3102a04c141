"""What a plan costs when volunteers work as pools: the cost of the running system, not of the paper's formula.

In a run a stage's servers hand out whole microbatches to whichever volunteer asks, so nobody waits for the slowest
member: a stage's speed is the *sum* of what its members can do, each bound by its device and its own line (the hybrid
parameter-server paper's Eq. 1 and 2 cut every microbatch over all members instead; `cost` keeps that). In a step of
T seconds a member of a stage with P parameters does

    n(T) = min( T / compute,  (T - contribution) / up,  (T - version) / down )

microbatches: it uploads its outputs and input gradients for each, the stage's summed gradient at least once, and
downloads inputs, output gradients, and the stage's parameters once. The pace of a stage is the least T at which its
members together do all microbatches that visit it and at which its servers' lines carry what passes through them.
Bytes are those of the run's own wire forms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.planning.placement.cost import Stage
from protocol.base.errors import BadInputError
from protocol.run.model_spec import BlockSpec
from protocol.schedule.profile import Floats, Network

BISECTIONS = 44
"""Halvings of an interval that begins at most 2^20 wide: the pace is known to a part in 10^7."""
BISECTED = 1e-6
"""By so much a pace or a bound may be off, and one that is met may seem to be missed."""
CACHE_BYTES = 100_000_000
"""For what machines can do in stages that were looked at before: five numbers for each machine and stage."""
NEVER_S = 1e18
"""The pace of a stage that can never finish, where infinity would turn differences into no number."""
Capacity = tuple[Floats, Floats, Floats, Floats, Floats]


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """A run's model, batch and wire forms, as its members feel them.

    Attributes:
        blocks: the model's sub-layer blocks in order.
        microbatch_tokens: tokens of one microbatch.
        microbatches: of one step.
        activation_up_bytes, activation_down_bytes: one boundary's activation, or its gradient, of one microbatch, as it
            leaves a volunteer and as it reaches one.
        activation_end_bytes: what leaves a volunteer instead where a route begins, and from its end; 0: the same.
        gradient_bytes: uploaded per parameter and contribution.
        parameter_bytes: downloaded per parameter and version.
        contribution_tasks: tasks that one contribution holds at most; a step takes at least one contribution.
        held_bytes, server_held_bytes: kept per parameter by a volunteer, and by all servers of a stage together.
        value_bytes: of a value that stands from forward to backward.
        graphs: microbatches whose graphs a volunteer keeps at once.
        recompute: members keep a block's input only and run its forward again before its backward.
        delayed: a step begins while the one before it is still being summed.
        collocated: whether servers compute, as `StagesSection.collocated`.
    """

    blocks: tuple[BlockSpec, ...]
    microbatch_tokens: int
    microbatches: int
    activation_up_bytes: float
    activation_down_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    contribution_tasks: int
    held_bytes: float
    server_held_bytes: float
    value_bytes: float = 4.0
    graphs: int = 2
    boundary_values: int = 0
    recompute: bool = False
    delayed: bool = True
    collocated: Literal["when_empty", "always", "never"] = "when_empty"
    activation_end_bytes: float = 0.0

    def up_bytes(self, gradient: bool, output: bool) -> tuple[float, float]:
        """What leaves a volunteer of a microbatch in a stage of a line, which has an input gradient or an output or
        both: of each of these."""
        end = self.activation_end_bytes or self.activation_up_bytes
        each = self.activation_up_bytes if gradient and output else end
        return gradient * each, output * each

    @cached_property
    def flops(self) -> tuple[Floats, Floats]:
        """Operations of one microbatch's forward and backward in the first i blocks, each (blocks + 1,)."""
        forward = [block.forward_flops * self.microbatch_tokens for block in self.blocks]
        backward = [block.backward_flops * self.microbatch_tokens for block in self.blocks]
        if self.recompute:
            backward = [b + f for b, f in zip(backward, forward, strict=True)]
        return np.concatenate([[0.0], np.cumsum(forward)]), np.concatenate([[0.0], np.cumsum(backward)])

    @cached_property
    def parameters(self) -> Floats:
        """Parameters in the first i blocks, (blocks + 1,)."""
        return np.concatenate([[0.0], np.cumsum([float(block.parameters) for block in self.blocks])])

    @cached_property
    def kept_bytes(self) -> Floats:
        """Bytes of one microbatch's graph in the first i blocks, (blocks + 1,)."""
        kept = [
            min(block.kept_values, self.boundary_values) if self.recompute else block.kept_values
            for block in self.blocks
        ]
        return np.concatenate([[0.0], np.cumsum([self.value_bytes * self.microbatch_tokens * n for n in kept])])


@dataclass(frozen=True, kw_only=True)
class PoolStage:
    """One stage of a pool plan: its servers by role, its volunteers (by number among volunteers), its blocks."""

    front: tuple[int, ...]
    back: tuple[int, ...]
    volunteers: tuple[int, ...]
    first_block: int
    end_block: int

    @property
    def servers(self) -> tuple[int, ...]:
        return tuple(sorted({*self.front, *self.back}))

    @property
    def members(self) -> Stage:
        """Without its blocks."""
        return Stage(self.front, self.back, self.volunteers)


@dataclass(frozen=True)
class StagePace:
    """What sets the pace of one stage; seconds per step.

    `lines_s` is the least step that its servers' lines allow, `pool_s` the least that its members allow; `binds` says
    what most of its members wait for: `device`, `uplink` or `downlink`.
    """

    pace_s: float
    pool_s: float
    lines_s: float
    binds: str
    visits: float
    microbatches_of: tuple[float, ...]
    """Of a step, by volunteer, in the stage's order."""


class Pools:
    """The cost of pool plans on one network. A stage's members are its volunteers, and servers that compute."""

    def __init__(self, network: Network, sizes: PoolSizes) -> None:
        if network.servers < 2:
            raise BadInputError(f"machines: {network.servers} servers; a stage needs two, one in front and one behind")
        self.network, self.sizes = network, sizes
        self.servers = network.servers
        machines = network.machines
        self.forward = np.array([machine.forward_flops_per_s for machine in machines])
        self.backward = np.array([machine.backward_flops_per_s for machine in machines])
        self.up = np.array([machine.uplink_bytes_per_s for machine in machines], dtype=np.float64)
        self.down = np.array([machine.downlink_bytes_per_s for machine in machines], dtype=np.float64)
        self.memory = np.array([machine.memory_bytes for machine in machines], dtype=np.float64)
        with np.errstate(divide="ignore"):
            self.to_s = 1.0 / network.to_bytes_per_s
            self.from_s = 1.0 / network.from_bytes_per_s
        self._capacities: dict[tuple[tuple[int, ...], tuple[int, ...], int, int, int], Capacity] = {}
        self.capacities_max = max(64, CACHE_BYTES // (40 * len(machines)))

    # ------------------------------------------------------------------------------------------------ one member

    def compute_s(self, first: int, end: int) -> Floats:
        """Seconds of one microbatch, forward and backward, in these blocks on every machine, (machines,)."""
        forward, backward = self.sizes.flops
        return np.asarray(
            (forward[end] - forward[first]) / self.forward + (backward[end] - backward[first]) / self.backward
        )

    def fits(self, first: int, end: int) -> NDArray[np.bool_]:
        """Which machines have memory for these blocks as a volunteer has: weights, gradients, and graphs."""
        sizes = self.sizes
        held = sizes.held_bytes * (sizes.parameters[end] - sizes.parameters[first])
        kept = sizes.graphs * (sizes.kept_bytes[end] - sizes.kept_bytes[first])
        return np.asarray(self.memory >= held + kept)

    def servers_hold(self, front: Sequence[int], back: Sequence[int], first: int, end: int) -> bool:
        """Whether these servers together have memory for the stage's weights and moments, in even shards.

        Activations of an open step may go to disk, so only what stands counts.
        """
        servers = sorted({*front, *back})
        share = (
            self.sizes.server_held_bytes * (self.sizes.parameters[end] - self.sizes.parameters[first]) / len(servers)
        )
        return bool((self.memory[servers] >= share).all())

    def capacity(self, rows: NDArray[np.int64], stage: PoolStage, last_block: int) -> Capacity:
        """Of each machine of `rows` in the stage: seconds of compute, up and down per microbatch, and of the
        contribution and the version per step, each (rows,).
        """
        key = (stage.front, stage.back, stage.first_block, stage.end_block, last_block)
        known = self._capacities.get(key)
        if known is None:
            known = self._capacity(stage, last_block)
            if len(self._capacities) >= self.capacities_max:
                del self._capacities[next(iter(self._capacities))]
            self._capacities[key] = known
        compute, up, down, contribution, version = known
        return compute[rows], up[rows], down[rows], contribution[rows], version[rows]

    def _capacity(self, stage: PoolStage, last_block: int) -> Capacity:
        """The same of every machine."""
        sizes = self.sizes
        first, end = stage.first_block, stage.end_block
        parameters = float(sizes.parameters[end] - sizes.parameters[first])
        compute = np.where(self.fits(first, end), self.compute_s(first, end), NEVER_S)
        boundaries, down_a = (first > 0) + (end < last_block), sizes.activation_down_bytes
        gradient_a, output_a = sizes.up_bytes(first > 0, end < last_block)
        with np.errstate(divide="ignore", invalid="ignore"):
            up, down = (gradient_a + output_a) / self.up, boundaries * down_a / self.down
            for servers, up_a in ((list(stage.front), gradient_a), (list(stage.back), output_a)):
                if up_a:
                    up = np.maximum(up, up_a / len(servers) * self.to_s[:, servers].max(axis=1))
                    down = np.maximum(down, down_a / len(servers) * self.from_s[servers].max(axis=0))
            found = (
                compute,
                up,
                down,
                parameters * sizes.gradient_bytes / self.up,
                parameters * sizes.parameter_bytes / self.down,
            )
        # 0 / 0 is a line without bandwidth over which nothing must go: it costs nothing.
        return tuple(np.minimum(np.where(np.isnan(each), 0.0, each), NEVER_S) for each in found)  # type: ignore[return-value]

    @staticmethod
    def done(
        step_s: float, tasks: int, compute: Floats, up: Floats, down: Floats, contribution: Floats, version: Floats
    ) -> Floats:
        """Microbatches that each member does in a step of `step_s` seconds, not rounded."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            room = np.where(up > 0, (step_s - contribution) / up, np.where(step_s >= contribution, math.inf, 0.0))
            many = step_s / (up + contribution / tasks)
            down_room = np.where(down > 0, (step_s - version) / down, np.where(step_s >= version, math.inf, 0.0))
            done = np.minimum(np.minimum(step_s / np.maximum(compute, 1e-300), down_room), np.minimum(room, many))
        return np.maximum(done, 0.0)

    # ------------------------------------------------------------------------------------------------- one stage

    def members(self, stage: PoolStage) -> NDArray[np.int64]:
        """Machines that compute for the stage: its volunteers, and its servers as the run has it."""
        rows = [self.servers + v for v in stage.volunteers]
        collocated = self.sizes.collocated
        if collocated == "always" or (collocated == "when_empty" and not rows):
            rows += list(stage.servers)
        return np.array(rows, dtype=np.int64)

    def pace(self, stage: PoolStage, visits: float, last_block: int) -> StagePace:
        """What one stage takes for a step in which `visits` microbatches come through it."""
        rows = self.members(stage)
        capacity = self.capacity(rows, stage, last_block)
        lines_s = self.lines_s(stage, visits, last_block)
        if not self.servers_hold(stage.front, stage.back, stage.first_block, stage.end_block):
            lines_s = NEVER_S
        pool_s = self.pool_s(visits, capacity)
        pace_s = max(pool_s, lines_s)
        done = self.done(pace_s, self.sizes.contribution_tasks, *capacity) if pace_s < NEVER_S else np.zeros(len(rows))
        return StagePace(
            pace_s, pool_s, lines_s, self.binds(pace_s, capacity), visits, self._shares(done, visits, stage)
        )

    def _shares(self, done: Floats, visits: float, stage: PoolStage) -> tuple[float, ...]:
        """Microbatches of a step by volunteer: what each could do, scaled to what there is to do."""
        total = float(done.sum())
        scaled = done * (min(1.0, visits / total) if total > 0 else 0.0)
        return tuple(float(n) for n in scaled[: len(stage.volunteers)])

    def pool_s(self, visits: float, capacity: tuple[Floats, ...]) -> float:
        """The least step in which the members do all visits: bisection, since what they do grows with the time."""
        compute, up, down, contribution, version = capacity
        tasks = self.sizes.contribution_tasks
        if not len(compute) or visits <= 0:
            return 0.0 if visits <= 0 else NEVER_S
        alone = np.maximum(
            visits * compute,
            np.maximum(
                visits * down + version, np.maximum(visits * up + contribution, visits * (up + contribution / tasks))
            ),
        )
        high = float(alone.min())  # one of them alone would need that long
        if high >= NEVER_S:
            return NEVER_S
        low = 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if float(self.done(middle, tasks, *capacity).sum()) >= visits:
                high = middle
            else:
                low = middle
            if high - low <= 1e-7 * high:
                break
        return high

    @staticmethod
    def binds(pace_s: float, capacity: tuple[Floats, ...]) -> str:
        """What most of the members wait for at this pace."""
        compute, up, down, contribution, version = capacity
        if not len(compute) or pace_s >= NEVER_S:
            return "nobody"
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            limits = np.stack(
                [
                    pace_s / np.maximum(compute, 1e-300),
                    np.where(up > 0, (pace_s - contribution) / np.maximum(up, 1e-300), math.inf),
                    np.where(down > 0, (pace_s - version) / np.maximum(down, 1e-300), math.inf),
                ]
            )
        counts = np.bincount(limits.argmin(axis=0), minlength=3)
        return ("device", "uplink", "downlink")[int(counts.argmax())]

    def lines_s(self, stage: PoolStage, visits: float, last_block: int) -> float:
        """The least step in which the servers' lines carry what passes through them.

        Every boundary's activation goes from a back server to a front server and on to a volunteer, its gradient the
        other way round; of a stage with an input each front server carries its share of both, and of one with an output
        each back server. All of a stage's servers take in contributions and give out parameters, in even shards.
        """
        sizes = self.sizes
        down_a = sizes.activation_down_bytes
        first, end = stage.first_block, stage.end_block
        gradient_a, output_a = sizes.up_bytes(first > 0, end < last_block)
        servers = stage.servers
        parameters = float(sizes.parameters[end] - sizes.parameters[first]) / len(servers)
        count = len(stage.volunteers)
        summed = max(float(count), visits / sizes.contribution_tasks) if count else 0.0
        shard_in, shard_out = summed * parameters * sizes.gradient_bytes, count * parameters * sizes.parameter_bytes
        worst = 0.0
        for server in servers:
            taken, given = shard_in, shard_out
            for role, up_a in ((stage.front, gradient_a), (stage.back, output_a)):
                if up_a and server in role:
                    share = visits / len(role)
                    taken += share * (down_a + up_a)  # from the neighbour stage; from volunteers
                    given += share * (down_a + down_a)  # to volunteers; to the neighbour stage
            for moved, line in ((taken, self.down[server]), (given, self.up[server])):
                if moved:
                    worst = max(worst, moved / line if line > 0 else NEVER_S)
        return min(worst, NEVER_S)

    def hop_s(self, one: PoolStage, two: PoolStage, visits: float) -> float:
        """The least step in which the slowest pair of a back and a front server carries its share of a boundary."""
        back, front = np.array(one.back), np.array(two.front)
        rate_s = np.maximum(self.to_s[np.ix_(back, front)], self.to_s[np.ix_(front, back)].T)
        same = back[:, None] == front[None, :]
        return (
            float(np.where(same, 0.0, rate_s).max())
            * self.sizes.activation_down_bytes
            * visits
            / (len(back) * len(front))
        )

    def crossing_s(self, stages: Sequence[PoolStage], last_block: int) -> float:
        """Seconds of one microbatch, forward and backward through all stages, when nobody else is in the way.

        In each stage the member whose way in, work and way out together take the median time.
        """
        network, sizes = self.network, self.sizes
        total = 0.0
        for k, stage in enumerate(stages):
            rows = self.members(stage)
            if not len(rows):
                return NEVER_S
            compute, up, down, _, _ = self.capacity(rows, stage, last_block)
            front, back = np.array(stage.front), np.array(stage.back)
            latency = network.from_latency_s[np.ix_(front, rows)].min(axis=0) + network.to_latency_s[
                np.ix_(rows, back)
            ].min(axis=1)
            each = compute + up + down + 2 * latency
            total += float(np.median(np.minimum(each, NEVER_S)))
            if k + 1 < len(stages):
                after = np.array(stages[k + 1].front)
                delay = (
                    network.to_latency_s[np.ix_(back, after)]
                    + sizes.activation_down_bytes * self.to_s[np.ix_(back, after)]
                )
                total += 2 * float(np.median(np.minimum(delay, NEVER_S)))
        return min(total, NEVER_S)

    # ------------------------------------------------------------------------------------------------ whole plans

    def plan(self, stages: Sequence[PoolStage], visits: Sequence[float] | None = None) -> PoolPlan:
        """The cost of these stages in this order; `visits` microbatches come through each (if not given: all)."""
        last = len(self.sizes.blocks)
        shares = [float(self.sizes.microbatches)] * len(stages) if visits is None else list(visits)
        paces = [self.pace(stage, count, last) for stage, count in zip(stages, shares, strict=True)]
        hops = [
            self.hop_s(one, two, min(a, b))
            for one, two, a, b in zip(stages, stages[1:], shares, shares[1:], strict=False)
        ]
        return PoolPlan(self, tuple(stages), tuple(paces), tuple(hops), self.crossing_s(stages, last))


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """Stages with what they cost. `hops_s[k]` is what the lines between stages k and k + 1 take for a step."""

    pools: Pools
    stages: tuple[PoolStage, ...]
    paces: tuple[StagePace, ...]
    hops_s: tuple[float, ...]
    crossing_s: float

    @property
    def worst(self) -> int:
        """The stage that sets the pace."""
        paces = [pace.pace_s for pace in self.paces]
        return paces.index(max(paces))

    @property
    def pace_s(self) -> float:
        """Seconds between two steps as the slowest stage or hop has it."""
        return max(*(pace.pace_s for pace in self.paces), *self.hops_s, 0.0)

    @property
    def step_s(self) -> float:
        """Seconds of a step: the pace, and with delayed updates no less than half a microbatch's whole way (two steps
        are under way then); without them the pipeline fills and drains for every step.
        """
        if self.pools.sizes.delayed:
            return max(self.pace_s, self.crossing_s / 2)
        return self.pace_s + self.crossing_s

    @property
    def feasible(self) -> bool:
        return self.step_s < NEVER_S

    @property
    def score(self) -> float:
        """The step, and a twentieth of the mean pace, so that relief of any stage counts for something."""
        return self.step_s + 0.05 * sum(pace.pace_s for pace in self.paces) / len(self.paces)

    @property
    def edges(self) -> tuple[int, ...]:
        """Stage k holds blocks edges[k] to edges[k + 1] - 1."""
        return (*(stage.first_block for stage in self.stages), self.stages[-1].end_block)
