"""Bans: durable first, then told to everybody as one signed list, which servers pass on (`node.machine.revocation`).

A coordinator that comes back with an older database, or with none, hears of the bans since then from its servers: they
show the newest list, which bears its own signature.

A ban is in force at the coordinator at once, at everybody who is linked to it after one message, at everybody who is
linked to one of those after two; nobody believes the member longer than its membership lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.live.admission import Admission
from coordinator.live.orders import Ban, CloseInvite, Unban
from coordinator.live.outbox import Outbox
from coordinator.live.records import Voiding
from coordinator.live.roster import Member, Roster
from coordinator.live.slots import SlotTable
from protocol.base.ids import NodeId
from protocol.base.limits import ITEMS_MAX
from protocol.messages import Blamed, Revoked
from protocol.trust.membership import LISTED_S, Revocations

HOUSEHOLD_MAX = 4
"""Uses of an invite up to which all who came by it are taken for one person's computers. A link that a whole laboratory
joins by proves nothing about the others."""


def why_no_lineage(nodes: Sequence[NodeId], roster: Roster, table: SlotTable) -> str:
    """Why nobody's whole lineage is banned, as a sentence, or nothing: all servers come by one link, so that to ban who
    came by it takes every place of the run at once, and their parts of the model with them."""

    def is_server(node: NodeId) -> bool:
        member = roster.get(node)
        return table.slot_of(node) is not None or (member is not None and member.role == "server")

    count = sum(map(is_server, nodes))
    if not count:
        return ""
    came = "a server" if count == 1 else f"{count} servers"
    return (
        f"{came} came by its link, and to ban a whole lineage would take their places: leave out --lineage, and close"
        " the link with `run uninvite`"
    )


class Bans:
    """The operator's part of admission: what was ordered, and who has been told."""

    def __init__(
        self,
        run_id: bytes,
        admission: Admission,
        roster: Roster,
        outbox: Outbox,
        sign: Callable[[Revocations], bytes],
        expel: Callable[[NodeId, str, float], None],
    ) -> None:
        """
        Args:
            sign: the coordinator's signature of a list.
            expel: ends what a banned node has here: its link and its place.
        """
        self._run_id = run_id
        self._admission = admission
        self._roster = roster
        self._outbox = outbox
        self._sign = sign
        self._expel = expel
        self._told: dict[NodeId, int] = {}
        """The newest list that each linked node was sent."""

    def order(self, order: Ban | Unban | CloseInvite, now: float) -> None:
        """Does what an operator asks."""
        match order:
            case Ban():
                nodes = self._admission.lineage(order.node) if order.lineage else (order.node,)
                for node in nodes:
                    self._ban(node, order.reason, now, is_kin=node != order.node)
                closed = self._admission.close_invites_of(order.node) if order.lineage else ()
                for record in closed:
                    self._outbox.persist(record)
            case Unban():
                lifted = self._admission.unban(order.node)
                if lifted is not None:
                    self._outbox.log("info", "ban lifted", node=order.node)
                    self._outbox.persist(lifted, lambda now: self._durable(lifted.number, now))
            case CloseInvite():
                closing = self._admission.close_invite(order.nonce)
                if closing is not None:
                    self._outbox.log("info", "invite closed", nonce=order.nonce)
                    self._outbox.persist(closing)

    def heard(self, server: Member, message: Blamed | Revoked, stage: int, now: float) -> None:
        """A server has found somebody out, or shows the newest list that it knows. `stage`: where it stands, or -1."""
        if isinstance(message, Revoked):
            self._shown(server, message, now)
        elif stage >= 0:
            self._blamed(server, message, now)

    def _shown(self, server: Member, message: Revoked, now: float) -> None:
        """What this coordinator has signed, and its database may not know any more. Whoever is named stays banned; of
        who was pardoned since the copy was made nobody tells, so a ban of the database stays, too."""
        if self._sign(Revocations(self._run_id, message.number, message.nodes)) != message.signature:
            self._outbox.log("warning", "list of bans refused", node=server.peer, detail="another key signed it")
            return
        if message.number < self._admission.number:
            return
        missing = [node for node in message.nodes if self._admission.ban_reason(node) is None]
        self._admission.number = message.number
        if not missing:  # else the next list is newer
            self._admission.durable_number = max(self._admission.durable_number, self._admission.number)
        for node in missing:
            self._ban(node, "banned before the coordinator's database was lost; a server remembers", now)

    def _blamed(self, server: Member, message: Blamed, now: float) -> None:
        """A server's audits have found a member's results false: it is banned, with whoever came by its invite, unless
        many may come by that. Only the operator takes a server's place away."""
        node = message.node
        member = self._roster.get(node)
        if member is not None and member.role == "server":
            self._outbox.log("error", "audits blame a server", node=node, by=server.peer, claim=message.claim)
            return
        if self._admission.ban_reason(node) is not None and not self._admission.is_kin(node):
            return
        if message.claim == "lean":
            reason = f"audits: its gradients lean to one side by {message.difference:.2g}, on average"
        else:
            claim = message.claim.replace("_", " ")
            reason = f"audits: its {claim} of {message.task} is off by {message.difference:.2g}"
        household, invites = self._admission.household(node, HOUSEHOLD_MAX)
        for one in household:
            why = reason if one == node else f"came by the invite of {node[:8]}, which {reason}"
            self._ban(one, why, now, is_kin=one != node)
        for nonce in invites:
            self.order(CloseInvite(nonce), now)

    def void(self, voiding: Voiding | None, now: float) -> None:
        """If the run goes back to before somebody came: whatever plan comes next, servers hear of the ban before it."""
        if voiding is not None:
            for node in voiding.nodes:
                self._ban(node, voiding.reason, now)

    def _ban(self, node: NodeId, reason: str, now: float, is_kin: bool = False) -> None:
        record = self._admission.ban(node, reason, self._outbox.wall_s(now), is_kin)
        if record is None:
            return
        self._outbox.persist(record, lambda now: self._durable(record.number, now))
        self._outbox.log("warning", "node banned", node=node, reason=reason)
        self._expel(node, reason, now)

    def left(self, peer: NodeId) -> None:
        """A link is gone: its node is told again when it comes back."""
        self._told.pop(peer, None)

    def tell(self, member: Member, now: float) -> None:
        """The newest list, unless there is none or the member has it."""
        number = self._admission.number
        durable = number == self._admission.durable_number  # else everybody is told in a moment
        if member.welcomed and durable and number > self._told.get(member.peer, 0):
            self._told[member.peer] = number
            self._outbox.send(member.peer, self._list(number, now))

    def _durable(self, number: int, now: float) -> None:
        """A change survives a crash; of several on their way to the disk only the last is told, with all of them."""
        self._admission.durable_number = number
        for member in self._roster.all():
            self.tell(member, now)

    def _list(self, number: int, now: float) -> Revoked:
        nodes = self._admission.banned_since(self._outbox.wall_s(now) - LISTED_S)[:ITEMS_MAX]
        return Revoked(number=number, nodes=nodes, signature=self._sign(Revocations(self._run_id, number, nodes)))
