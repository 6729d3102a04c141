"""Who is banned, as a node knows it: heard from the coordinator or a server, believed by signature, passed on.

A list counts at once: links to banned members end, what they say is dropped, and the ledger accepts nothing more of
theirs (what it had accepted before stays: every task counts exactly once). A list that a node missed reaches it
through any server that it is linked with; one that nobody can bring counts when the memberships run out.

Memberships live for an hour and the coordinator renews them. While it is away the servers of the plan let old ones
count together (`protocol.trust.membership.AWAY_S`): a server does so only while more than half of the plan's servers,
itself among them, say that they have no link to it, and none says that it has one. So a server that is cut off from
the others believes no membership that has run out, and neither does one that the coordinator could reach through them.
"""

from __future__ import annotations

from node.machine.outbox import Outbox
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.machine import HangUp
from protocol.messages import CoordinatorSeen, Renewed, Revoked
from protocol.run.plan import Plan
from protocol.trust.identity import SIGNATURE_BYTES
from protocol.trust.membership import Trust, join_revocations

RETURN_S = 120.0
"""After the coordinator's return everybody links to it again (3 s between two attempts) and shows what it gave."""


class Revocation:
    """A node's list of bans, and what it knows of the coordinator's absence."""

    def __init__(self, out: Outbox, trust: Trust, *, serves: bool) -> None:
        """`trust` is the driver's too: whoever is named in it is refused in the handshake."""
        self._out = out
        self._trust = trust
        self._serves = serves
        self._seen: dict[NodeId, bool] = {}
        """Whether a linked server says that it has the coordinator; False until it has said so."""
        self._others: dict[NodeId, str] = {}
        """Live links but the coordinator's, with roles."""
        self._coordinator_here = False
        self._lenient_until = float("-inf")
        self._now = float("-inf")
        self._told: dict[NodeId, int] = {}
        """The newest list that each linked node has sent, or was sent."""
        trust.coordinator_away = lambda: self._now < self._lenient_until

    def is_banned(self, node: NodeId) -> bool:
        return self._trust.is_revoked(node)

    @property
    def banned(self) -> tuple[NodeId, ...]:
        return self._trust.revocations.nodes

    # ---- links ---------------------------------------------------------------------------------------------------

    def coordinator(self, here: bool) -> None:
        """The link to the coordinator is up, or down."""
        if here != self._coordinator_here:
            self._coordinator_here = here
            for peer, role in self._others.items():
                self._say_seen(peer, role)

    def show(self, coordinator: NodeId) -> None:
        """A server that has just joined shows its newest list: the coordinator may have lost what it had signed."""
        self._told.pop(coordinator, None)
        self._pass_on(coordinator)

    def link_up(self, peer: NodeId, role: str) -> None:
        """A link to anybody else."""
        self._others[peer] = role
        self._say_seen(peer, role)
        self._pass_on(peer)

    def link_down(self, peer: NodeId) -> None:
        self._others.pop(peer, None)
        self._seen.pop(peer, None)
        self._told.pop(peer, None)

    def _say_seen(self, peer: NodeId, role: str) -> None:
        if self._serves and role == "server":
            self._out.send(peer, CoordinatorSeen(here=self._coordinator_here))

    # ---- bans ----------------------------------------------------------------------------------------------------

    def take(self, peer: NodeId, message: Revoked) -> tuple[NodeId, ...]:
        """A list from `peer`; the linked nodes that have to go when it is news. A false one ends the peer's link."""
        self._told[peer] = max(message.number, self._told.get(peer, 0))
        try:
            news = self._trust.revoke(
                join_revocations(self._trust.run_id, message.number, message.nodes, message.signature)
            )
        except RemoteProtocolError as error:
            self._out.count("barnraise_transport_rejected_messages_total", reason=error.reason)
            self._out.log("warning", "list of bans refused", peer=peer, reason=error.reason, detail=error.detail)
            self._out.add(HangUp(peer, str(error), fault=True))
            return ()
        if not news:
            return ()
        self._out.log("info", "list of bans", number=message.number, count=len(message.nodes))
        for other in self._others:
            self._pass_on(other)
        return tuple(node for node in self._others if self.is_banned(node))

    def _pass_on(self, peer: NodeId) -> None:
        newest = self._trust.revocations
        if self._serves and newest.number > self._told.get(peer, 0) and not self.is_banned(peer):
            self._told[peer] = newest.number
            signature = self._trust.revocations_signed[-SIGNATURE_BYTES:]
            self._out.send(peer, Revoked(number=newest.number, nodes=newest.nodes, signature=signature))

    # ---- memberships ---------------------------------------------------------------------------------------------

    def renewed(self, membership: bytes) -> None:
        """Our membership was renewed: every link shows the new one."""
        for peer in self._others:
            self._out.send(peer, Renewed(membership=membership))

    def on_seen(self, peer: NodeId, message: CoordinatorSeen) -> None:
        self._seen[peer] = message.here

    def look(self, plan: Plan | None, now: float) -> None:
        """Now and then: is the coordinator away, as far as the plan's servers can tell together?"""
        self._now = now
        if self._is_away(plan):
            self._lenient_until = now + RETURN_S

    def _is_away(self, plan: Plan | None) -> bool:
        if self._coordinator_here or plan is None:
            return False
        if not self._serves:
            return True  # a volunteer only looks at servers that a plan of the coordinator's names
        servers = plan.server_nodes()
        said = [here for node, here in self._seen.items() if node in servers]
        return not any(said) and 2 * (1 + len(said)) > len(servers)
