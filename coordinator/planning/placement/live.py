"""The plan in force of a whole swarm, placement and routes together, fenced by generations.

A change first finds the role that is left a machine (`change`), then plans again the routes that went through whoever
moved or left (`coordinator.planning.routes.change`); all other routes stay, over the servers that their stages have
now. Every change in force raises the generation, and one that was made for an older generation is refused: what was
planned in the background while something else happened is thrown away instead of being mixed in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from coordinator.planning.placement import change
from coordinator.planning.placement.change import PlacementRepair, StateBytes
from coordinator.planning.placement.cost import Placement
from coordinator.planning.placement.swarm import SwarmRoutes, member_links, member_model, member_work
from coordinator.planning.routes.change import Repair, drop_gone, relieve
from coordinator.planning.routes.model import Route
from coordinator.planning.routes.search import RoutesAnswer, search_routes
from protocol.base.errors import LocalProtocolError

REBUILT_SHARE = 0.25
"""When more of the members than this load something new, the routes are searched from scratch and renumbered."""


@dataclass(frozen=True)
class SwarmRepair:
    """What a change would put in force. `routes.model` is over the nodes of `members`, old numbers kept."""

    placement: PlacementRepair
    members: tuple[int, ...]
    routes: Repair

    @property
    def sentence(self) -> str:
        return (
            f"{self.placement.sentence}; {len(self.routes.routes) - self.routes.changed} of "
            f"{len(self.routes.routes)} routes stay"
        )


@dataclass
class LiveSwarm:
    """Placement, routes and generation. A node of the routes is a machine in a stage; repairs never renumber nodes."""

    generation: int
    placement: Placement
    gone: frozenset[int]
    state: StateBytes
    swarm: SwarmRoutes
    routes: tuple[Route, ...]
    makespan_s: float

    @classmethod
    def of(
        cls,
        placement: Placement,
        swarm: SwarmRoutes,
        answer: RoutesAnswer,
        state: StateBytes,
        generation: int = 1,
        gone: frozenset[int] = frozenset(),
    ) -> LiveSwarm:
        """What a search found, put in force; `gone` are machines of the world that are not there yet."""
        return cls(generation, change.as_it_is(placement), gone, state, swarm, answer.routes, answer.makespan_s)

    def drop(self, machine: int) -> SwarmRepair:
        """The plan without `machine`, a server or a volunteer; raises `BadInputError` naming what lacks whom."""
        return self._followed(change.drop(self.placement, self.gone, machine, self.state))

    def join(self, machine: int) -> SwarmRepair:
        """The plan with `machine` there, in a place or spare."""
        return self._followed(change.join(self.placement, self.gone, machine, self.state))

    def slow_down(self, machine: int, power_factor: float = 1.0, link_factor: float = 1.0) -> SwarmRepair:
        """The plan with `machine` so many times slower."""
        repair = change.slow_down(self.placement, self.gone, machine, self.state, power_factor, link_factor)
        return self._followed(repair, machine)

    def improve(self, seed: int, budget_s: float) -> SwarmRepair | None:
        """A better placement, routes and all, or None when none pays; for the background."""
        repair = change.improve(self.placement, self.gone, self.state, seed, 0.6 * budget_s)
        if repair is None:
            return None
        same_count = len(repair.placement.stages) == len(self.placement.stages)
        if same_count and len(repair.moved.bytes_of) <= REBUILT_SHARE * len(self.swarm.members):
            return self._followed(repair)
        model = self.swarm.model
        swarm = member_model(
            repair.placement.costs.world,
            repair.placement,
            skip_stages=repair.placement.costs.world.skip_stages,
            memory=max(model.memory),
            swaps_max=model.swaps_max,
        )
        found = search_routes(swarm.model, seed, 0.4 * budget_s)
        redone = sum(len(route) for route in self.routes)
        routes = Repair(swarm.model, found.routes, (-1,) * len(found.routes), found.makespan_s, redone)
        return SwarmRepair(repair, swarm.members, routes)

    def apply(self, repair: SwarmRepair, made_for: int) -> None:
        """Puts a repair in force. Raises `LocalProtocolError` when it was made for another generation."""
        if made_for != self.generation:
            raise LocalProtocolError(f"a plan made for generation {made_for} came at generation {self.generation}")
        self.generation += 1
        self.placement, self.gone = repair.placement.placement, repair.placement.gone
        self.swarm = SwarmRoutes(repair.routes.model, repair.members)
        self.routes, self.makespan_s = repair.routes.routes, repair.routes.makespan_s
        self.check()

    def check(self) -> None:
        """Raises if an invariant is broken."""
        world = self.placement.costs.world
        placed = [j for stage in self.placement.stages for j in stage.servers]
        placed += [world.servers + v for stage in self.placement.stages for v in stage.volunteers]
        assert len(set(placed)) == len(placed), "a machine stands in two stages"
        assert not self.gone & set(placed), "somebody who is gone stands in a stage"
        assert all(stage.front and stage.back for stage in self.placement.stages), "a stage lacks a role"
        assert sum(self.placement.layers()) == world.layers, "layers are lost"
        model = self.swarm.model
        there = {
            (self.swarm.members[node], model.stage_of_node[node])
            for node in range(model.nodes)
            if node not in model.gone
        }
        assert there == {(m, change.stage_of_machine(self.placement, m)) for m in placed}, "routes know other members"

    def _followed(self, repair: PlacementRepair, slowed: int | None = None) -> SwarmRepair:
        """The routes after a change of the placement that keeps the number of stages."""
        model, members = self.swarm.model, list(self.swarm.members)
        world = repair.placement.costs.world
        stage_of, memory = list(model.stage_of_node), list(model.memory)
        wanted = {
            (machine, k)
            for k, stage in enumerate(repair.placement.stages)
            for machine in (*stage.servers, *(world.servers + v for v in stage.volunteers))
        }
        known = {(machine, stage): node for node, (machine, stage) in enumerate(zip(members, stage_of, strict=True))}
        for machine, k in sorted(wanted - set(known)):
            members.append(machine)
            stage_of.append(k)
            memory.append(max(model.memory))
        gone = frozenset(node for node, place in enumerate(zip(members, stage_of, strict=True)) if place not in wanted)
        forward_s, backward_s, loss_s = member_work(world, repair.placement, members, stage_of)
        links = model.link_s
        if repair.changed or len(members) > len(model.memory):
            before = np.asarray(links, dtype=np.float64)
            links = member_links(world, repair.placement, members, stage_of, before, repair.changed)
        after = replace(
            model,
            stage_of_node=tuple(stage_of),
            forward_s=forward_s,
            backward_s=backward_s,
            loss_s=loss_s,
            link_s=links,
            memory=tuple(memory),
            gone=gone,
        )
        routes = drop_gone(after, self.routes)
        if slowed is not None and not routes.changed:
            node = next((n for n, m in enumerate(members) if m == slowed and n not in gone), None)
            if node is not None:
                routes = relieve(after, self.routes, node)
        return SwarmRepair(repair, tuple(members), routes)
