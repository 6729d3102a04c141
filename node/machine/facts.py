"""What a node knows of itself before it joins: drawn or measured by its driver, once for each start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from node.machine.kept_plan import KeptPlan
from node.machine.records import Record
from protocol.messages import Join
from protocol.trust.membership import JoinRole


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node knows of itself before it joins."""

    role: str
    """server, volunteer or auditor"""
    addresses: tuple[str, ...] = ()
    """Where anybody can dial it."""
    local_addresses: tuple[str, ...] = ()
    """Where only its own network can."""
    build: str = ""
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    name: str = ""
    """The owner's public name."""
    wished_stage: int = -1
    checkpoints: tuple[int, ...] = ()
    asks: bool = True
    """Whether it asks peers that are quiet if they live, and gives up those that are silent; not where its driver is
    sure to tell it of each link that ends."""
    computes: bool = True
    """Whether a server hosts a volunteer too; a volunteer always does."""
    incarnation: int = 0
    """Drawn anew at every start."""
    secret: bytes = field(default=b"", repr=False)
    """32 bytes, drawn anew at every start: for keys that this node makes."""
    kept: KeptPlan | None = None
    """The plan that it went by before, with the run."""
    records: list[Record] = field(default_factory=list)
    """A server's durable records, oldest first."""
    gives_up: str = ""
    """Why a server must not go by its newest records any more, or nothing."""


def join_message(
    facts: NodeFacts,
    held: tuple[int, int, int, int],
    checkpoints: tuple[int, ...],
    tokens_per_s: float,
    copies: tuple[tuple[int, int, int, int], ...] = (),
) -> Join:
    """What a node says of itself: `held` is (stage, shard, version, ledger generation) of what its disk gives back,
    `tokens_per_s` what a survey measured (0: nothing, so what was known at the start counts), `copies` what it holds of
    other servers' shards."""
    stage, shard, version, generation = held
    return Join(
        role=cast(JoinRole, facts.role),
        addresses=facts.addresses,
        local_addresses=facts.local_addresses,
        build=facts.build,
        tokens_per_s=tokens_per_s or facts.tokens_per_s,
        memory_bytes=facts.memory_bytes,
        stage=stage,
        shard=shard,
        version=version,
        held_generation=generation,
        checkpoints=checkpoints,
        name=facts.name,
        copies=copies,
    )
