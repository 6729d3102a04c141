"""What all roles of one server share: its place in the plan, the run, the open steps, the outbox."""

from __future__ import annotations

from dataclasses import dataclass

from node.outbox import Outbox
from protocol.ids import NodeId
from protocol.plan import Plan
from protocol.run import RunConfig

CLOSED_LAG_STEPS = 2
"""How far this server's `closed` can lag behind the decider's while a neighbour already sends work of a newer step:
the word that a step is closed comes by another link than the work. A third cannot close without our own commit."""


@dataclass(slots=True)
class StageContext:
    """Changed only by the server machine: the plan when a new one comes, the steps when they open and close."""

    node: NodeId
    config: RunConfig
    plan: Plan
    stage: int
    shard: int
    out: Outbox
    opened: int = -1
    """Newest step that this server knows open."""
    closed: int = -1
    """Newest step that every stage has committed."""

    @property
    def generation(self) -> int:
        """The ledger generation: what all work is fenced with."""
        return self.plan.ledger_generation

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == len(self.plan.stages) - 1

    @property
    def ledger(self) -> NodeId:
        return self.plan.ledger_of(self.stage)

    @property
    def stage_servers(self) -> tuple[NodeId, ...]:
        return tuple(server.node for server in self.plan.stages[self.stage].servers)

    def in_window(self, step: int) -> bool:
        """Whether a message about `step` can be of use: not closed, and not further than any step can be open."""
        newest = self.closed + CLOSED_LAG_STEPS + 1 + self.config.batch.delay
        return self.closed < step <= newest and step < self.config.steps

    def is_front_of(self, stage: int, microbatch: int) -> bool:
        return self.plan.front_of(stage, microbatch) == self.node

    def is_back_of(self, stage: int, microbatch: int) -> bool:
        return self.plan.back_of(stage, microbatch) == self.node
