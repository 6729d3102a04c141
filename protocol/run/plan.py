"""The plan of one generation: who holds what, and which way each microbatch goes (design section 5)."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Literal

import msgspec

from protocol.base.bounded import Addresses, Items, Number
from protocol.base.ids import NodeId
from protocol.run.buddies import buddy_place
from protocol.run.changes import RunChange
from protocol.run.course import Course
from protocol.schedule.policies import Policy


class ServerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server of a stage; its place in `StagePlan.servers` is its shard index."""

    node: NodeId
    role: Literal["front", "back", "both"]
    addresses: Addresses
    """host:port, best first."""


class StagePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The servers that answer for one parameter group, in shard order: fronts first, then backs."""

    servers: Items[ServerPlan]

    @cached_property
    def fronts(self) -> tuple[ServerPlan, ...]:
        return tuple(server for server in self.servers if server.role != "back")

    @cached_property
    def backs(self) -> tuple[ServerPlan, ...]:
        return tuple(server for server in self.servers if server.role != "front")


class Neighbours(msgspec.Struct, frozen=True):
    """With whom the servers of a stage keep each other's word on what they hold."""

    backs_before: tuple[NodeId, ...]
    """Back servers of the stages that any route visits right before this one."""
    fronts_after: tuple[NodeId, ...]
    """Front servers of the stages that any route visits right after this one."""
    own_fronts: tuple[NodeId, ...]
    """The stage's own, if any route goes on from here; so are …"""
    own_backs: tuple[NodeId, ...]
    """… these."""
    label_sources: tuple[NodeId, ...]
    """Front servers of where routes begin, if any route ends in this stage that began in another."""


IN_FLIGHT_LIMIT = 128
"""Of `Plan.in_flight_max`. Servers' patience for a result grows with it; a link over a satellite, 0.6 s, at tasks of
50 ms needs about 100."""


def graphs_max(course: Course, stage: int, in_flight_max: int) -> int:
    """`Plan.graphs_max` of a plan that is only thought of."""
    positions = course.graph_positions(stage)
    chunks = sum(course.share(chunk) > 0 for chunk in course.chunks_of(stage))
    ends = course.ends_at(stage) and chunks > 1
    return max(1, in_flight_max * (chunks - ends) // max(1, len(positions)))


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Placement, partition and routes of one generation.

    The roles ask by (step, microbatch, position) and never count stages themselves: a microbatch visits one stage
    after the other along its *route*, and the loss stands at the route's length, where the last visit is. A front
    server keeps what comes into a position, a back server what leaves it.
    """

    generation: Number
    """Grows with every plan; a node refuses a lower one."""
    ledger_generation: Number
    """The generation at which the present ledgers began; work of another one is refused."""
    restore_step: Number
    """The version that the ledgers began from: a checkpoint's, unless `continues` says otherwise; -1: the seed's."""
    stages: Items[StagePlan]
    course: Course
    """What is computed: the chunks of each stage, and the routes through them."""
    in_flight_max: Number = 4
    """Forwards of whole stages that one volunteer may hold without their backward; chunks count as their share."""
    order: Policy = Policy()
    """What nodes do first of what they could do; it changes no weight (`protocol.schedule.live`)."""
    changes: Items[RunChange] = ()
    """What the operator has changed in the run, oldest first."""
    paused: bool = False
    """The operator wants no step opened; those that are open end."""
    held: bool = False
    """No step is opened either, until every server has this plan: one of its changes must be known before."""
    undone: bool = False
    """What was trained after `restore_step` is undone, and comes out otherwise: checkpoints that it led to are none."""
    save: Number = -1
    """The version of which servers write a checkpoint, whenever checkpoints are due: the run is held there, and another
    layout begins from it. -1: none."""
    continues: Number = -1
    """The ledgers whose version `restore_step` these go on from, as servers hold it in memory or on their disks, or
    their buddies; then no checkpoint has to be there. -1: none."""

    def length(self, step: int, microbatch: int) -> int:
        """Visits of a microbatch's route: its loss has this position, and its last visit the one before."""
        return len(self.course.route(step, microbatch))

    def chunk_at(self, step: int, microbatch: int, position: int) -> int:
        """The chunk that a microbatch visits at `position` (the loss's position: the head's)."""
        route = self.course.route(step, microbatch)
        return route[min(position, len(route) - 1)]

    def stage_at(self, step: int, microbatch: int, position: int) -> int:
        """The stage that holds the chunk at `position`."""
        return self.course.chunks[self.chunk_at(step, microbatch, position)].stage

    def front_of(self, step: int, microbatch: int, position: int) -> NodeId:
        """Who keeps what comes into the position (of a loss: the labels)."""
        fronts = self.stages[self.stage_at(step, microbatch, position)].fronts
        return fronts[microbatch % len(fronts)].node

    def back_of(self, step: int, microbatch: int, position: int) -> NodeId:
        """Who keeps what leaves the position; nothing leaves a route's end."""
        backs = self.stages[self.stage_at(step, microbatch, position)].backs
        return backs[microbatch % len(backs)].node

    def ends_at(self, step: int, microbatch: int, position: int) -> bool:
        """Whether the position is the last visit of the route, where the loss is computed."""
        return position == self.length(step, microbatch) - 1

    def neighbours_of(self, stage: int) -> Neighbours:
        """Whom a stage's servers sync with: by every route that the plan has, and the validation's."""
        # The validation goes through the whole model, also where all that is trained skips something.
        routes = [self.course.stages_of(route) for route in (*self.course.routes, self.course.whole_route)]
        before = sorted({a for route in routes for a, b in pairwise(route) if b == stage})
        after = sorted({b for route in routes for a, b in pairwise(route) if a == stage})
        ends = any(route[-1] == stage and route[0] != stage for route in routes)
        own = self.stages[stage]
        return Neighbours(
            backs_before=tuple(server.node for index in before for server in self.stages[index].backs),
            fronts_after=tuple(server.node for index in after for server in self.stages[index].fronts),
            own_fronts=tuple(server.node for server in own.fronts) if after else (),
            own_backs=tuple(server.node for server in own.backs) if after else (),
            label_sources=tuple(server.node for server in self.stages[0].fronts) if ends else (),
        )

    def graphs_max(self, stage: int) -> int:
        """Graphs that a volunteer of the stage may hold *for each position* that the stage is visited at.

        Room is given by position, never in common: a forward at one position waits only for work at later ones, so
        whatever the routes are, no two volunteers can wait for room in a circle.
        """
        return graphs_max(self.course, stage, self.in_flight_max)

    def graphs_wanted(self, stage: int) -> int:
        """Graphs that a volunteer of the stage may hold at all positions together: 0 where each is used at once."""
        return self.graphs_max(stage) * len(self.course.graph_positions(stage))

    def ledger_of(self, stage: int) -> NodeId:
        """The server that holds the stage's ledger: its first front server."""
        return self.stages[stage].fronts[0].node

    def is_ledger(self, node: NodeId) -> bool:
        """Whether it holds the ledger of a stage."""
        return any(self.ledger_of(stage) == node for stage in range(len(self.stages)))

    @property
    def decider(self) -> NodeId:
        """The ledger of stage 0, which owns each step's decision (state-and-trust 4.3)."""
        return self.ledger_of(0)

    def stage_of(self, node: NodeId) -> int | None:
        """The stage whose server `node` is, or None."""
        place = self._places.get(node)
        return None if place is None else place[0]

    def shard_of(self, node: NodeId) -> int | None:
        """The shard that `node` holds in its stage, or None."""
        place = self._places.get(node)
        return None if place is None else place[1]

    @cached_property
    def _places(self) -> dict[NodeId, tuple[int, int]]:
        """Stage and shard of each server. Kept, as everything that all messages are looked up by."""
        found: dict[NodeId, tuple[int, int]] = {}
        for stage, placed in enumerate(self.stages):
            for shard, server in enumerate(placed.servers):
                found.setdefault(server.node, (stage, shard))
        return found

    def buddy_of(self, node: NodeId) -> NodeId | None:
        """The server that keeps copies of the shard of `node`; None: `node` has none, or is all alone."""
        place = self._places.get(node)
        buddy = None if place is None else buddy_place(*place, [len(stage.servers) for stage in self.stages])
        return None if buddy is None else self.stages[buddy[0]].servers[buddy[1]].node

    def goes_on_from(self, other: Plan) -> bool:
        """Whether these ledgers begin with a version that those of `other` have: they continue them, or both have begun
        with the same version of the same ledgers."""
        same = (other.continues, other.restore_step) == (self.continues, self.restore_step)
        return self.continues >= 0 and (same or other.ledger_generation == self.continues)

    def server_nodes(self) -> tuple[NodeId, ...]:
        """Every server, stage by stage."""
        return tuple(server.node for stage in self.stages for server in stage.servers)

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        place = self._places.get(node)
        return () if place is None else self.stages[place[0]].servers[place[1]].addresses
