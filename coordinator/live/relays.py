"""Tells everybody which servers have nothing to do but relay: when one of them dies, a path is lost and no work.

Servers of the plan relay too, and nodes know them from it; the spares named here come first (node.links.connector).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member, Roster
from protocol.base.limits import RELAYS_MAX
from protocol.messages import Relay, Relays


class RelayBook:
    """The spares that can be dialled, and what each member was last told of them."""

    def __init__(self, roster: Roster, outbox: Outbox) -> None:
        self._roster = roster
        self._outbox = outbox
        self._relays: tuple[Relay, ...] = ()

    def set(self, spares: Iterable[Member]) -> None:
        """These servers have no place at present; whoever was told otherwise hears of it."""
        relays = tuple(Relay(node=spare.peer, addresses=spare.addresses) for spare in spares if spare.addresses)
        if relays == self._relays:
            return
        self._relays = relays
        for member in self._roster.all():
            self.tell(member)

    def tell(self, member: Member) -> None:
        """Names its relays to a welcomed member that has not heard of them yet: never itself, RELAYS_MAX at most.

        Where there are more, every member hears of others, so that the load is spread.
        """
        if not member.welcomed:
            return
        relays = tuple(relay for relay in self._relays if relay.node != member.peer)
        if len(relays) > RELAYS_MAX:
            ranked = sorted(relays, key=lambda relay: blake2b((member.peer + relay.node).encode()).digest())
            relays = tuple(ranked[:RELAYS_MAX])
        if relays != member.told_relays:
            member.told_relays = relays
            self._outbox.send(member.peer, Relays(relays=relays))
