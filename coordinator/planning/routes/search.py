"""The route search: coarse and greedy warm starts, conflict-based search, annealing, under one budget.

Anytime: the first answer is there after milliseconds, every later one is better, and the search says which
bound it has proved and why it stopped. It stops by counts of work, so a seed repeats exactly unless the clock
cuts it short.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.planning.routes.astar import Plan, Planner
from coordinator.planning.routes.bounds import lower_bound
from coordinator.planning.routes.conflicts import conflict_search
from coordinator.planning.routes.evaluate import Evaluator, Timed
from coordinator.planning.routes.greedy import LARGE_NODES, greedy
from coordinator.planning.routes.improve import Best, anneal
from coordinator.planning.routes.model import Route, RouteModel
from coordinator.planning.routes.shared import SharedEvaluator, Sharing
from protocol.base.errors import BadInputError
from protocol.schedule.check import check_bound

GREEDY_ORDERS = 12
COUNTED_S = 2.5
"""Without a budget a search does what takes about so long on one idle core, whatever the clock says."""
TREE_NODES_PER_SECOND = 400
STEPS_PER_SECOND = 1_500_000
"""How many events of the simulation count as a second of annealing, so that equal seeds do equal work."""
SHARED_STEPS_PER_SECOND = 120_000
"""The same where transfers share links."""
SHARED_FIRST, SHARED_START = 0.4, 0.1
"""The part of a budget that goes into the search without sharing, with nothing or something to start from."""


@dataclass(frozen=True)
class RoutesAnswer:
    """Routes (head first) with every start time; `stopped` says why the search ended."""

    routes: tuple[Route, ...]
    bias: tuple[float, ...]
    timed: Timed
    makespan_s: float
    lower_bound_s: float
    search_s: float
    stopped: str
    evaluations: int
    tree_nodes: int

    @property
    def fraction_of_bound(self) -> float:
        return self.lower_bound_s / self.makespan_s if self.makespan_s > 0 else 1.0


def search_routes(
    model: RouteModel,
    seed: int = 0,
    budget_s: float | None = None,
    *,
    start: Sequence[Route] | None = None,
    bias: Sequence[float] | None = None,
    conflicts: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> RoutesAnswer:
    """The best routes found in `budget_s`, or after counted work (`COUNTED_S`) without a budget.

    Counted work gives the same answer on every machine. Raises `BadInputError` saying what is missing when
    there are none.

    `start` is a set of routes to begin from, with their `bias` (right of way). With `conflicts` off no tree
    is searched (for small budgets).
    """
    model.check()
    began = clock()
    rng = random.Random(seed)
    planner = Planner(model)
    evaluator = Evaluator(model)
    deadline = math.inf if budget_s is None else began + budget_s
    bound_deadline = math.inf if budget_s is None else began + 0.3 * budget_s
    work_s = COUNTED_S if budget_s is None else budget_s

    def expired() -> bool:
        return clock() >= deadline

    best = _warm_start(model, planner, evaluator, rng, start, bias, expired)
    clean: tuple[tuple[Plan, ...], float] | None = None
    bound = lower_bound(model, planner, lambda: clock() >= bound_deadline)
    tree_nodes = 0
    goal = bound * (1 + 1e-9)
    small = model.nodes <= LARGE_NODES
    if small and conflicts and best.makespan_s > goal and not expired():

        def found(plans: Sequence[Plan], is_clean: bool) -> float:
            nonlocal best, clean
            routes = [plan.route for plan in plans]
            makespan = max(evaluator.ends(routes))
            if makespan < best.makespan_s:
                best, clean = Best(makespan, routes, [0.0] * len(routes)), None
            end = max(plan.end_s for plan in plans)
            if is_clean and one_wave and end < best.makespan_s:
                best, clean = Best(end, routes, [0.0] * len(routes)), (tuple(plans), end)
            return best.makespan_s if one_wave else math.inf

        one_wave = max(model.sends) == 1
        tree_deadline = clock() + 0.25 * (deadline - clock()) if budget_s is not None else math.inf
        wave = replace(model, repeats=())
        outcome = conflict_search(
            wave,
            planner,
            bound if one_wave else 0.0,
            best.makespan_s if one_wave else math.inf,
            found,
            lambda: clock() >= tree_deadline,
            max(20, int(TREE_NODES_PER_SECOND * work_s)),
        )
        tree_nodes = outcome.nodes
        if one_wave:
            bound = max(bound, min(outcome.bound_s, best.makespan_s))
            goal = bound * (1 + 1e-9)
    if best.makespan_s > goal and not expired():
        steps = sum(model.sends) * (2 * model.route_stages + 1)
        rounds = max(50, int(0.7 * work_s * STEPS_PER_SECOND / steps))
        for heat in (1.0, 0.4, 0.15):
            tried = anneal(
                model,
                evaluator,
                best.routes,
                rng,
                rounds // 3,
                expired,
                goal_s=goal,
                bias=best.bias,
                heat=heat,
            )
            if tried.makespan_s < best.makespan_s:
                best, clean = tried, None
    if best.makespan_s <= goal:
        stopped = "proved optimal"
    elif expired():
        stopped = f"time budget of {budget_s:g} s"
    else:
        stopped = "planned search done"
    timed = evaluator.timed(best.routes, best.bias)
    if clean is not None:
        starts = tuple((plan.starts,) for plan in clean[0])
        timed = Timed(clean[1], tuple(plan.end_s for plan in clean[0]), starts)
    check_bound(timed.makespan_s, bound)
    return RoutesAnswer(
        tuple(best.routes),
        tuple(best.bias),
        timed,
        timed.makespan_s,
        min(bound, timed.makespan_s),
        clock() - began,
        stopped,
        evaluator.evaluations,
        tree_nodes,
    )


def search_shared(
    model: RouteModel,
    sharing: Sharing,
    seed: int = 0,
    budget_s: float | None = None,
    *,
    start: Sequence[Route] | None = None,
    bias: Sequence[float] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RoutesAnswer:
    """The best routes found where parallel transfers share links: every time in the answer is with sharing.

    A search without sharing gives the start and the bound, which holds with sharing too, since a transfer is never
    quicker in company; the rest of the budget anneals on the shared cost.
    """
    began = clock()
    share = SHARED_FIRST if start is None else SHARED_START
    first = search_routes(
        model, seed, None if budget_s is None else share * budget_s, start=start, bias=bias, clock=clock
    )
    evaluator = SharedEvaluator(model, sharing)
    deadline = math.inf if budget_s is None else began + budget_s

    def expired() -> bool:
        return clock() >= deadline

    def shared(routes: Sequence[Route], right_of_way: Sequence[float]) -> Best:
        return Best(max(evaluator.ends(routes, right_of_way)), list(routes), list(right_of_way))

    best = shared(first.routes, first.bias)
    if start is not None:  # what the search without sharing improved may be worse with it
        given = shared(start, bias if bias is not None else [0.0] * len(start))
        best = min(best, given, key=lambda one: one.makespan_s)
    goal = first.lower_bound_s * (1 + 1e-9)
    steps = sum(model.sends) * (2 * model.route_stages + 1)
    work_s = COUNTED_S if budget_s is None else (1 - share) * budget_s
    rounds = max(30, int(work_s * SHARED_STEPS_PER_SECOND / steps))
    rng = random.Random(seed)
    for heat in (0.6, 0.2):
        if best.makespan_s > goal and not expired():
            tried = anneal(
                model, evaluator, best.routes, rng, rounds // 2, expired, goal_s=goal, bias=best.bias, heat=heat
            )
            best = min(best, tried, key=lambda one: one.makespan_s)
    timed = evaluator.timed(best.routes, best.bias)
    if timed.makespan_s <= goal:
        stopped = "proved optimal"
    elif expired():
        stopped = f"time budget of {budget_s:g} s"
    else:
        stopped = "planned search done"
    check_bound(timed.makespan_s, first.lower_bound_s)
    return RoutesAnswer(
        tuple(best.routes),
        tuple(best.bias),
        timed,
        timed.makespan_s,
        min(first.lower_bound_s, timed.makespan_s),
        clock() - began,
        stopped,
        evaluator.evaluations,
        first.tree_nodes,
    )


def _warm_start(
    model: RouteModel,
    planner: Planner,
    evaluator: Evaluator,
    rng: random.Random,
    start: Sequence[Route] | None,
    bias: Sequence[float] | None,
    expired: Callable[[], bool],
) -> Best:
    """The best of: the given routes, a coarse plan, and greedy plans in several orders."""
    best: Best | None = None

    def consider(routes: Sequence[Route], bias: Sequence[float] | None = None) -> None:
        nonlocal best
        makespan = max(evaluator.ends(routes, bias))
        if best is None or makespan < best.makespan_s:
            best = Best(makespan, list(routes), list(bias) if bias is not None else [0.0] * len(routes))

    if start is not None:
        consider(start, bias)
    coarse = coarse_routes(model)
    if coarse is not None:
        consider(coarse)
    order = _round_robin(model)
    failure: BadInputError | None = None
    for number in range(GREEDY_ORDERS if model.nodes <= LARGE_NODES else 1):
        try:
            consider(greedy(model, planner, order))
        except BadInputError as error:
            failure = error
        if expired() and best is not None:
            break
        order = list(order)
        rng.shuffle(order)
        if number == 0 and model.nodes <= LARGE_NODES:  # the longest ways first
            order.sort(key=lambda a: -planner.shortest_s(model.heads[a]))
    if best is None:
        assert failure is not None
        raise failure
    return best


def _round_robin(model: RouteModel) -> list[int]:
    """One microbatch of each head, then the second of each, …"""
    sent: dict[int, int] = {}
    keys = []
    for number, head in enumerate(model.heads):
        sent[head] = sent.get(head, 0) + 1
        keys.append((sent[head], number))
    return [number for _, number in sorted(keys)]


def coarse_routes(model: RouteModel) -> list[Route] | None:
    """Routes where the microbatches of a head travel together (SkipPipe appendix D.1), or None where they
    cannot.

    Groups are as large as memory, visits and the heads' numbers of microbatches allow; one agent stands for
    each group, with that many times the work and the memory divided.
    """
    if model.nodes > LARGE_NODES:
        return None
    counts: dict[int, int] = {}
    for head in model.heads:
        counts[head] = counts.get(head, 0) + 1
    size = math.gcd(*counts.values(), *model.visits[1:]) if model.stages > 1 else math.gcd(*counts.values())
    if size < 2:
        return None
    heads = [head for head in counts for _ in range(counts[head] // size)]
    coarse = replace(
        model,
        forward_s=tuple(size * work for work in model.forward_s),
        backward_s=tuple(size * work for work in model.backward_s),
        loss_s=tuple(size * work for work in model.loss_s),
        heads=tuple(heads),
        memory=tuple(room // size for room in model.memory),
        visits=tuple(visits // size for visits in model.visits),
        repeats=(),
        rest_forward_s=size * model.rest_forward_s,
        rest_backward_s=size * model.rest_backward_s,
    )
    try:
        coarse.check()
        groups = greedy(coarse, Planner(coarse), list(range(len(heads))))
    except BadInputError:
        return None
    waiting: dict[int, list[Route]] = {}
    for route in groups:
        waiting.setdefault(route[0], []).extend([route] * size)
    return [waiting[head].pop(0) for head in model.heads]
