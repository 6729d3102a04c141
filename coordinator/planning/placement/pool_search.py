"""The search for a run's plan under the cost of pools: how many stages, which servers, which volunteers, which blocks.

Every number of stages is tried from two sides: the even plan that a coordinator makes without any planner, and the
clusters of near servers that the hybrid parameter-server paper's recipe finds. From there three steps take turns while
they help: volunteers onto stages for given blocks (bisection on the step, filling the stage that lacks most), blocks
onto stages for given members (bisection on the step, each stage taking all it can bear), and exchanges of servers.
The even plan is among the starts, so no answer is worse than it by the answer's own cost. Volunteers are never left out
for being slow, because in a pool a slow one delays nobody; only those who cannot do anything in a step are idle.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from coordinator.planning.placement.cost import Stage
from coordinator.planning.placement.pool_bound import pool_bound
from coordinator.planning.placement.pools import BISECTED, NEVER_S, PoolPlan, Pools, PoolStage
from protocol.base.errors import BadInputError
from protocol.schedule.check import check_bound

ROUNDS = 6
"""Turns of volunteers and blocks from one start; they rarely help after the third."""
HALVINGS = 26
COUNTS_MAX = 12
"""Numbers of stages that are tried; between the least and the most, close together where they are small."""
STARTS_SHARE = 0.7
"""Of the budget; starts that have not been worked on by then are left as they are."""
FINALISTS = 3
"""Plans whose servers are exchanged until the time is over."""

PROVED = "proved optimal"
"""Why a search stopped that found a plan at its bound."""
Roles = tuple[tuple[int, ...], tuple[int, ...]]
"""Front and back servers of a stage."""


@dataclass(frozen=True)
class PoolAnswer:
    """The best plan found. `idle` volunteers could do nothing in it, each with the reason; `spares` are servers."""

    plan: PoolPlan
    even: PoolPlan
    lower_bound_s: float
    search_s: float
    stopped: str
    idle: tuple[tuple[int, str], ...]
    spares: tuple[int, ...]

    @property
    def step_s(self) -> float:
        return self.plan.step_s

    @property
    def fraction_of_bound(self) -> float:
        """1.0 where no plan of this network is faster."""
        return min(1.0, self.lower_bound_s / self.step_s) if self.step_s > 0 else 1.0


def search_pools(
    pools: Pools,
    seed: int = 0,
    budget_s: float = 8.0,
    *,
    stages: int | None = None,
    even_stages: int | None = None,
    clusters: Callable[[int], Sequence[Roles] | None] | None = None,
    visit_shares: Callable[[int], Sequence[float]] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> PoolAnswer:
    """The best plan found in about `budget_s`, with `stages` stages if given.

    Args:
        pools: the network and the run.
        seed: of the exchanges of servers; equal seeds and budgets that do not run out give equal plans.
        budget_s: wall-clock seconds; what was begun is finished.
        stages: fixes their number.
        even_stages: how many stages the plan has that a coordinator makes without a planner; it is compared with.
        clusters: servers by role and stage for a number of stages, from the placement recipe, or None.
        visit_shares: the share of the microbatches that each of a number of stages sees (skipping).

    Raises `BadInputError` saying what is missing when no plan exists.
    """
    began = clock()
    blocks = len(pools.sizes.blocks)
    most = min(pools.servers // 2, blocks)
    if stages is not None and not 1 <= stages <= most:
        raise BadInputError(f"stages: {stages}, but {pools.servers} servers and {blocks} blocks allow 1 to {most}")
    counts = [stages] if stages is not None else spread(1, most, COUNTS_MAX)
    if even_stages is not None and stages is None and 1 <= even_stages <= most and even_stages not in counts:
        counts.append(even_stages)

    def visits(count: int) -> list[float]:
        shares = visit_shares(count) if visit_shares is not None else [1.0] * count
        return [share * pools.sizes.microbatches for share in shares]

    found: list[PoolPlan] = []
    evens: dict[int, PoolPlan] = {}
    wanted = even_stages if even_stages in counts else counts[0]
    for count in sorted(counts, key=lambda count: (count != wanted, count)):
        evens[count] = even = even_plan(pools, count, visits(count))
        starts = [even]
        if pools.servers > 2 * count:
            starts.append(on_the_best_servers(even))
        roles = clusters(count) if clusters is not None and clock() - began < budget_s / 2 else None
        if roles is not None:
            bare = [
                replace(stage, front=front, back=back) for stage, (front, back) in zip(even.stages, roles, strict=True)
            ]
            starts.append(pools.plan(bare, visits(count)))
        found += starts
        for start in starts:
            if count == wanted or clock() - began < STARTS_SHARE * budget_s:
                found.append(settled(start))
    found.sort(key=lambda plan: plan.score)
    rng = random.Random(seed)
    finalists = _different(found, FINALISTS)
    expired = False
    for number, plan in enumerate(finalists):
        share = (budget_s - (clock() - began)) / (len(finalists) - number)
        until = clock() + share
        better, ran_out = exchanged_servers(plan, rng, lambda until=until: clock() >= until)  # type: ignore[misc]
        expired |= ran_out
        found.append(settled(better))
        found.append(better)
    best = min(found, key=lambda plan: plan.score)
    compared = evens[even_stages] if even_stages in evens else min(evens.values(), key=lambda plan: plan.step_s)
    if best.step_s > compared.step_s:  # the score looks beyond the slowest stage; the answer must not be slower for it
        best = compared
    if not best.feasible:
        raise BadInputError(_nothing_fits(pools))
    bound = pool_bound(pools, counts if stages is not None else range(1, most + 1), visit_shares)
    check_bound(best.step_s * (1 + BISECTED), bound)
    bound = min(bound, best.step_s)
    at_bound = best.step_s <= bound * (1 + 1e-6)
    reason = PROVED if at_bound else f"time budget of {budget_s:g} s" if expired else "no exchange helps"
    placed = {server for stage in best.stages for server in stage.servers}
    return PoolAnswer(
        best,
        compared,
        bound,
        clock() - began,
        reason,
        _idle(best),
        tuple(server for server in range(pools.servers) if server not in placed),
    )


def spread(least: int, most: int, count: int) -> list[int]:
    """About `count` whole numbers from `least` to `most`: all of them if they are few, else in growing steps."""
    if most - least < count:
        return list(range(least, most + 1))
    ratio = most / least
    return sorted({round(least * ratio ** (i / (count - 1))) for i in range(count)})


def even_plan(pools: Pools, count: int, visits: Sequence[float]) -> PoolPlan:
    """What a coordinator does without a planner: blocks cut evenly, servers as they come, volunteers one by one to
    the stages in turn.
    """
    blocks = len(pools.sizes.blocks)
    stages = []
    for k in range(count):
        servers = list(range(pools.servers * k // count, pools.servers * (k + 1) // count))
        half = max(1, len(servers) // 2)
        stages.append(
            PoolStage(
                front=tuple(servers[:half]),
                back=tuple(servers[half:]),
                volunteers=tuple(range(k, pools.network.volunteers, count)),
                first_block=blocks * k // count,
                end_block=blocks * (k + 1) // count,
            )
        )
    return pools.plan(stages, visits)


def on_the_best_servers(plan: PoolPlan) -> PoolPlan:
    """The plan with two servers a stage, those with the widest lines; the others are spares."""
    pools, count = plan.pools, len(plan.stages)
    lines = np.minimum(pools.up, pools.down)[: pools.servers]
    chosen = sorted(np.argsort(-lines, kind="stable")[: 2 * count].tolist())
    return pools.plan(
        [replace(stage, front=(chosen[2 * k],), back=(chosen[2 * k + 1],)) for k, stage in enumerate(plan.stages)],
        _visits(plan),
    )


def settled(plan: PoolPlan) -> PoolPlan:
    """The plan with volunteers and blocks moved in turn for as long as that helps; servers stay."""
    best = plan
    for _ in range(ROUNDS):
        given, cut = with_volunteers(best), with_blocks(best)
        moved = min((given, cut, with_blocks(given), with_volunteers(cut)), key=lambda plan: plan.score)
        if moved.score >= best.score * (1 - 1e-9):
            break
        best = moved
    return evened(best)


def _visits(plan: PoolPlan) -> list[float]:
    return [pace.visits for pace in plan.paces]


def with_volunteers(plan: PoolPlan) -> PoolPlan:
    """The plan with all volunteers given out anew: the least step in which a greedy filling serves every stage."""
    pools, visits = plan.pools, _visits(plan)
    count, volunteers = len(plan.stages), pools.network.volunteers
    if not volunteers:
        return plan
    blocks = len(pools.sizes.blocks)
    rows = np.arange(pools.servers, pools.servers + volunteers)
    capacity = [pools.capacity(rows, stage, blocks) for stage in plan.stages]
    tasks = pools.sizes.contribution_tasks

    def filled(step_s: float) -> tuple[list[int], bool]:
        """A stage for each volunteer, and whether every stage is served in `step_s`."""
        done = np.stack([pools.done(step_s, tasks, *each) for each in capacity], axis=1)
        lacking = np.array(visits, dtype=np.float64)
        if pools.sizes.collocated == "always":
            for k, stage in enumerate(plan.stages):
                own = np.array(stage.servers, dtype=np.int64)
                lacking[k] -= float(pools.done(step_s, tasks, *pools.capacity(own, stage, blocks)).sum())
        stage_of = [-1] * volunteers
        shares = np.maximum(np.array(visits), 1e-9)
        for v in np.argsort(-done.max(axis=1), kind="stable").tolist():
            useful = np.minimum(done[v], np.maximum(lacking, 0.0)) * np.sqrt(np.maximum(lacking, 0.0) / shares)
            k = int(useful.argmax())
            if useful[k] <= 0:  # all are served, or it can do nothing: where least is over
                k = int(np.where(done[v] > 0, lacking / shares, -math.inf).argmax())
            stage_of[v] = k
            lacking[k] -= done[v, k]
        return stage_of, bool((lacking <= 1e-9).all())

    high = max(NEVER_S / 1e6, 1.0)
    if plan.feasible:
        high = plan.pace_s * 1.5
    stage_of, served = filled(high)
    if not served and plan.feasible:
        return plan
    low = 0.0
    for _ in range(HALVINGS if plan.feasible else 2 * HALVINGS):
        middle = (low + high) / 2 if plan.feasible else math.sqrt(max(low, 1e-6) * high)
        tried, served = filled(middle)
        if served:
            high, stage_of = middle, tried
        else:
            low = middle
        if high - low < 1e-4 * high:
            break
    members: list[list[int]] = [[] for _ in range(count)]
    for volunteer, k in enumerate(stage_of):
        members[k].append(volunteer)
    return pools.plan(
        [replace(stage, volunteers=tuple(own)) for stage, own in zip(plan.stages, members, strict=True)], visits
    )


def with_blocks(plan: PoolPlan) -> PoolPlan:
    """The plan with the blocks cut anew for its members: the least pace at which all blocks find a stage."""
    pools, visits = plan.pools, _visits(plan)
    blocks, count = len(pools.sizes.blocks), len(plan.stages)
    if count == 1:
        return plan

    def bears(k: int, first: int, end: int, step_s: float) -> bool:
        stage = replace(plan.stages[k], first_block=first, end_block=end)
        if not pools.servers_hold(stage.front, stage.back, first, end):
            return False
        if pools.lines_s(stage, visits[k], blocks) > step_s:
            return False
        rows = pools.members(stage)
        if not len(rows):
            return False
        done = pools.done(step_s, pools.sizes.contribution_tasks, *pools.capacity(rows, stage, blocks))
        return float(done.sum()) >= visits[k]

    def cuts(step_s: float) -> list[int] | None:
        edges = [0]
        for k in range(count):
            first, most = edges[-1], blocks - (count - 1 - k)
            if not bears(k, first, first + 1, step_s):
                return None
            low, high = first + 1, most
            if k == count - 1:
                return [*edges, blocks] if bears(k, first, blocks, step_s) else None
            while low < high:
                middle = (low + high + 1) // 2
                if bears(k, first, middle, step_s):
                    low = middle
                else:
                    high = middle - 1
            edges.append(low)
        return edges

    high = plan.pace_s * (1 + 1e-6) if plan.feasible else NEVER_S / 1e6
    best = cuts(high)
    if best is None:
        return plan
    low = 0.0
    for _ in range(HALVINGS if plan.feasible else 2 * HALVINGS):
        middle = (low + high) / 2 if plan.feasible else math.sqrt(max(low, 1e-6) * high)
        tried = cuts(middle)
        if tried is None:
            low = middle
        else:
            best, high = tried, middle
        if high - low < 1e-4 * high:
            break
    return pools.plan(
        [
            replace(stage, first_block=first, end_block=end)
            for stage, (first, end) in zip(plan.stages, pairwise(best), strict=True)
        ],
        visits,
    )


def evened(plan: PoolPlan) -> PoolPlan:
    """The plan after moving single volunteers from any stage to the slowest one while the step falls."""
    for _ in range(4 * len(plan.stages)):
        slow = plan.worst
        tried = []
        for k in range(len(plan.stages)):
            if k == slow or len(plan.stages[k].volunteers) < 2:
                continue
            for volunteer in _distinct(plan, k):
                tried.append(_moved(plan, volunteer, k, slow))
        if not tried:
            return plan
        best = min(tried, key=lambda other: other.score)
        if best.score >= plan.score * (1 - 1e-9):
            return plan
        plan = best
    return plan


def _distinct(plan: PoolPlan, k: int) -> list[int]:
    """The volunteers of stage k that do least, most, and as the middle one does."""
    ranked = sorted(zip(plan.paces[k].microbatches_of, plan.stages[k].volunteers, strict=True))
    return sorted({ranked[0][1], ranked[len(ranked) // 2][1], ranked[-1][1]})


def _moved(plan: PoolPlan, volunteer: int, source: int, target: int) -> PoolPlan:
    stages = list(plan.stages)
    stages[source] = replace(stages[source], volunteers=tuple(v for v in stages[source].volunteers if v != volunteer))
    stages[target] = replace(stages[target], volunteers=tuple(sorted((*stages[target].volunteers, volunteer))))
    return plan.pools.plan(stages, _visits(plan))


def exchanged_servers(plan: PoolPlan, rng: random.Random, expired: Callable[[], bool]) -> tuple[PoolPlan, bool]:
    """The plan after exchanges of servers between places, moves into other stages, and leaving some out, as long as
    the score falls; and whether the time ran out. Ends after as many vain tries as there are pairs of servers.
    """
    vain = 0
    most = max(40, min(4000, plan.pools.servers**2))
    best = plan
    while vain < most:
        if expired():
            return best, True
        tried = _with_other_servers(best, rng)
        if tried is not None and tried.score < best.score * (1 - 1e-9):
            best, vain = tried, 0
        else:
            vain += 1
    return best, False


def _with_other_servers(plan: PoolPlan, rng: random.Random) -> PoolPlan | None:
    stages = [stage.members for stage in plan.stages]
    placed = [(k, server) for k, stage in enumerate(stages) for server in stage.servers]
    out = [s for s in range(plan.pools.servers) if s not in {server for _, server in placed}]
    kind = rng.random()
    k, server = rng.choice(placed)
    if kind < 0.6 or not (len(stages[k].servers) > 2 or out):
        other_k, other = rng.choice(placed)
        if other == server:
            return None
        swap = {server: other, other: server}
    elif out and kind < 0.8:
        other_k, swap = k, {server: rng.choice(out)}
    elif len(stages[k].servers) > 2:  # leave it out, or let it serve another stage
        rest = _without(stages[k], server)
        if rest is None:
            return None
        changed = list(plan.stages)
        changed[k] = replace(changed[k], front=rest.front, back=rest.back)
        if kind < 0.95 and len(stages) > 1:
            j = rng.choice([j for j in range(len(stages)) if j != k])
            changed[j] = _joined(changed[j], server, rng.random() < 0.5)
        return plan.pools.plan(changed, _visits(plan))
    else:
        changed = list(plan.stages)
        changed[k] = _joined(changed[k], rng.choice(out), rng.random() < 0.5)
        return plan.pools.plan(changed, _visits(plan))
    changed = list(plan.stages)
    for j in sorted({k, other_k}):
        stage = changed[j]
        changed[j] = replace(
            stage,
            front=tuple(sorted(swap.get(s, s) for s in stage.front)),
            back=tuple(sorted(swap.get(s, s) for s in stage.back)),
        )
    return plan.pools.plan(changed, _visits(plan))


def _joined(stage: PoolStage, server: int, in_front: bool) -> PoolStage:
    if in_front:
        return replace(stage, front=tuple(sorted((*stage.front, server))))
    return replace(stage, back=tuple(sorted((*stage.back, server))))


def _without(stage: Stage, server: int) -> Stage | None:
    front = tuple(s for s in stage.front if s != server)
    back = tuple(s for s in stage.back if s != server)
    return Stage(front, back, stage.volunteers) if front and back else None


def _different(plans: Sequence[PoolPlan], count: int) -> list[PoolPlan]:
    """The best `count` plans with different numbers of stages or different servers."""
    seen: dict[tuple[Roles, ...], PoolPlan] = {}
    for plan in plans:
        seen.setdefault(tuple((stage.front, stage.back) for stage in plan.stages), plan)
    return list(seen.values())[:count]


def _idle(plan: PoolPlan) -> tuple[tuple[int, str], ...]:
    """Volunteers who cannot finish one microbatch in a step of this plan, each with what is in the way."""
    pools = plan.pools
    found = []
    for stage, pace in zip(plan.stages, plan.paces, strict=True):
        fits = pools.fits(stage.first_block, stage.end_block)
        for volunteer, done in zip(stage.volunteers, pace.microbatches_of, strict=True):
            machine = pools.servers + volunteer
            if not fits[machine]:
                found.append((volunteer, "memory"))
            elif done * max(1.0, plan.step_s / max(pace.pace_s, 1e-300)) <= 0.0:
                up = pools.up[machine] * plan.step_s
                parameters = pools.sizes.parameters[stage.end_block] - pools.sizes.parameters[stage.first_block]
                found.append((volunteer, "uplink" if up < parameters * pools.sizes.gradient_bytes else "downlink"))
    return tuple(sorted(found))


def _nothing_fits(pools: Pools) -> str:
    room = float(pools.memory[: pools.servers].sum()) / 1e9
    wanted = pools.sizes.server_held_bytes * float(pools.sizes.parameters[-1]) / 1e9
    if room < wanted:
        return f"memory_bytes: the servers together hold {room:.3g} GB; weights and moments take {wanted:.3g} GB"
    return (
        "memory_bytes: no plan found whose stages all have servers and members with memory and lines for their blocks"
    )
