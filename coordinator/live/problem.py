"""What the coordinator asks a planner, and what it is answered: the one door between the live side and `planning`."""

from __future__ import annotations

import msgspec

from coordinator.live.plan_builder import Guidance
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.run.plan import IN_FLIGHT_LIMIT
from protocol.run.run import RunConfig
from protocol.schedule.policies import Policy
from protocol.schedule.profile import NetworkFile


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A run without a plan, or one that is to be laid out anew, and who is there for it."""

    config: RunConfig
    """With what is open in it: the number of stages, where the model is cut, or what nodes do first."""
    network: NetworkFile
    """Servers in the order in which a plan without a planner would seat them, then volunteers who wait or work."""
    keeps_seats: bool = False
    """Whether servers sit in that order whatever their lines are: those of a run have the data of their stages."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for a problem. Seconds are those of a step by the planner's cost of pools."""

    servers: tuple[tuple[NodeId, ...], ...]
    """Of each stage, in shard order: fronts first."""
    edges: tuple[int, ...]
    """The block that begins each part of the model but the first; what `stages.cut` says."""
    step_s: float
    even_step_s: float
    """Of the even plan: as many stages, blocks cut evenly, servers as they came."""
    bound_s: float
    """No plan of these machines with these numbers of stages has a shorter step."""
    reason: str
    """What sets the pace, and why nodes should work as below, as a sentence without its full stop."""
    guidance: Guidance = Guidance(Policy())

    @property
    def fraction_of_bound(self) -> float:
        """1.0 where no plan is faster."""
        return min(1.0, self.bound_s / self.step_s) if self.step_s > 0 else 1.0

    def fault(self, problem: Problem) -> str:
        """Why this is no plan for `problem`, or nothing: a planner is another process, and may be another program."""
        stages = problem.config.stages
        shards = stages.front_servers + stages.back_servers
        known = {machine.name for machine in problem.network.machines if machine.role == "server"}
        placed = [server for servers in self.servers for server in servers]
        if not self.servers or (stages.count and len(self.servers) != stages.count):
            return f"{len(self.servers)} stages"
        if any(len(servers) != shards for servers in self.servers):
            return f"stages of {sorted({len(servers) for servers in self.servers})} servers, not {shards}"
        if len(set(placed)) != len(placed) or not known.issuperset(placed):
            return "a server twice, or one that nobody knows"
        if not 0 <= self.guidance.in_flight_max <= IN_FLIGHT_LIMIT:
            return f"{self.guidance.in_flight_max} forwards in flight"
        try:
            problem.config.settled(len(self.servers), self.edges).validate()
        except BadInputError as error:
            return str(error)
        return ""
