"""The plan of one generation: who holds what, and which way each microbatch goes (design section 5)."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.ids import NodeId


class ServerPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server of a stage; its place in `StagePlan.servers` is its shard index."""

    node: NodeId
    role: Literal["front", "back"]
    addresses: tuple[str, ...]
    """host:port, best first."""


class StagePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A range of sub-layer blocks and the servers that answer for it: fronts first, then backs."""

    first_block: int
    end_block: int
    servers: tuple[ServerPlan, ...]

    @property
    def fronts(self) -> tuple[ServerPlan, ...]:
        return tuple(server for server in self.servers if server.role == "front")

    @property
    def backs(self) -> tuple[ServerPlan, ...]:
        return tuple(server for server in self.servers if server.role == "back")


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Placement, partition and routes of one generation.

    Every route of today's plans visits the stages in order, so position and stage agree and the loss (position
    `len(stages)`) is computed where the last stage is; the roles ask this class, never the numbers themselves.
    """

    generation: int
    """Grows with every plan; a node refuses a lower one."""
    ledger_generation: int
    """The generation at which the present ledgers began; work of another one is refused."""
    restore_step: int
    """The checkpoint that the ledgers began from, or -1 when they began from the seeded weights."""
    stages: tuple[StagePlan, ...]
    in_flight_max: int = 4
    """Forwards that one volunteer may hold without their backward."""

    @property
    def last_position(self) -> int:
        return len(self.stages) - 1

    def stage_at(self, microbatch: int, position: int) -> int:
        """The stage that a microbatch visits at `position` (the loss's position: where the route ends)."""
        return min(position, len(self.stages) - 1)

    def front_of(self, stage: int, microbatch: int) -> NodeId:
        fronts = self.stages[stage].fronts
        return fronts[microbatch % len(fronts)].node

    def back_of(self, stage: int, microbatch: int) -> NodeId:
        backs = self.stages[stage].backs
        return backs[microbatch % len(backs)].node

    def ledger_of(self, stage: int) -> NodeId:
        """The server that holds the stage's ledger: its first front server."""
        return self.stages[stage].fronts[0].node

    @property
    def decider(self) -> NodeId:
        """The ledger of stage 0, which owns each step's decision (state-and-trust 4.3)."""
        return self.ledger_of(0)

    def stage_of(self, node: NodeId) -> int | None:
        """The stage whose server `node` is, or None."""
        for index, stage in enumerate(self.stages):
            if any(server.node == node for server in stage.servers):
                return index
        return None

    def shard_of(self, node: NodeId) -> int | None:
        """The shard that `node` holds in its stage, or None."""
        for stage in self.stages:
            for index, server in enumerate(stage.servers):
                if server.node == node:
                    return index
        return None

    def server_nodes(self) -> tuple[NodeId, ...]:
        """Every server, stage by stage."""
        return tuple(server.node for stage in self.stages for server in stage.servers)

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        for stage in self.stages:
            for server in stage.servers:
                if server.node == node:
                    return server.addresses
        return ()
