"""The search for a run's plan: how the model is cut, who sits where, and how many stages if that is open.

It starts from the even plan with servers as they came, and from a chain of near servers (each next seat goes to the
nearest server that is left, so that a stage's back servers are near the next one's fronts). Then three steps take turns
while they help: volunteers onto stages, edges of the cut, exchanges of servers. The even plan is among the starts and
the answer is the best that was looked at, so none is worse than it by the answer's own cost.

Where no volunteer is there yet, and servers only stand in for them, some of a home's kind are assumed: a cut outlives
the first minutes of a run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import numpy as np

from coordinator.planning.placement.pool_bound import pool_bound
from coordinator.planning.placement.pools import BISECTED, NEVER_S, Pools
from coordinator.planning.placement.run_sizes import pool_sizes
from coordinator.planning.placement.seats import SeatPlan, Seats
from protocol.base.errors import BadInputError
from protocol.run.course import PLANNED
from protocol.run.run import RunConfig, possible_counts
from protocol.schedule.check import check_bound
from protocol.schedule.profile import Link, Machine, NetworkFile, build_network

ASSUMED_PER_STAGE = 4
"""Volunteers that are assumed where none is there: one could not tell a stage's devices from its lines."""
ASSUMED_UP_BYTES_PER_S, ASSUMED_DOWN_BYTES_PER_S, ASSUMED_LATENCY_S = 2.5e6, 2.5e7, 0.02
"""A home with 20 Mbit/s up and 200 down."""
ROUNDS = 6
HALVINGS = 24
COUNTS_MAX = 12
"""Numbers of stages that are tried where it is open."""
WORTH_SHARE = 0.15
"""By so much of a step at least a plan is faster than one that needs no planner, or it is not worth to be another: what
the cost says of a step is true to about that much. (On ten drawn networks of home lines cuts that promised 2 to 13 %
took 0.96 to 1.39 times the even one's step in `tests.benchmarks.home_cuts`, 1.06 in the mean; where devices or sums
differ as they do at homes, cuts that promised 46 and 70 % gave 37 and 27 in `tests.benchmarks.predicted`.)"""
VAIN_MAX = 400
"""Exchanges of servers without a gain before the search ends; of few servers, as many as there are pairs, twice."""


@dataclass(frozen=True)
class SeatAnswer:
    """The best plan found, by name. Times in seconds of a step."""

    servers: tuple[tuple[str, ...], ...]
    edges: tuple[int, ...]
    step_s: float
    even_step_s: float
    bound_s: float
    reason: str
    search_s: float
    seats: Seats = field(compare=False, repr=False)
    plan: SeatPlan = field(compare=False, repr=False)
    """By number, in `seats`; volunteers that were assumed are among them."""
    without: SeatAnswer | None = field(default=None, compare=False, repr=False)
    """The plan that needs no planner: of the most stages, cut evenly, with servers as they came. None: none fits."""

    @property
    def worthwhile(self) -> SeatAnswer:
        """This plan where it is clearly faster than the one that needs no planner, else that one."""
        plain = self.without
        if plain is None or self.step_s < (1.0 - WORTH_SHARE) * plain.step_s:
            return self
        if (self.servers, self.edges) == (plain.servers, plain.edges):
            return plain
        gain = f"the best other plan that was found takes {1.0 - self.step_s / plain.step_s:.0%} less by the cost"
        return replace(plain, reason=f"{plain.reason}; {gain}, which is true to {WORTH_SHARE:.0%} or so")


def search_seats(
    config: RunConfig,
    file: NetworkFile,
    budget_s: float,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    *,
    keeps_seats: bool = False,
) -> SeatAnswer:
    """The best plan found in about `budget_s`.

    Args:
        config: with what is open in it.
        file: servers in the order in which a plan without a planner would seat them.
        clock: seconds; with one that stands the search ends when nothing helps any more, and equal problems have
            equal answers.
        keeps_seats: servers sit in their order, and only the cut is searched.

    Raises `BadInputError` naming what is missing when there is no plan.
    """
    began = clock()
    shards = config.stages.front_servers + config.stages.back_servers
    here = sum(machine.role == "server" for machine in file.machines)
    counts = possible_counts(config, here // shards)
    if not counts or here < counts[0] * shards:
        raise BadInputError(f"stages.count: {here} servers, and one stage alone takes {shards}")
    if len(counts) > COUNTS_MAX:
        counts = [counts[round(i * (len(counts) - 1) / (COUNTS_MAX - 1))] for i in range(COUNTS_MAX)]
    assumed = 0
    if config.stages.collocated != "always" and not any(machine.role == "volunteer" for machine in file.machines):
        assumed = ASSUMED_PER_STAGE * counts[-1]
        file = _with_homes(file, assumed)
    found: list[tuple[float, int, Seats, SeatPlan, SeatPlan]] = []
    network = build_network(file)
    pools = Pools(network, pool_sizes(config))
    if not any(_possible(pools, config, count) for count in counts):
        pools = Pools(network, pool_sizes(config, recompute=True))
    for number, count in enumerate(counts):
        seats = Seats(pools, config.settled(count))
        until = clock() + (budget_s - (clock() - began)) / (len(counts) - number)
        even = even_seats(seats)
        cuts = config.stages.cut == PLANNED
        expired: Callable[[], bool] = lambda u=until: clock() >= u  # type: ignore[misc]  # noqa: E731
        if keeps_seats:
            best = settled(seats, even, cuts, expired)
        else:
            best = _searched(seats, even, cuts, random.Random(seed), expired)
        found.append((seats.cost(best).step_s, count, seats, best, even))
    _, _, seats, plan, even = min(found, key=lambda each: each[:2])
    if not seats.cost(plan).feasible:
        raise BadInputError("memory_bytes: no plan found whose servers and members have memory for their blocks")
    bound_s = pool_bound(pools, counts) if seats.is_line else seats.compute_bound_s()
    check_bound(seats.cost(plan).step_s * (1 + BISECTED), bound_s)
    names = [machine.name for machine in network.machines]

    def answer(seats: Seats, plan: SeatPlan, even: SeatPlan, without: SeatAnswer | None = None) -> SeatAnswer:
        cost, reason = seats.cost(plan), seats.cost(plan).reason()
        if assumed:
            reason += f"; no volunteer is here yet, so {assumed} equal ones on home lines are assumed"
        return SeatAnswer(
            servers=tuple(tuple(names[server] for server in servers) for servers in plan.servers),
            edges=plan.edges,
            step_s=cost.step_s,
            even_step_s=seats.cost(even).step_s,
            bound_s=min(bound_s, cost.step_s),
            reason=reason,
            search_s=clock() - began,
            seats=seats,
            plan=plan,
            without=without,
        )

    plain = max(((s, p) for _, _, s, _, p in found if s.cost(p).feasible), key=lambda each: each[0].count, default=None)
    without = None if plain is None else answer(plain[0], plain[1], plain[1])
    return answer(seats, plan, even, without)


def _possible(pools: Pools, config: RunConfig, count: int) -> bool:
    seats = Seats(pools, config.settled(count))
    return seats.cost(even_seats(seats)).feasible


def _with_homes(file: NetworkFile, count: int) -> NetworkFile:
    """The network with volunteers of a home's kind, as strong as the median server."""
    servers = [machine for machine in file.machines if machine.role == "server"]
    power = median([machine.forward_flops_per_s for machine in servers])
    memory = int(median([machine.memory_bytes for machine in servers]))
    homes = [
        Machine(
            name=f"assumed-{number}",
            role="volunteer",
            forward_flops_per_s=power,
            backward_flops_per_s=power,
            memory_bytes=memory,
            uplink_bytes_per_s=ASSUMED_UP_BYTES_PER_S,
            downlink_bytes_per_s=ASSUMED_DOWN_BYTES_PER_S,
        )
        for number in range(count)
    ]
    links = [
        Link(source=a.name, target=b.name, latency_s=ASSUMED_LATENCY_S, bytes_per_s=rate)
        for home in homes
        for server in servers
        for a, b, rate in ((home, server, ASSUMED_UP_BYTES_PER_S), (server, home, ASSUMED_DOWN_BYTES_PER_S))
    ]
    return msgspec.structs.replace(file, machines=(*file.machines, *homes), links=(*file.links, *links))


def even_seats(seats: Seats) -> SeatPlan:
    """What a coordinator does without a planner; volunteers go one by one to the stages in turn, then where they help
    most, as a running coordinator would have it."""
    shards, count = seats.shards, seats.count
    edges = tuple(chunk.first_block for chunk in seats.course.chunks[1 : seats.parts])
    volunteers = range(seats.pools.network.volunteers)
    plan = SeatPlan(
        tuple(tuple(range(k * shards, (k + 1) * shards)) for k in range(count)),
        edges,
        tuple(tuple(volunteers[k::count]) for k in range(count)),
    )
    return _better(seats, plan, with_volunteers(seats, plan))


def _better(seats: Seats, one: SeatPlan, two: SeatPlan) -> SeatPlan:
    return two if seats.cost(two).score < seats.cost(one).score * (1 - 1e-9) else one


def _searched(seats: Seats, even: SeatPlan, cuts: bool, rng: random.Random, expired: Callable[[], bool]) -> SeatPlan:
    """The best plan found from the even one and from a chain of near servers. `cuts`: whether edges may move."""
    starts = [even, with_volunteers(seats, replace(even, servers=chained(seats)))]
    found = [settled(seats, start, cuts, expired) for start in starts]
    best = min([even, *found], key=lambda plan: seats.cost(plan).score)
    best = exchanged(seats, best, rng, expired)
    best = _better(seats, best, settled(seats, best, cuts, expired))
    # The score looks beyond the slowest stage; the answer must not be slower for it.
    return even if seats.cost(best).step_s > seats.cost(even).step_s else best


def chained(seats: Seats) -> tuple[tuple[int, ...], ...]:
    """Servers seat by seat, each the nearest one left to the one before; the fastest line begins."""
    pools, wanted = seats.pools, seats.count * seats.shards
    delay = pools.network.to_latency_s + pools.sizes.activation_down_bytes * pools.to_s
    delay = np.minimum(delay[: pools.servers], NEVER_S)
    left = list(range(pools.servers))
    order = [max(left, key=lambda s: (min(pools.up[s], pools.down[s]), -s))]
    left.remove(order[0])
    while len(order) < wanted:
        nearest = min(left, key=lambda s: (float(delay[order[-1], s]), s))
        order.append(nearest)
        left.remove(nearest)
    return tuple(tuple(order[k * seats.shards : (k + 1) * seats.shards]) for k in range(seats.count))


def settled(seats: Seats, plan: SeatPlan, cuts: bool, expired: Callable[[], bool]) -> SeatPlan:
    """The plan with edges and volunteers moved in turn for as long as that helps; servers stay."""
    best = plan
    for _ in range(ROUNDS):
        if expired():
            break
        moved = with_edges(seats, best, expired) if cuts else best
        moved = _better(seats, moved, with_volunteers(seats, moved))
        if seats.cost(moved).score >= seats.cost(best).score * (1 - 1e-6):
            break
        best = moved
    return best


def with_edges(seats: Seats, plan: SeatPlan, expired: Callable[[], bool]) -> SeatPlan:
    """The plan after moving single edges of the cut, far ones first, for as long as the score falls."""
    last = seats.blocks if len(seats.owners) == seats.parts else seats.blocks - 1
    best, score = plan, seats.cost(plan).score
    stride = max(1, seats.blocks // 8)
    while stride:
        helped = False
        for edges in _moved_edges(best.edges, stride, last):
            if expired():
                return best
            tried = replace(best, edges=edges)
            if (cost := seats.cost(tried).score) < score * (1 - 1e-9):
                best, score, helped = tried, cost, True
                break
        if not helped:
            stride //= 2
    return best


def _moved_edges(edges: tuple[int, ...], stride: int, last: int) -> Iterator[tuple[int, ...]]:
    for place, edge in enumerate(edges):
        low = edges[place - 1] if place else 0
        high = edges[place + 1] if place + 1 < len(edges) else last
        for moved in (edge - stride, edge + stride):
            if low < moved < high:
                yield (*edges[:place], moved, *edges[place + 1 :])
    for place in range(len(edges)):  # a stage between two others hands on what it takes
        moved_tail = tuple(edge + stride for edge in edges[place:])
        if len(moved_tail) > 1 and moved_tail[-1] < last:
            yield (*edges[:place], *moved_tail)
        moved_tail = tuple(edge - stride for edge in edges[place:])
        if len(moved_tail) > 1 and moved_tail[0] > (edges[place - 1] if place else 0):
            yield (*edges[:place], *moved_tail)


def with_volunteers(seats: Seats, plan: SeatPlan) -> SeatPlan:
    """The plan with all volunteers given out anew: the least step in which a greedy filling serves every stage."""
    pools = seats.pools
    count, volunteers = seats.count, pools.network.volunteers
    if not volunteers or count == 1:
        return replace(plan, volunteers=(tuple(range(volunteers)),)) if count == 1 else plan
    tasks = pools.sizes.contribution_tasks
    whole = [seats.capacity(k, plan.servers[k], plan.edges) for k in range(count)]
    capacity = [[each[pools.servers :] for each in stage] for stage in whole]
    own = [seats.rows(plan.servers[k], ()) if pools.sizes.collocated == "always" else [] for k in range(count)]
    shares = np.maximum(np.array(seats.visits), 1e-9)

    def filled(step_s: float) -> tuple[list[int], bool]:
        done = np.stack([pools.done(step_s, tasks, *each) for each in capacity], axis=1)
        lacking = np.array(seats.visits, dtype=np.float64)
        for k, rows in enumerate(own):
            if rows:
                stands = [each[rows] for each in whole[k]]
                lacking[k] -= float(pools.done(step_s, tasks, *stands).sum())
        stage_of = [0] * volunteers
        for v in np.argsort(-done.max(axis=1), kind="stable").tolist():
            useful = np.minimum(done[v], np.maximum(lacking, 0.0)) * np.sqrt(np.maximum(lacking, 0.0) / shares)
            k = int(useful.argmax())
            if useful[k] <= 0:  # all are served, or it can do nothing: where least is over
                k = int(np.where(done[v] > 0, lacking / shares, -math.inf).argmax())
            stage_of[v] = k
            lacking[k] -= done[v, k]
        return stage_of, bool((lacking <= 1e-9).all())

    low, high = 1e-6, NEVER_S / 1e6
    stage_of, served = filled(high)
    for _ in range(2 * HALVINGS):
        if not served and high >= NEVER_S / 1e6:
            break
        middle = math.sqrt(low * high)
        tried, enough = filled(middle)
        if enough:
            high, stage_of = middle, tried
        else:
            low = middle
        if high < low * 1.0005:
            break
    members: list[list[int]] = [[] for _ in range(count)]
    for volunteer, k in enumerate(stage_of):
        members[k].append(volunteer)
    return replace(plan, volunteers=tuple(map(tuple, members)))


def exchanged(seats: Seats, plan: SeatPlan, rng: random.Random, expired: Callable[[], bool]) -> SeatPlan:
    """The plan after exchanges of servers between two seats, or of one with a server without a seat."""
    every = list(range(seats.pools.servers))
    best, score, vain = plan, seats.cost(plan).score, 0
    if len(every) < 2:
        return best
    most = min(VAIN_MAX, len(every) * (len(every) - 1))
    while vain < most and not expired():
        one, two = rng.sample(every, 2)
        swap = {one: two, two: one}
        servers = tuple(tuple(swap.get(server, server) for server in stage) for stage in best.servers)
        tried = replace(best, servers=servers)
        if servers != best.servers and (cost := seats.cost(tried).score) < score * (1 - 1e-9):
            best, score, vain = tried, cost, 0
        else:
            vain += 1
    return best
