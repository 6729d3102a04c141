"""Messages about who takes part: bans and renewed memberships, as they travel between nodes."""

from __future__ import annotations

from protocol.base.bounded import Bytes, Nodes, Number
from protocol.base.message import Message


class Revoked(Message, frozen=True, kw_only=True):
    """Who is banned: `protocol.trust.membership.Revocations` of this run, taken apart, and the coordinator's signature.

    From the coordinator to everybody when it has changed and after each welcome; a server hands it to whoever it is
    linked with, so it comes to those that the coordinator cannot reach.
    """

    number: Number
    nodes: Nodes
    signature: Bytes


class Renewed(Message, frozen=True, kw_only=True):
    """A node's membership was renewed: it shows the new one on links that are up, which would otherwise be closed."""

    membership: Bytes


class CoordinatorSeen(Message, frozen=True, kw_only=True):
    """Server to server: whether the sender has a link to the coordinator. Said at link-up, and when it changes."""

    here: bool
