"""Who may come in: which nodes have used which invite, which invites are closed, and who is banned.

An invite is for so many different nodes; a node that comes again with it takes no second use.

Signatures, run and expiry of a credential are checked by the handshake; what only the database knows is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.live.records import Banned, InviteClosed, InviteSpent, Unbanned
from protocol.base.ids import NodeId
from protocol.trust.membership import Invite


class Admission:
    """Spent and closed invites, and bans, as the database has them or soon will."""

    def __init__(
        self,
        spent: Iterable[InviteSpent] = (),
        banned: Iterable[Banned] = (),
        closed: Iterable[bytes] = (),
        number: int = 0,
    ) -> None:
        """`number`: the newest number of a ban or of the end of one."""
        self._users: dict[bytes, dict[NodeId, None]] = {}
        self._uses: dict[bytes, int] = {}
        """How many may come by an invite, of those that somebody has shown since this process started."""
        self._banned: dict[NodeId, Banned] = {}
        self._closed = set(closed)
        self._since: dict[NodeId, int] = {}
        """The first step that each could have had a part in."""
        for use in spent:
            self._users.setdefault(use.nonce, {})[use.node] = None
            self._came(use)
        for ban in banned:
            self._banned[ban.node] = ban
        self.number = max([number, *(ban.number for ban in self._banned.values())])
        """Of the newest list of bans: grows with every change."""
        self.durable_number = self.number
        """Of the newest list that survives a crash: no other may be told."""

    # ---- bans ----------------------------------------------------------------------------------------------------

    def ban_reason(self, node: NodeId) -> str | None:
        ban = self._banned.get(node)
        return None if ban is None else ban.reason

    @property
    def banned_count(self) -> int:
        return len(self._banned)

    def banned_since(self, wall_s: float) -> tuple[NodeId, ...]:
        """Who is banned and was so at this time or later, the newest first."""
        newest_first = sorted(self._banned.values(), key=lambda ban: -ban.number)
        return tuple(ban.node for ban in newest_first if ban.wall_s >= wall_s)

    def is_kin(self, node: NodeId) -> bool:
        """Whether it is banned only because of whom it came with."""
        return node in self._banned and self._banned[node].is_kin

    def ban(self, node: NodeId, reason: str, wall_s: float, is_kin: bool = False) -> Banned | None:
        """The record to write, or None when it is banned already, for as much. `is_kin`: see `Banned`."""
        if node in self._banned and (is_kin or not self._banned[node].is_kin):
            return None
        self.number += 1
        ban = Banned(node=node, reason=reason, number=self.number, wall_s=wall_s, is_kin=is_kin)
        self._banned[node] = ban
        return ban

    def unban(self, node: NodeId) -> Unbanned | None:
        """The record to write, or None when it is not banned."""
        if self._banned.pop(node, None) is None:
            return None
        self.number += 1
        return Unbanned(node=node, number=self.number)

    def lineage(self, node: NodeId) -> tuple[NodeId, ...]:
        """The node, and all that came by an invite which it has used."""
        found = {node: None}
        for users in self._users.values():
            if node in users:
                found.update(users)
        return tuple(found)

    def household(self, node: NodeId, uses_max: int) -> tuple[tuple[NodeId, ...], tuple[bytes, ...]]:
        """The node and all that came by an invite of at most so many uses which it has used; and these invites."""
        found, invites = {node: None}, []
        for nonce, users in self._users.items():
            if node in users and self._uses.get(nonce, uses_max + 1) <= uses_max:
                found.update(users)
                invites.append(nonce)
        return tuple(found), tuple(invites)

    # ---- invites -------------------------------------------------------------------------------------------------

    def close_invites_of(self, node: NodeId) -> tuple[InviteClosed, ...]:
        """Closes the invites that the node has used; the records to write."""
        records = (self.close_invite(nonce) for nonce, users in self._users.items() if node in users)
        return tuple(record for record in records if record is not None)

    def close_invite(self, nonce: bytes) -> InviteClosed | None:
        """The record to write, or None when it is closed already."""
        if nonce in self._closed:
            return None
        self._closed.add(nonce)
        return InviteClosed(nonce=nonce)

    def is_closed(self, invite: Invite) -> bool:
        return invite.nonce in self._closed

    def has_used(self, invite: Invite, node: NodeId) -> bool:
        """Whether `node` has joined by it before."""
        return node in self._users.get(invite.nonce, {})

    def is_spent(self, invite: Invite, node: NodeId) -> bool:
        """Whether the invite has no use left for `node`."""
        users = self._users.get(invite.nonce, {})
        return node not in users and len(users) >= invite.uses

    def spend(self, invite: Invite, node: NodeId, step: int = -1) -> InviteSpent | None:
        """Takes one use at once, so that two joins cannot share the last; None when `node` has used it before. `step`:
        the first that is not closed."""
        users = self._users.setdefault(invite.nonce, {})
        self._uses[invite.nonce] = invite.uses
        if node in users:
            return None
        assert len(users) < invite.uses, "a spent invite was spent again"
        users[node] = None
        use = InviteSpent(nonce=invite.nonce, node=node, step=step)
        self._came(use)
        return use

    def _came(self, use: InviteSpent) -> None:
        if use.step >= 0:
            self._since[use.node] = min(use.step, self._since.get(use.node, use.step))

    def since(self, node: NodeId) -> int:
        """The first step that it could have had a part in, also by results that nobody is credited for; -1: unknown."""
        return self._since.get(node, -1)

    def go_back(self, first_step: int) -> None:
        """Steps from this one on are done again, by all who are here."""
        for node in self._since:
            self._since[node] = min(self._since[node], first_step)
