"""What the planners' cost says of the run that was simulated: of those who were there, and of the best assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.planning.placement.pools import PoolPlan, Pools, PoolStage
from coordinator.planning.placement.run_sizes import pool_sizes
from coordinator.world.churn import Churn
from coordinator.world.swarm import ARRIVE_S, Swarm
from protocol.run.plan import Plan

BEST_COMPUTERS_MAX = 400
"""Computers at once for which the best assignment is searched at every change: each costs a bisection of 0.2 ms."""


def predicted(swarm: Swarm) -> PoolPlan | None:
    """The cost of the plan in force with the volunteers that have a stage now; None without a plan, or where stages
    are no plain ranges of blocks (the cost of pools knows no chunks)."""
    plan = swarm.machine.placement.plan
    if plan is None or len(plan.course.chunks) != len(plan.stages):
        return None
    crews: list[list[int]] = [[] for _ in plan.stages]
    for host in swarm.volunteers.values():
        machine: Any = host.machine
        if machine is not None and 0 <= machine.stage < len(crews):
            crews[machine.stage].append(host.place - swarm.network.servers)
    return _pools(swarm, plan).plan(_stages(swarm, plan, crews), _visits(swarm, plan))


def best_steps(swarm: Swarm, churn: Churn, until_s: float) -> float | None:
    """Steps that the best assignment of those who are there at every moment would have made, without any change
    costing anything; None where `predicted` knows nothing, or too many are there."""
    plan = swarm.machine.placement.plan
    if plan is None or len(plan.course.chunks) != len(plan.stages):
        return None
    pools, visits = _pools(swarm, plan), _visits(swarm, plan)
    steps, before, pace_s = 0.0, min(ARRIVE_S, until_s), float("inf")
    there: dict[str, int] = {}
    known: dict[tuple[int, ...], float] = {}
    ends = [(change.at_s, change) for change in churn.changes if change.at_s <= until_s]
    for at_s, change in [*ends, (until_s, None)]:
        if at_s > before:
            members = tuple(sorted(there.values()))
            if len(members) > BEST_COMPUTERS_MAX:
                return None
            if members not in known:
                _, known[members] = _best(swarm, pools, plan, visits, members)
            pace_s = known[members]
            steps += (at_s - before) / pace_s
            before = at_s
        if change is not None and change.comes:
            there[change.name] = churn.kind_of[change.name]
        elif change is not None:
            there.pop(change.name, None)
    return steps


def best_crews(swarm: Swarm, members: Sequence[int]) -> list[list[int]]:
    """The best assignment of these volunteers, by number, to the stages of the plan in force."""
    plan = swarm.machine.placement.plan
    assert plan is not None, "there is a plan as soon as all servers have come"
    return _best(swarm, _pools(swarm, plan), plan, _visits(swarm, plan), members)[0]


def _best(
    swarm: Swarm, pools: Pools, plan: Plan, visits: Sequence[float], members: Sequence[int]
) -> tuple[list[list[int]], float]:
    """Crews and their step when the strongest come first and each goes where the pace is worst: for equal computers
    the best."""
    last = len(pools.sizes.blocks)
    machines = swarm.network.machines[swarm.network.servers :]
    crews: list[list[int]] = [[] for _ in plan.stages]
    stages = _stages(swarm, plan, crews)
    paces = [float("inf") if not crew else 0.0 for crew in crews]
    for member in sorted(members, key=lambda number: -machines[number].uplink_bytes_per_s):
        worst = max(range(len(crews)), key=lambda stage: (paces[stage], visits[stage]))
        crews[worst].append(member)
        stages = _stages(swarm, plan, crews)
        paces[worst] = pools.pace(stages[worst], visits[worst], last).pace_s
    return crews, pools.plan(stages, visits).step_s


def _pools(swarm: Swarm, plan: Plan) -> Pools:
    """As the planners have them: members run forwards again where a stage's graphs would fit on nobody's device."""
    pools = Pools(swarm.network, pool_sizes(swarm.config))
    cuts = [plan.course.chunks[number] for number in range(len(plan.course.chunks))]
    if all(pools.fits(cut.first_block, cut.end_block)[swarm.network.servers :].any() for cut in cuts):
        return pools
    return Pools(swarm.network, pool_sizes(swarm.config, recompute=True))


def _visits(swarm: Swarm, plan: Plan) -> list[float]:
    return [plan.course.share(number) * swarm.config.batch.microbatches for number in range(len(plan.course.chunks))]


def _stages(swarm: Swarm, plan: Plan, crews: Sequence[Sequence[int]]) -> list[PoolStage]:
    place = {machine.name: number for number, machine in enumerate(swarm.network.machines)}
    stages = []
    for number, stage in enumerate(plan.stages):
        (chunk,) = plan.course.chunks_of(number)
        cut = plan.course.chunks[chunk]
        stages.append(
            PoolStage(
                front=tuple(place[str(server.node)] for server in stage.fronts),
                back=tuple(place[str(server.node)] for server in stage.backs),
                volunteers=tuple(crews[number]),
                first_block=cut.first_block,
                end_block=cut.end_block,
            )
        )
    return stages
