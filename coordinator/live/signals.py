"""Carries signals between nodes that have no link yet, and says who helps them to find one.

The coordinator has no authority over what it carries: a link counts only when its handshake has proven both ends, so
a coordinator that changes, invents or repeats signals can delay a link and do no more (state-and-trust 2.1).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field

from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member, Roster
from protocol.base.ids import NodeId
from protocol.base.limits import SIGNALS_BURST, SIGNALS_PER_S
from protocol.link.reach import host_of
from protocol.messages import Reach, Signal

TURN_S = 3600.0
"""Life of TURN credentials: whoever leaves the run stops relaying at its cost within the hour."""


@dataclass(frozen=True, slots=True)
class Helpers:
    """Servers that the operator names to help nodes behind NATs. Addresses are HOST:PORT."""

    stun: tuple[str, ...] = ()
    turn: tuple[str, ...] = ()
    turn_secret: bytes = field(default=b"", repr=False)
    """What the TURN servers know as their `static-auth-secret`; empty without TURN."""


def turn_credentials(secret: bytes, node: NodeId, not_after: int) -> tuple[str, str]:
    """(username, password) good until `not_after`, seconds since 1970: coturn's `use-auth-secret`, after the draft
    behra-rtcweb-turn-rest-00. The name tells the operator whose traffic it was."""
    username = f"{not_after}:{node[:16]}"
    digest = hmac.new(secret, username.encode(), hashlib.sha1).digest()
    return username, base64.b64encode(digest).decode()


class Signalling:
    """The part of the coordinator that helps nodes to reach each other."""

    def __init__(self, roster: Roster, outbox: Outbox, helpers: Helpers) -> None:
        self._roster = roster
        self._outbox = outbox
        self._helpers = helpers

    def carry(self, sender: Member, signal: Signal, now: float) -> None:
        """Hands a signal on under its sender's name; an empty one comes back when that cannot be."""
        if not self._takes(sender, now):
            self._outbox.count("barnraise_transport_rejected_messages_total", reason="busy")
            return
        receiver = self._roster.get(signal.peer)
        known = receiver is not None and receiver.welcomed and receiver is not sender
        if receiver is None or not known or "server" not in (sender.role, receiver.role):
            self._outbox.send(sender.peer, Signal(peer=signal.peer, content=b""))
        elif signal.content:  # an empty one is ours to send
            seen_from = host_of(sender.address)
            self._outbox.send(receiver.peer, Signal(peer=sender.peer, content=signal.content, seen_from=seen_from))

    def help(self, member: Member, now: float) -> None:
        """Says how a welcomed node looks from here, and who helps."""
        helpers = self._helpers
        username = password = ""
        valid_s = 0.0
        if helpers.turn:
            not_after = int(self._outbox.wall_s(now) + TURN_S)
            username, password = turn_credentials(helpers.turn_secret, member.peer, not_after)
            valid_s = TURN_S
            member.help_again_at = now + TURN_S / 2
        seen_from = host_of(member.address)
        if seen_from or helpers.stun or helpers.turn:
            reach = Reach(
                seen_from=seen_from,
                stun=helpers.stun,
                turn=helpers.turn,
                username=username,
                password=password,
                valid_s=valid_s,
            )
            self._outbox.send(member.peer, reach)

    @staticmethod
    def _takes(sender: Member, now: float) -> bool:
        """A token bucket for each link (limits.py says why so many)."""
        earned = (now - sender.signalled_at) * SIGNALS_PER_S
        left = min(SIGNALS_BURST, sender.signals_left + earned)
        sender.signalled_at = now
        sender.signals_left = left - 1 if left >= 1 else left
        return left >= 1
