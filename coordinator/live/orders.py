"""What an operator orders of a running coordinator, by its API; the machine takes them as `Ordered`."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.base.ids import NodeId


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
class CloseInvite:
    """Nobody joins by this invite from here on; who has joined stays."""

    nonce: bytes
