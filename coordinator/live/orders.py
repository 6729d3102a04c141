"""What an operator orders of a running coordinator, by its API; the machine takes them as `Ordered`."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.live.plan_builder import Guidance
from coordinator.live.records import Voiding
from protocol.base.ids import NodeId
from protocol.run.changes import RunChange


@dataclass(frozen=True, slots=True)
class Ban:
    """Nobody believes this node any more."""

    node: NodeId
    reason: str
    lineage: bool = False
    """Also ban whoever came by an invite that this node has used, and close these invites."""


@dataclass(frozen=True, slots=True)
class Unban:
    """The node may come again, with an invite that has a use left for it."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """A key of the run has another value from the next step on that is not decided."""

    change: RunChange
    guidance: Guidance | None = None
    """Of another layout that a planner has chosen: what it says beside the cut …"""
    why: str = ""
    """… and why it is so."""


@dataclass(frozen=True, slots=True)
class PauseRun:
    """No step is opened any more, or (not `paused`) steps are opened again."""

    paused: bool


@dataclass(frozen=True, slots=True)
class RollBack:
    """The run goes back to a checkpoint and does the steps after it again."""

    step: int
    """-1: to its beginning."""
    voiding: Voiding | None = None
    """These members are banned first: the checkpoint is from before they came."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """The newest plan that servers show is taken over, though some of its servers are missing."""


@dataclass(frozen=True, slots=True)
class FetchTrace:
    """Everybody tells what he did in the last seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DrainNode:
    """This member ends what it has and goes; it may come again."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class NameNode:
    """The operator's own name for a node; empty: none any more."""

    node: NodeId
    name: str


@dataclass(frozen=True, slots=True)
class CloseInvite:
    """Nobody joins by this invite from here on; who has joined stays."""

    nonce: bytes


Order = Ban | Unban | CloseInvite | ChangeRun | PauseRun | RollBack | Adopt | FetchTrace | DrainNode | NameNode
