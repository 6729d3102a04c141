"""A whole plan for a run on a measured network: stages, servers, blocks, volunteers, and what they cost whom.

The search (`pool_search`) decides all of it under the cost of pools; what is printed and drawn is computed from that
plan alone. Routes, where a run skips stages, are searched on the plan's members; in a run they name stages only, and
the pools choose who computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from coordinator.planning.placement.advice import Advice, advised
from coordinator.planning.placement.cost import Costs as PlacementCosts
from coordinator.planning.placement.cost import Placement
from coordinator.planning.placement.pool_bound import pool_bound
from coordinator.planning.placement.pool_search import PROVED, PoolAnswer, Roles, search_pools
from coordinator.planning.placement.pools import BISECTED, PoolPlan, Pools, PoolSizes
from coordinator.planning.placement.recipe import recipe_with
from coordinator.planning.placement.run_sizes import passed_bytes, pool_sizes, vocabulary_of, wire_bytes
from coordinator.planning.placement.swarm import ModelSizes, SwarmRoutes, member_model, world_of
from coordinator.planning.placement.uplinks import swarm_sharing
from coordinator.planning.routes.search import RoutesAnswer, search_routes, search_shared
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network as SimulatedNetwork
from coordinator.planning.simulator.pipeline import Timeline
from protocol.base.errors import BadInputError
from protocol.run.memory import device_parameter_bytes, server_parameter_bytes
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import RunConfig
from protocol.schedule.check import check_bound
from protocol.schedule.profile import Network

ROUTED_MEMBERS_MAX = 4_000
SIMULATED_MICROBATCHES_MAX = 64
SKIP_DENOMINATOR_MAX = 64


@dataclass(frozen=True)
class VolunteerLoad:
    """What taking part means for one volunteer: where, device memory, and traffic of an hour."""

    name: str
    stage: int
    memory_bytes: float
    up_gb_per_hour: float
    down_gb_per_hour: float


@dataclass(frozen=True)
class RunPlan:
    """The answer of `plan run`. Blocks of stage k are edges[k] up to edges[k + 1] - 1; times in seconds."""

    network: Network
    sizes: PoolSizes
    found: PoolAnswer
    timeline: Timeline
    simulated_microbatches: int
    skip_stages: int
    routed: SwarmRoutes | None
    routes: RoutesAnswer | None
    placement: Placement | None
    shared_uplinks: bool
    loads: tuple[VolunteerLoad, ...]
    advice: tuple[Advice, ...]
    steps: int

    @property
    def plan(self) -> PoolPlan:
        return self.found.plan

    @property
    def step_s(self) -> float:
        return self.found.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.sizes.microbatches * self.sizes.microbatch_tokens / self.step_s

    @property
    def finish_s(self) -> float:
        return self.steps * self.step_s


def sizes_of(config: RunConfig, recompute: bool = False) -> ModelSizes:
    """A run's model per layer: the two halves of a transformer layer together; the head counts as spread
    evenly.

    With `recompute` a member keeps only each half's input and runs its forward again before the backward.
    """
    spec = ModelSpec.of_run(config.model, vocabulary_of(config.data.tokenizer))
    blocks = blocks_of(spec)
    layers = spec.layers
    gradient_bytes = wire_bytes(config)[2]
    parameters = sum(block.parameters for block in blocks) / layers
    forward_flops = sum(block.forward_flops for block in blocks) / layers
    backward_flops = sum(block.backward_flops for block in blocks) / layers
    kept_values = sum(block.kept_values for block in blocks) / layers
    if recompute:
        backward_flops += forward_flops
        kept_values = 2.0 * spec.boundary_values
    return ModelSizes(
        layers=layers,
        microbatch_tokens=config.batch.samples * config.model.context,
        microbatches=config.batch.microbatches,
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        held_bytes=device_parameter_bytes(config) * parameters,
        server_held_bytes=server_parameter_bytes(config) * parameters,
        kept_bytes=4.0 * kept_values,
        activation_bytes=passed_bytes(config) * spec.boundary_values,
        gradient_bytes=gradient_bytes * parameters,
        delayed=config.batch.delay == 1,
    )


def skipped_stages(stages: int, skip: Fraction) -> int | None:
    """How many of `stages` a microbatch skips, or None: no whole number, or nothing left beside stage 0."""
    skipped = stages * skip
    return int(skipped) if skipped.denominator == 1 and skipped <= max(0, stages - 2) else None


def plan_run(
    config: RunConfig,
    network: Network,
    *,
    skip: Fraction = Fraction(0),
    stages: int | None = None,
    seed: int = 0,
    budget_s: float = 8.0,
    shared_uplinks: bool = False,
) -> RunPlan:
    """The plan of a run; members recompute forwards only when nothing fits otherwise.

    With `shared_uplinks` parallel transfers of a machine share its lines in the search of routes and in their times.

    Raises `BadInputError` saying what is missing when there is no plan.
    """
    if not 0 <= skip < 1 or skip.denominator > SKIP_DENOMINATOR_MAX:
        raise BadInputError(f"--skip: {float(skip):g} is not a share below 1 like 0.25 or 1/3")
    pools = Pools(network, pool_sizes(config))
    try:
        found, skip_stages = _placed(pools, config, skip, stages, seed, 0.5 * budget_s)
    except BadInputError as error:  # perhaps only for lack of memory
        pools = Pools(network, pool_sizes(config, recompute=True))
        try:
            found, skip_stages = _placed(pools, config, skip, stages, seed, 0.5 * budget_s)
        except BadInputError:
            raise error from None
    plan = found.plan
    routed = routes = placement = None
    members = sum(len(stage.volunteers) + len(stage.servers) for stage in plan.stages)
    if skip_stages and members <= ROUTED_MEMBERS_MAX:
        world = world_of(network, sizes_of(config, pools.sizes.recompute), closed=True)
        placement = Placement(PlacementCosts(world), [stage.members for stage in plan.stages], _layers(plan))
        routed = member_model(world, placement, skip_stages=skip_stages)
        if shared_uplinks:
            routes = search_shared(routed.model, swarm_sharing(placement, routed), seed, 0.3 * budget_s)
        else:
            routes = search_routes(routed.model, seed, 0.3 * budget_s)
    timeline, simulated = simulated_plan(plan)
    return RunPlan(
        network,
        pools.sizes,
        found,
        timeline,
        simulated,
        skip_stages,
        routed,
        routes,
        placement,
        shared_uplinks,
        tuple(_loads(plan)),
        advised(config, pools, plan, 0.2 * budget_s, _shares_of(skip)),
        config.steps,
    )


def _shares_of(skip: Fraction) -> Callable[[int], Sequence[float]]:
    """The share of the microbatches that visit each of so many stages: all of them stage 0, fewer the others."""

    def shares(count: int) -> Sequence[float]:
        skipped = skipped_stages(count, skip) or 0
        if not skipped:
            return [1.0] * count
        return [1.0, *[(count - 1 - skipped) / (count - 1)] * (count - 1)]

    return shares


def _placed(
    pools: Pools, config: RunConfig, skip: Fraction, stages: int | None, seed: int, budget_s: float
) -> tuple[PoolAnswer, int]:
    """The plan and how many stages each microbatch skips."""
    most = min(pools.servers // 2, len(pools.sizes.blocks))
    clusters = _clusters(pools, config, seed, closed=skip > 0)
    if not skip:
        answer = search_pools(pools, seed, budget_s, stages=stages, even_stages=config.stages.count, clusters=clusters)
        return answer, 0
    counts = range(1, most + 1) if stages is None else (stages,)
    possible = [(count, skipped) for count in counts if (skipped := skipped_stages(count, skip))]
    if not possible:
        raise BadInputError(
            f"--skip: {float(skip):g} of the stages is no whole number for any count that {pools.servers} servers "
            f"and {len(pools.sizes.blocks)} blocks allow (1 to {most} stages)"
        )
    best: tuple[PoolAnswer, int] | None = None
    failure: BadInputError | None = None
    for count, skipped in possible[:6]:
        share = budget_s / min(6, len(possible))
        try:
            answer = search_pools(pools, seed, share, stages=count, clusters=clusters, visit_shares=_shares_of(skip))
        except BadInputError as error:
            failure = error
            continue
        if best is None or answer.step_s < best[0].step_s:
            best = answer, skipped
    if best is None:
        assert failure is not None
        raise failure
    if stages is not None:
        return best
    # Each answer's bound is about its own number of stages; what is printed as the plan's must hold for all of them.
    answer, skipped = best
    bound_s = pool_bound(pools, [count for count, _ in possible], _shares_of(skip))
    check_bound(answer.step_s * (1 + BISECTED), bound_s)
    bound_s = min(bound_s, answer.step_s)
    stopped = answer.stopped
    if stopped == PROVED and answer.step_s > bound_s * (1 + 1e-6):
        stopped = f"proved optimal for {len(answer.plan.stages)} stages"
    return replace(answer, lower_bound_s=bound_s, stopped=stopped), skipped


def _clusters(pools: Pools, config: RunConfig, seed: int, closed: bool) -> Callable[[int], Sequence[Roles] | None]:
    """Servers by stage and role as the placement recipe groups them by nearness, or None where it finds no groups."""

    def clusters(count: int) -> Sequence[Roles] | None:
        try:
            world = world_of(pools.network, sizes_of(config, pools.sizes.recompute), closed=closed)
            world.check()
            if not world.stages_min <= count <= world.stages_max:
                return None
            found = recipe_with(world, PlacementCosts(world), count, random.Random(seed))
        except BadInputError:
            return None
        return [(stage.front, stage.back) for stage in found.stages]

    return clusters


def _layers(plan: PoolPlan) -> list[int]:
    """Whole layers of each stage, at least one, for the search of routes, which counts in layers."""
    blocks = len(plan.pools.sizes.blocks)
    layers = (blocks - 2) // 2
    ends = [max(1, round((edge - 1) * layers / (blocks - 2))) for edge in plan.edges[1:]]
    held, before = [], 0
    for end in ends:
        held.append(max(1, end - before))
        before = max(before + 1, end)
    return held


def simulated_plan(plan: PoolPlan) -> tuple[Timeline, int]:
    """One step of the plan on the event simulator, and of how many microbatches: a large step is shortened.

    A stage's pool is one node that takes as long for a microbatch as the whole pool does on average; a third of that
    is the forward, a third each half of the backward.
    """
    count = len(plan.stages)
    microbatches = min(plan.pools.sizes.microbatches, SIMULATED_MICROBATCHES_MAX)
    whole = plan.pools.sizes.microbatches
    costs = [StageCosts(*[pace.pace_s / whole / 3] * 3) for pace in plan.paces]
    links = [hop / whole for hop in plan.hops_s]
    best: Timeline | None = None
    for factor in (1, 2, 3):  # long links want more microbatches in flight
        design = Design.of(count, microbatches).order("backward")
        design = design.in_flight(lambda node, factor=factor: factor * (count - node))  # type: ignore[misc]
        timeline = design.timeline(Costs(costs), SimulatedNetwork.line(links))
        if best is None or timeline.makespan_s < best.makespan_s * 0.999:
            best = timeline
    assert best is not None
    return best, microbatches


def _loads(plan: PoolPlan) -> list[VolunteerLoad]:
    """Memory and traffic of every volunteer, in stage order."""
    pools, sizes = plan.pools, plan.pools.sizes
    blocks = len(sizes.blocks)
    loads = []
    for k, (stage, pace) in enumerate(zip(plan.stages, plan.paces, strict=True)):
        first, end = stage.first_block, stage.end_block
        parameters = float(sizes.parameters[end] - sizes.parameters[first])
        memory = sizes.held_bytes * parameters + sizes.graphs * float(sizes.kept_bytes[end] - sizes.kept_bytes[first])
        boundaries = (first > 0) + (end < blocks)
        for volunteer, done in sorted(zip(stage.volunteers, pace.microbatches_of, strict=True)):
            sums = max(1.0, done / sizes.contribution_tasks) if done else 0.0
            up = done * sum(sizes.up_bytes(first > 0, end < blocks)) + sums * parameters * sizes.gradient_bytes
            down = done * boundaries * sizes.activation_down_bytes + parameters * sizes.parameter_bytes
            per_hour = 3600 / plan.step_s / 1e9
            name = pools.network.machines[pools.servers + volunteer].name
            loads.append(VolunteerLoad(name, k, memory, up * per_hour, down * per_hour))
    return loads
