"""The leases that a volunteer asks for ahead: how many more, of what sort, from which server.

A forward leaves a graph in memory until its backward, so there is room for so many *at each position* of the stage
(`Plan.graphs_max`), and no more are asked for than the device gets to while others come (`lookahead.py`). Whatever else
(route ends, backwards of others) leaves nothing behind and needs no room, but should not be hoarded. The two never
share a slot: route ends are what frees graphs. The validation has slots of its own, since a lease of it may wait for a
while: training goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator

from node.volunteer.holdings import Holdings
from node.volunteer.leases import Held, is_validation, leaves_graph
from node.volunteer.lookahead import Lookahead
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Lease, Ready
from protocol.run.plan import Plan

AHEAD = 2
"""Work without a graph asked for ahead from each server: one runs, one is on its way."""
RUN = -1
"""Stands where a position stands for forwards."""
VALIDATION = -2
"""The same."""


class Slots:
    """What was given to the linked servers of one stage and not used yet, and what more may be given."""

    def __init__(self, plan: Plan, stage: int, validates: bool = False) -> None:
        """`validates`: whether the run has a validation."""
        self._validates = validates
        self._generation = plan.ledger_generation
        self._fronts = tuple(server.node for server in plan.stages[stage].fronts)
        self._backs = tuple(server.node for server in plan.stages[stage].backs)
        self._positions = plan.course.graph_positions(stage)
        self._graphs_max = plan.graphs_max(stage)
        self._ends_here = plan.course.ends_at(stage)
        self._lookahead = Lookahead()
        self._given: dict[NodeId, Counter[int]] = {}
        """By position of a forward, or `RUN`, or `VALIDATION`."""
        self._idle: tuple[list[NodeId], int | None] | None = None
        """Whom an idle device has given all that it can, and what fits into it; nothing, once that may have changed."""

    def link_up(self, server: NodeId) -> None:
        """A new link starts with none."""
        self._idle = None
        self._given[server] = Counter()

    def link_down(self, server: NodeId) -> None:
        self._idle = None
        self._given.pop(server, None)
        self._lookahead.link_down(server)

    def used(self, issuer: NodeId, lease: Lease, now: float) -> None:
        """A lease has come that needed one."""
        self._idle = None
        other = VALIDATION if is_validation(lease) else RUN
        place = lease.tasks[0].position if leaves_graph(lease) else other
        if place >= 0:
            self._lookahead.came(issuer, now)
        self._given[issuer][place] = max(0, self._given[issuer][place] - 1)

    def with_room(self, ready: list[Held], graphs: Collection[TaskId], fits: int | None) -> list[Held]:
        """Those of `ready` for which the device has memory.

        Each front may fill the room alone, so several may have given more forwards than it holds: what is too much
        waits for backwards, which wait for other positions only. One whose graph is kept takes its own place.
        """
        if fits is None or len(graphs) < self._room(fits):
            return ready
        kept = Counter(task.position for task in graphs)
        full = [position for position in self._positions if kept[position] >= self._room(fits)]
        return [each for each in ready if not (_begins_graph(each, graphs) and each.lease.tasks[0].position in full)]

    def _room(self, fits: int) -> int:
        """Of each position, in a device that holds so many graphs."""
        return max(1, fits // max(1, len(self._positions)))

    def give(
        self,
        servers: list[NodeId],
        holdings: Holdings,
        owed: list[TaskId],
        fits: int | None,
        has_version: Callable[[int], bool],
        now: float,
    ) -> Iterator[tuple[NodeId, Ready]]:
        """What to say to whom now.

        Args:
            servers: those that take work.
            holdings: leases that wait or run here, and graphs that are kept.
            owed: forwards whose graph is kept for a weight gradient.
            fits: how many fit into the device, at all positions together; None where that is not known.
            has_version: whether these parameters are here. What waits for others holds nothing up.
        """
        held, graphs = holdings.all(), [*holdings.graphs, *owed]
        self._lookahead.device_is_at(holdings.running, now)
        if self._idle == (servers, fits) and not held and not graphs:
            return  # a device without work hears a lot: twenty servers, and each tells of every step
        self._idle = None
        forwards = Counter(
            each.lease.tasks[0].position for each in held if leaves_graph(each.lease) or each.keeps_graph
        )
        kept = Counter(task.position for task in graphs)
        room = self._graphs_max if fits is None else min(self._graphs_max, self._room(fits))
        ends = sum(len(each.lease.tasks) > 1 and not is_validation(each.lease) for each in held)
        validated = sum(is_validation(each.lease) for each in held)
        again = Counter(each.issuer for each in held if each.lease.tasks[0].op == "B" and each.takes_slot)
        unbegun = Counter(
            each.lease.tasks[0].position
            for each in held
            if leaves_graph(each.lease) and each.takes_slot and not each.is_begun and has_version(each.lease.version)
        )
        ahead = self._lookahead.forwards_max or room
        # Each front may fill the room alone: slots idle at one would starve the others.
        of_fronts = [
            (place, min(room - kept[place] - forwards[place], ahead - unbegun[place])) for place in self._positions
        ]
        of_validation = [(VALIDATION, AHEAD - validated)] if self._validates else []
        for server in servers:
            front = server in self._fronts
            wanted = of_fronts if front else []
            if (front and self._ends_here) or (self._positions and server in self._backs):
                wanted = [*wanted, (RUN, AHEAD - ends - again[server])]
            if front:
                wanted = [*wanted, *of_validation]
            given = self._given[server]
            more = {place: count - given[place] for place, count in wanted if count > given[place]}
            if more:
                given.update(more)
                runs, validation = more.pop(RUN, 0), more.pop(VALIDATION, 0)
                self._lookahead.asked(server, sum(more.values()), now)
                ready = Ready(
                    ledger_generation=self._generation,
                    hello=False,
                    slots=runs,
                    graph_slots=tuple(more.items()),
                    validation_slots=validation,
                )
                yield server, ready
        if not held and not graphs:
            self._idle = servers, fits


def _begins_graph(held: Held, graphs: Collection[TaskId]) -> bool:
    """Whether one more graph is on the device once it has begun."""
    has_begun = held.tenancy is not None and held.tenancy.begun
    return leaves_graph(held.lease) and not has_begun and held.lease.tasks[0] not in graphs
