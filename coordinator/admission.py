"""Who may come in: which nodes have used which invite, and who is banned.

An invite is for so many different nodes; a node that comes again with it takes no second use.

Signatures, run and expiry of a credential are checked by the handshake; what only the database knows is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.records import Banned, InviteSpent
from protocol.ids import NodeId
from protocol.membership import Invite


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

    def is_spent(self, invite: Invite, node: NodeId) -> bool:
        """Whether the invite has no use left for `node`."""
        users = self._users.get(invite.nonce, {})
        return node not in users and len(users) >= invite.uses

    def spend(self, invite: Invite, node: NodeId) -> InviteSpent | None:
        """Takes one use at once, so that two joins cannot share the last; None when `node` has used it before."""
        users = self._users.setdefault(invite.nonce, {})
        if node in users:
            return None
        assert len(users) < invite.uses, "a spent invite was spent again"
        users[node] = None
        return InviteSpent(nonce=invite.nonce, node=node)
