"""Who may come in: invites and how often each was used, and who is banned.

Signatures, run and expiry of a credential are checked by the handshake; what only the database knows is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.records import Banned, InviteSpent
from protocol.ids import NodeId


@dataclass(frozen=True, slots=True)
class InviteTerms:
    """What counts of an invite once its signature is checked."""

    nonce: bytes
    uses: int
    """Different nodes that may use it; the same node may come again for free."""


class Admission:
    """Spent invites and bans, as the database has them or soon will."""

    def __init__(self, spent: Iterable[InviteSpent] = (), banned: Iterable[Banned] = ()) -> None:
        self._users: dict[bytes, dict[NodeId, None]] = {}
        self._banned: dict[NodeId, str] = {}
        for use in spent:
            self._users.setdefault(use.nonce, {})[use.node] = None
        for ban in banned:
            self._banned[ban.node] = ban.reason

    def ban_reason(self, node: NodeId) -> str | None:
        return self._banned.get(node)

    @property
    def banned_count(self) -> int:
        return len(self._banned)

    def ban(self, node: NodeId, reason: str) -> Banned | None:
        """The record to write, or None when it is banned already."""
        if node in self._banned:
            return None
        self._banned[node] = reason
        return Banned(node=node, reason=reason)

    def is_spent(self, terms: InviteTerms, node: NodeId) -> bool:
        """Whether the invite has no use left for `node`."""
        users = self._users.get(terms.nonce, {})
        return node not in users and len(users) >= terms.uses

    def spend(self, terms: InviteTerms, node: NodeId) -> InviteSpent | None:
        """Takes one use at once, so that two joins cannot share the last; None when `node` has used it before."""
        users = self._users.setdefault(terms.nonce, {})
        if node in users:
            return None
        assert len(users) < terms.uses, "a spent invite was spent again"
        users[node] = None
        return InviteSpent(nonce=terms.nonce, node=node)
