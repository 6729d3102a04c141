"""What a route search is given: nodes with one stage each, links, heads, and the rules a set of routes obeys.

SkipPipe's rules, cleaned up (Blagoev et al., section 3): a route starts on its head in stage 0, visits
`route_stages` - 1 other stages once each, in ascending order up to `swaps_max` exchanges of two neighbours in
the route whose stage numbers differ by one (two exchanges can then never overlap), returns to the head for
the loss, and runs backward over the same nodes (CC1, CC2). Every other stage is on exactly its `visits`
routes (CC3), a node is on at most `memory` routes (TC1) and does one thing at a time (TC2). Compute and
memory differ from node to node.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from coordinator.planning.problems import Problem
from protocol.base.errors import BadInputError
from protocol.schedule.profile import Floats

Route = tuple[int, ...]
"""Nodes in the order of the forward pass, the head first."""

NODES_MAX = 20_000
ROUTES_MAX = 100_000
ORDERS_LISTED_MAX = 2_000
"""Legal orders of a route's stages from which one is drawn by listing them; with many swaps there are billions."""


class RoutesProblem(Problem, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `routes` problem file; lists by node, `heads` by microbatch."""

    stage_of_node: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_factor: float
    loss_factor: float
    link_s: tuple[tuple[float, ...], ...]
    heads: tuple[int, ...]
    route_stages: int
    swaps_max: int
    memory: tuple[int, ...]
    visits_per_stage: int

    def validate(self) -> None:
        nodes = len(self.stage_of_node)
        if not 1 <= nodes <= NODES_MAX:
            raise BadInputError(f"stage_of_node: {nodes} nodes, must be 1 to {NODES_MAX}")
        for key, length in (("forward_s", len(self.forward_s)), ("memory", len(self.memory))):
            if length != nodes:
                raise BadInputError(f"{key}: {length} entries for {nodes} nodes")
        if len(self.link_s) != nodes or any(len(row) != nodes for row in self.link_s):
            raise BadInputError(f"link_s: must have {nodes} rows of {nodes} numbers")
        if not 1 <= len(self.heads) <= ROUTES_MAX:
            raise BadInputError(f"heads: {len(self.heads)} microbatches, must be 1 to {ROUTES_MAX}")
        if (highest := max(self.stage_of_node)) >= NODES_MAX:  # before a list of so many stages is made
            raise BadInputError(f"stage_of_node: {highest} is not below {NODES_MAX}")
        self.model().check()

    def model(self) -> RouteModel:
        """The model; what is more than any route or any set of routes can use counts as just enough."""
        stages = max(self.stage_of_node) + 1
        return RouteModel(
            stage_of_node=self.stage_of_node,
            forward_s=self.forward_s,
            backward_s=tuple(self.backward_factor * work for work in self.forward_s),
            loss_s=tuple(self.loss_factor * work for work in self.forward_s),
            link_s=self.link_s,
            heads=self.heads,
            route_stages=self.route_stages,
            swaps_max=min(self.swaps_max, stages),
            memory=tuple(min(room, len(self.heads)) for room in self.memory),
            visits=(len(self.heads),) + (self.visits_per_stage,) * (stages - 1),
        )


@dataclass(frozen=True)
class RouteModel:
    """One wave of routes to find; `repeats[a]` microbatches follow route a, each when the one before is done.

    All times in seconds; `link_s[i][j]` is from node i to node j. `rest_forward_s` and `rest_backward_s` keep
    a node busy after an operation whose result is already on its way.
    """

    stage_of_node: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    loss_s: tuple[float, ...]
    link_s: Sequence[Sequence[float]] | Floats
    heads: tuple[int, ...]
    route_stages: int
    swaps_max: int
    memory: tuple[int, ...]
    visits: tuple[int, ...]
    repeats: tuple[int, ...] = ()
    rest_forward_s: float = 0.0
    rest_backward_s: float = 0.0
    gone: frozenset[int] = field(default=frozenset())

    @property
    def nodes(self) -> int:
        return len(self.stage_of_node)

    @property
    def stages(self) -> int:
        return len(self.visits)

    @cached_property
    def sends(self) -> tuple[int, ...]:
        """Microbatches per route."""
        return self.repeats or (1,) * len(self.heads)

    @cached_property
    def nodes_of_stage(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each stage that are there, ascending."""
        members: list[list[int]] = [[] for _ in range(self.stages)]
        for node, stage in enumerate(self.stage_of_node):
            if node not in self.gone:
                members[stage].append(node)
        return tuple(tuple(nodes) for nodes in members)

    def check(self) -> None:
        """Raises `BadInputError` with what is missing when no set of routes can obey the rules."""
        if min(self.stage_of_node) < 0 or set(self.stage_of_node) != set(range(self.stages)):
            raise BadInputError("stage_of_node: every stage from 0 to the highest needs a node")
        for head in self.heads:
            if not 0 <= head < self.nodes or self.stage_of_node[head] != 0 or head in self.gone:
                raise BadInputError(f"heads: node {head} is not a present node of stage 0")
        if not 1 <= self.route_stages <= self.stages:
            raise BadInputError(f"route_stages: {self.route_stages}, must be 1 to {self.stages} stages")
        if self.swaps_max < 0:
            raise BadInputError("swaps_max: must be at least 0")
        if sum(self.visits[1:]) != len(self.heads) * (self.route_stages - 1):
            raise BadInputError(
                f"visits_per_stage: {sum(self.visits[1:])} visits in all, but {len(self.heads)} routes of "
                f"{self.route_stages} stages make {len(self.heads) * (self.route_stages - 1)}"
            )
        sent = [0] * self.nodes
        for head in self.heads:
            sent[head] += 1
            if sent[head] > self.memory[head]:
                raise BadInputError(f"memory: head {head} starts {sent[head]} routes and holds {self.memory[head]}")
        for stage in range(1, self.stages):
            if self.visits[stage] > len(self.heads):
                raise BadInputError(f"visits_per_stage: more visits to stage {stage} than routes")
            room = sum(self.memory[node] for node in self.nodes_of_stage[stage])
            if room < self.visits[stage]:
                raise BadInputError(
                    f"memory: stage {stage} holds {room} routes and needs {self.visits[stage]}: "
                    f"{self.visits[stage] - room} more places are missing"
                )

    def without(self, gone: frozenset[int]) -> RouteModel:
        """The same model after the nodes `gone` left."""
        return replace(self, gone=self.gone | gone)


def even_visits(routes: int, stages: int, route_stages: int) -> tuple[int, ...]:
    """Visits per stage, stage 0 first: equal, or as equal as whole numbers allow (the surplus goes low)."""
    if stages == 1:
        return (routes,)
    share, surplus = divmod(routes * (route_stages - 1), stages - 1)
    return (routes, *(share + (stage < surplus) for stage in range(stages - 1)))


def next_stages(
    model: RouteModel, last: int, pending: int, left: int, swaps: int
) -> Iterator[tuple[int, int, int, int]]:
    """The legal next steps of a partial route as (stage, its new highest, pending, swaps left).

    `last` is the highest stage visited, `pending` the stage that an exchange still owes (-1: none), `left`
    how many stages are to come and `swaps` how many exchanges are left.
    """
    if pending >= 0:
        yield pending, pending + 1, -1, swaps
        return
    for stage in range(last + 1, model.stages - left + 1):
        yield stage, stage, -1, swaps
    if swaps and left >= 2:
        for stage in range(last + 2, model.stages - left + 2):
            yield stage, stage, stage - 1, swaps - 1


def swapped_orders(chosen: tuple[int, ...], swaps_max: int) -> Iterator[tuple[int, ...]]:
    """The legal orders of an ascending set of stages: as it is, then with disjoint neighbours exchanged."""
    places = [i for i in range(len(chosen) - 1) if chosen[i + 1] == chosen[i] + 1]
    for count in range(min(swaps_max, (len(places) + 1) // 2) + 1):
        for picked in _apart(places, count):
            yield _exchanged(chosen, picked)


def drawn_order(chosen: tuple[int, ...], swaps_max: int, rng: random.Random) -> tuple[int, ...]:
    """One of `swapped_orders`: any of them alike, or where they are more than `ORDERS_LISTED_MAX`, some drawn."""
    orders = list(islice(swapped_orders(chosen, swaps_max), ORDERS_LISTED_MAX + 1))
    if len(orders) <= ORDERS_LISTED_MAX:
        return rng.choice(orders)
    places = [i for i in range(len(chosen) - 1) if chosen[i + 1] == chosen[i] + 1]
    wanted = rng.randint(0, min(swaps_max, (len(places) + 1) // 2))
    rng.shuffle(places)
    picked: list[int] = []
    for place in places:
        if len(picked) < wanted and all(abs(place - other) > 1 for other in picked):
            picked.append(place)
    return _exchanged(chosen, picked)


def _apart(places: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """All choices of `count` of these ascending places no two of which are neighbours, in lexicographic order."""
    if not count:
        yield ()
        return
    for number, place in enumerate(places):
        later = places[number + 1 :]
        if later and later[0] == place + 1:
            later = later[1:]
        for rest in _apart(later, count - 1):
            yield (place, *rest)


def _exchanged(chosen: tuple[int, ...], places: Sequence[int]) -> tuple[int, ...]:
    order = list(chosen)
    for place in places:
        order[place], order[place + 1] = order[place + 1], order[place]
    return tuple(order)
