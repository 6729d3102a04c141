"""Lower bounds on the makespan of any set of routes that obeys the rules.

The main one asks for which makespan T the rules without collisions (CC1, CC2, CC3, TC1) can still be met by
routes that take at most T alone, when also no node works longer than fits between the earliest moment that
work can reach it and the latest that leaves time to come home. Fractions of routes are allowed (a linear
programme), so the smallest such T is never above the optimum. Beside it stands Jackson's preemptive schedule
for every head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from coordinator.planning.routes.astar import Planner
from coordinator.planning.routes.evaluate import steps_of
from coordinator.planning.routes.greedy import LARGE_NODES
from coordinator.planning.routes.model import Route, RouteModel, next_stages

COLUMNS_MAX = 5_000


def lower_bound(model: RouteModel, planner: Planner, expired: Callable[[], bool] = lambda: False) -> float:
    """A makespan that no set of routes can beat; quick bounds only when the routes are too many to list."""
    sends = model.sends
    if model.nodes > LARGE_NODES:
        return _large_bound(model)
    quick = max(
        max(sent * planner.shortest_s(head) for head, sent in zip(model.heads, sends, strict=True)),
        max(_head_bound(model, planner, head) for head in sorted(set(model.heads))),
    )
    classes: dict[tuple[int, int], int] = {}
    for head, sent in zip(model.heads, sends, strict=True):
        classes[head, sent] = classes.get((head, sent), 0) + 1
    columns = _columns(model, sorted(classes))
    if columns is None:
        return quick
    return max(quick, _relaxation(model, classes, columns, quick, expired))


def unplanned_bound(model: RouteModel, planner: Planner) -> float:
    """A makespan that as many microbatches of the same heads cannot beat when none of them keeps to a planned route.

    `lower_bound` is about routes that are repeated: a route's next microbatch waits for the one before. Whoever draws
    each hop anew (SWARM's router) keeps no such order, and may end below it. What is left is a microbatch's way alone,
    the work of its head, and what the nodes of a stage do together.
    """
    microbatches = sum(model.sends)
    work = [f + b for f, b in zip(model.forward_s, model.backward_s, strict=True)]
    stages = [[work[node] for node in model.nodes_of_stage[stage]] for stage in range(1, model.stages)]
    heads = sorted(set(model.heads))
    return max(
        max(planner.shortest_s(head) for head in heads),
        max(_head_bound(model, planner, head) for head in heads),
        # Where each route is on every stage, each microbatch is on one node of it; one that works in no time does all.
        max(
            (microbatches / sum(1 / each for each in stage) for stage in stages if stage and min(stage) > 0),
            default=0.0,
        )
        if model.route_stages == model.stages
        else 0.0,
    )


def all_routes(model: RouteModel, head: int, limit: int) -> list[Route] | None:
    """Every legal route of `head`, or None when there are more than `limit`."""
    partial: list[tuple[Route, int, int, int]] = [((head,), 0, -1, model.swaps_max)]
    for left in range(model.route_stages - 1, 0, -1):
        longer = []
        for route, highest, pending, swaps in partial:
            for stage, high, owed, still in next_stages(model, highest, pending, left, swaps):
                for node in model.nodes_of_stage[stage]:
                    longer.append(((*route, node), high, owed, still))
                if len(longer) > limit:
                    return None
        partial = longer
    return [route for route, _, _, _ in partial]


Column = tuple[int, int, Route, float]
"""(head, sends, route, seconds alone of all its microbatches)"""


def _columns(model: RouteModel, classes: list[tuple[int, int]]) -> list[Column] | None:
    columns: list[Column] = []
    for head, sent in classes:
        routes = all_routes(model, head, COLUMNS_MAX - len(columns))
        if routes is None or len(routes) + len(columns) > COLUMNS_MAX:
            return None
        for route in routes:
            alone = steps_of(model, route).alone_s
            if math.isfinite(alone):
                columns.append((head, sent, route, sent * alone))
    return columns


def _relaxation(
    model: RouteModel,
    classes: dict[tuple[int, int], int],
    columns: list[Column],
    low: float,
    expired: Callable[[], bool],
) -> float:
    """The smallest makespan at which the linear programme is feasible, from below."""
    heads_in = np.full(model.nodes, math.inf)
    tails_out = np.full(model.nodes, math.inf)
    entries: tuple[list[int], list[int], list[float]] = ([], [], [])
    row_of_class = {key: row for row, key in enumerate(sorted(classes))}
    wanted = [classes[key] for key in sorted(classes)] + [float(count) for count in model.visits[1:]]
    loads: tuple[list[int], list[int], list[float]] = ([], [], [])
    uses: list[float] = []
    for number, (head, sent, route, _) in enumerate(columns):
        steps = steps_of(model, route)
        entries[0].append(row_of_class[head, sent])
        entries[1].append(number)
        came = 0.0
        for k, node in enumerate(route):
            if k:
                entries[0].append(len(classes) + model.stage_of_node[node] - 1)
                entries[1].append(number)
            came += steps.link_s[k]
            heads_in[node] = min(heads_in[node], came)
            came += steps.work_s[k]
            last = len(steps.nodes) - 1 - k
            tails_out[node] = min(tails_out[node], steps.tail_s[last] - steps.busy_s[last])
            work = model.forward_s[node] + model.backward_s[node] + (model.loss_s[node] if k == 0 else 0.0)
            loads[0].append(node)
            loads[1].append(number)
            loads[2].append(sent * (work + model.rest_forward_s + model.rest_backward_s))
            uses.append(1.0)
    count = len(columns)
    equal = csr_matrix((np.ones(len(entries[0])), (entries[0], entries[1])), shape=(len(wanted), count))
    load = csr_matrix((loads[2], (loads[0], loads[1])), shape=(model.nodes, count))
    use = csr_matrix((uses, (loads[0], loads[1])), shape=(model.nodes, count))
    alone = np.array([column[3] for column in columns])
    memory = np.array(model.memory, dtype=np.float64)

    def feasible(makespan_s: float) -> bool:
        chosen = np.flatnonzero(alone <= makespan_s)
        if not len(chosen):
            return False
        # A node that is too far away to do anything in time does nothing; it does not make the time too short.
        window = np.maximum(makespan_s - heads_in - tails_out, 0.0)
        rows = np.concatenate([load[:, chosen].toarray(), use[:, chosen].toarray()])
        limits = np.concatenate([window, memory])
        present = np.isfinite(limits)
        answer = linprog(
            np.zeros(len(chosen)),
            A_ub=rows[present],
            b_ub=limits[present],
            A_eq=equal[:, chosen],
            b_eq=wanted,
            method="highs",
        )
        return bool(answer.status != 2)  # only a proof of infeasibility moves the bound

    high = low
    while not feasible(high):
        # Where some route takes no time at all there is nothing to multiply: then on to the quickest that takes some.
        low, high = high, high * 1.3 if high > 0 else float(min(alone[alone > 0], default=math.inf))
        if expired() or high > 1e12:
            return low
    while high - low > 1e-4 * high and not expired():
        middle = (low + high) / 2
        if feasible(middle):
            high = middle
        else:
            low = middle
    return low


def _head_bound(model: RouteModel, planner: Planner, head: int) -> float:
    """Jackson's preemptive schedule of one head: each job's earliest release, its work, its shortest tail."""
    sent = sum(s for h, s in zip(model.heads, model.sends, strict=True) if h == head)
    forward, loss, back = model.forward_s[head], model.loss_s[head], model.backward_s[head]
    alone = planner.shortest_s(head)
    # Between F and B on the head lies everything else; where the loss falls in it is free, so only F and B
    # count, and the loss joins F (its release is no earlier, its tail no longer than what is said here).
    between = alone - forward - back - loss
    jobs = []
    rest_f, rest_b = model.rest_forward_s, model.rest_backward_s
    for _ in range(sent):
        jobs.append((0.0, forward + rest_f, between + loss + back - rest_f))
        jobs.append((forward, loss, back))
        jobs.append((alone - back, back + rest_b, -rest_b))
    return jackson(jobs)


def jackson(jobs: list[tuple[float, float, float]]) -> float:
    """The makespan of the preemptive schedule of (release, work, tail) jobs on one machine (Jackson's rule).

    No schedule of these jobs, preemptive or not, is shorter.
    """
    ordered = sorted(jobs)
    now, end, place = 0.0, 0.0, 0
    heap: list[tuple[float, float]] = []  # (-tail, work left)
    while heap or place < len(ordered):
        if not heap:
            now = max(now, ordered[place][0])
        while place < len(ordered) and ordered[place][0] <= now:
            heappush(heap, (-ordered[place][2], ordered[place][1]))
            place += 1
        tail, work = heappop(heap)
        upcoming = ordered[place][0] if place < len(ordered) else math.inf
        if now + work <= upcoming:
            now += work
            end = max(end, now - tail)
        else:
            heappush(heap, (tail, work - (upcoming - now)))
            now = upcoming
    return end


def _large_bound(model: RouteModel) -> float:
    """For hundreds of nodes: the shortest route over any later stages, and each stage's total work shared
    out.

    Both forget which head a route returns to (the nearest counts), the first also memory and visits.
    """
    link = np.asarray(model.link_s, dtype=np.float64)
    both = link + link.T
    work = np.asarray(model.forward_s) + np.asarray(model.backward_s)
    members = [np.array(nodes, dtype=np.int64) for nodes in model.nodes_of_stage]
    heads = np.array(sorted(set(model.heads)))
    suffix = both[:, heads].min(axis=1)  # from F on a node to B on it with nothing more to visit
    suffix[heads] = 0.0
    for _ in range(model.route_stages - 1):
        longer = np.full(model.nodes, math.inf)
        for stage in range(model.stages):
            for later in range(1, model.stages):
                if later > stage or (model.swaps_max and later == stage - 1):
                    there = members[later]
                    cost = both[np.ix_(members[stage], there)] + (work + suffix)[there]
                    longer[members[stage]] = np.minimum(longer[members[stage]], cost.min(axis=1))
        suffix = longer
    loss = np.asarray(model.loss_s)
    alone = (work + suffix + loss)[heads]
    most = dict.fromkeys(heads.tolist(), 0)
    for head, sent in zip(model.heads, model.sends, strict=True):
        most[head] = max(most[head], sent)
    best = max(float(alone[i]) * most[head] for i, head in enumerate(heads.tolist()))
    nearest = np.full(model.nodes, math.inf)
    for stage in range(1, model.stages):
        if not model.visits[stage]:  # nobody has to go there, however far it is
            continue
        there = members[stage]
        nearest[there] = link[np.ix_(heads, there)].min(axis=0) + link[np.ix_(there, heads)].min(axis=1)
        around = float(nearest[there].min()) if model.route_stages == 2 else 0.0
        fewest = min(model.sends)
        with np.errstate(divide="ignore"):  # a node that takes no time does all of them in none
            share = model.visits[stage] * fewest / float((1 / work[there]).sum())
        best = max(best, share + around)
    return best
