"""Conflict-based search (Sharon et al. 2015, in continuous time as Andreychuk et al. 2021) for one wave of
routes.

Every microbatch is planned alone by A*; where two of them collide, or a stage or node is on too many routes,
the search branches and only the microbatch that got a new restriction is planned again:

* two steps overlap on a node: either the one may not start before the other would be over, or the other way
  round;
* a stage or node is on too many routes: one of these routes may not use it, or it must.

Both children are always kept, so nothing is lost, and since A* is exact the cheapest open node is a valid
bound. (The published scheduler writes both children to the same place, so the second overwrites the first.)
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from coordinator.planning.routes.astar import ANY, Choice, Forbidden, Plan, Planner
from coordinator.planning.routes.evaluate import steps_of
from coordinator.planning.routes.model import RouteModel

OPEN_MAX = 20_000


class Conflict(NamedTuple):
    """Why a set of plans is no answer: for `time`, both are (route, step); else `first` is the route to
    branch on.
    """

    kind: Literal["stage", "node", "time"]
    place: int
    first: tuple[int, int]
    second: tuple[int, int]


@dataclass(frozen=True)
class TreeNode:
    """One node of the tree: a plan per route, and the restrictions each was made under."""

    plans: tuple[Plan, ...]
    choices: tuple[Choice, ...]
    delays: tuple[Forbidden, ...]

    @property
    def cost_s(self) -> float:
        return max(plan.end_s for plan in self.plans)


@dataclass(frozen=True)
class Outcome:
    """How far the search came; `complete` when the tree was searched to its end."""

    bound_s: float
    nodes: int
    complete: bool


def conflict_search(
    model: RouteModel,
    planner: Planner,
    bound_s: float,
    incumbent_s: float,
    found: Callable[[Sequence[Plan], bool], float],
    expired: Callable[[], bool],
    nodes_max: int,
) -> Outcome:
    """Searches for routes that end before `incumbent_s`.

    `found(plans, clean)` is told every set of routes that keeps CC3 and TC1 (`clean`: and does not collide)
    and answers the makespan to beat from now on. Stops when nothing better can be left, or at a limit.
    """
    root_plans = []
    for head in model.heads:
        plan = planner.plan(head, Forbidden())
        if plan is None:
            return Outcome(bound_s, 0, True)
        root_plans.append(plan)
    nothing = Forbidden()
    count = len(model.heads)
    root = TreeNode(tuple(root_plans), (ANY,) * count, (nothing,) * count)
    open_nodes: list[tuple[float, int, int, TreeNode, Conflict | None]] = []
    number = 0
    expanded = 0

    def push(node: TreeNode) -> None:
        nonlocal number, incumbent_s
        conflict, conflicts = first_conflict(model, node)
        if conflict is None or conflict.kind == "time":
            incumbent_s = min(incumbent_s, found(node.plans, conflict is None))
        if conflict is not None and node.cost_s < incumbent_s:
            heappush(open_nodes, (max(bound_s, node.cost_s), conflicts, -number, node, conflict))
            number += 1

    def proven(least_s: float) -> float:
        """What the open nodes prove; nothing new when some plan was not the best one for its restrictions."""
        return max(bound_s, least_s) if planner.exact else bound_s

    dropped_s = math.inf
    push(root)
    while open_nodes:
        least = min(open_nodes[0][0], dropped_s)
        if least >= incumbent_s * (1 - 1e-12):
            break
        if expired() or expanded >= nodes_max:
            return Outcome(proven(least), expanded, False)
        _, _, _, node, conflict = heappop(open_nodes)
        expanded += 1
        assert conflict is not None
        for child in children(model, planner, node, conflict, incumbent_s):
            push(child)
        if len(open_nodes) > OPEN_MAX:  # keep the most promising half; what is dropped still limits the bound
            open_nodes.sort()
            dropped_s = min(dropped_s, open_nodes[OPEN_MAX // 2][0])
            del open_nodes[OPEN_MAX // 2 :]
            heapify(open_nodes)
    return Outcome(proven(min(incumbent_s, dropped_s)), expanded, True)


def first_conflict(model: RouteModel, node: TreeNode) -> tuple[Conflict | None, int]:
    """The conflict to branch on, and how many there are: stages first, then memory, then the earliest
    collision.
    """
    visits: list[list[int]] = [[] for _ in range(model.stages)]
    used: list[list[int]] = [[] for _ in range(model.nodes)]
    for number, plan in enumerate(node.plans):
        for step_node in plan.route:
            used[step_node].append(number)
            visits[model.stage_of_node[step_node]].append(number)
    found: Conflict | None = None
    count = 0
    for stage in range(1, model.stages):
        surplus = len(visits[stage]) - model.visits[stage]
        if surplus > 0:
            count += surplus
            free = [n for n in visits[stage] if stage not in node.choices[n].must_stages]
            if found is None and free:
                agent = min(free, key=lambda n: (node.plans[n].end_s, n))
                found = Conflict("stage", stage, (agent, 0), (agent, 0))
    for place, numbers in enumerate(used):
        surplus = len(numbers) - model.memory[place]
        if surplus > 0:
            count += surplus
            free = [n for n in numbers if place not in node.choices[n].must_nodes]
            if found is None and free:
                agent = min(free, key=lambda n: (node.plans[n].end_s, n))
                found = Conflict("node", place, (agent, 0), (agent, 0))
    if found is not None:
        return found, count
    busy: list[list[tuple[float, float, int, int]]] = [[] for _ in range(model.nodes)]
    for number, plan in enumerate(node.plans):
        steps = steps_of(model, plan.route)
        for k, (place, start) in enumerate(zip(steps.nodes, plan.starts, strict=True)):
            busy[place].append((start, start + steps.busy_s[k], number, k))
    earliest = math.inf
    for place, intervals in enumerate(busy):
        intervals.sort()
        for one, two in itertools.pairwise(intervals):
            if two[0] < one[1] - 1e-9 and one[2] != two[2]:
                count += 1
                if two[0] < earliest:
                    earliest = two[0]
                    found = Conflict("time", place, one[2:], two[2:])
    return found, count


def children(model: RouteModel, planner: Planner, node: TreeNode, conflict: Conflict, below_s: float) -> list[TreeNode]:
    """The two ways out of a conflict; those without a route that ends before `below_s` are left out."""
    found = []
    if conflict.kind == "time":
        for (agent, k), (other, j) in ((conflict.first, conflict.second), (conflict.second, conflict.first)):
            mine, theirs = node.plans[agent], node.plans[other]
            length = len(mine.route)
            op = "F" if k < length else "L" if k == length else "B"
            over = theirs.starts[j] + steps_of(model, theirs.route).busy_s[j]
            delays = copy.deepcopy(node.delays[agent])
            delays.add(conflict.place, op, mine.starts[k], over)
            found.append(_again(planner, node, agent, node.choices[agent], delays, below_s))
        return [child for child in found if child is not None]
    agent = conflict.first[0]
    for must in (False, True):
        choice = node.choices[agent]
        place = frozenset((conflict.place,))
        if conflict.kind == "stage":
            choice = (
                choice._replace(must_stages=choice.must_stages | place)
                if must
                else choice._replace(not_stages=choice.not_stages | place)
            )
        elif must:
            choice = choice._replace(must_nodes=choice.must_nodes | place)
        else:
            choice = choice._replace(not_nodes=choice.not_nodes | place)
        if must:  # its plan uses the place already, so it stays as it is
            choices = (*node.choices[:agent], choice, *node.choices[agent + 1 :])
            if _musts_fit(model, choices, conflict):
                found.append(TreeNode(node.plans, choices, node.delays))
        else:
            found.append(_again(planner, node, agent, choice, node.delays[agent], below_s))
    return [child for child in found if child is not None]


def _musts_fit(model: RouteModel, choices: Sequence[Choice], conflict: Conflict) -> bool:
    if conflict.kind == "stage":
        return sum(conflict.place in c.must_stages for c in choices) <= model.visits[conflict.place]
    return sum(conflict.place in c.must_nodes for c in choices) <= model.memory[conflict.place]


def _again(
    planner: Planner, node: TreeNode, agent: int, choice: Choice, delays: Forbidden, below_s: float
) -> TreeNode | None:
    """The node with one route planned again."""
    plan = planner.plan(planner.model.heads[agent], delays, choice, below_s=below_s)
    if plan is None:
        return None
    return TreeNode(
        (*node.plans[:agent], plan, *node.plans[agent + 1 :]),
        (*node.choices[:agent], choice, *node.choices[agent + 1 :]),
        (*node.delays[:agent], delays, *node.delays[agent + 1 :]),
    )
