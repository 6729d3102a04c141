"""Who is a member, signed, and until when: by the wall clock, which may be set while the run goes on.

A membership is renewed at half of its life, so a clock that is set forward by less than that ends none. If it is set
forward further, or the computer slept (the machine's own time leaves that out), those that were given before have run
out or soon will, for everybody whose clock was right all the time: all are renewed at once, as many as come in a burst
of joins. A clock that is set back ends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from coordinator.live.outbox import Outbox
from coordinator.live.records import MemberRow
from coordinator.live.roster import Member, Roster
from protocol.trust.membership import MEMBERSHIP_S, Membership

EARLY_S = 60.0
"""What a life of an hour may lose, on top of the five minutes by which clocks may differ."""


class Memberships:
    """Counts serials, each of which is used once, and signs."""

    def __init__(
        self, run_id: bytes, roster: Roster, outbox: Outbox, sign: Callable[[Membership], bytes], next_serial: int
    ) -> None:
        """`next_serial`: no record bears it, nor one above it."""
        self._run_id = run_id
        self._roster = roster
        self._outbox = outbox
        self._sign = sign
        self._next_serial = next_serial

    def give(self, member: Member, generation: int, then: Callable[[Member, float], None], now: float) -> None:
        """A new serial, durable first so that it is never reused; then the membership, and what follows from it."""
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        member.renew_at = now + MEMBERSHIP_S / 2
        membership = Membership(
            node=member.peer,
            role=member.role,
            run_id=self._run_id,
            generation=generation,
            serial=serial,
            not_after=int(self._outbox.wall_s(now) + MEMBERSHIP_S),
        )

        def durable(now: float) -> None:
            if self._roster.is_current(member):
                member.membership = self._sign(membership)
                then(member, now)

        row = MemberRow(node=member.peer, public_key=member.public_key, role=member.role, serial=serial)
        self._outbox.persist(row, durable)

    def clock_moved(self, wall_offset_s: float, now: float) -> None:
        """The wall clock is another from here on; what was dated by the old one is due, if that ends it early."""
        moved_s = wall_offset_s - self._outbox.wall_offset_s
        self._outbox.wall_offset_s = wall_offset_s
        self._outbox.log(
            "warning", "wall clock moved", detail=f"by {moved_s:+,.0f} s: it was set, or this computer slept"
        )
        if moved_s < EARLY_S:
            return
        for member in self._roster.all():
            member.renew_at = min(member.renew_at, now)
            if member.help_again_at < inf:  # credentials of a TURN server have a date, too
                member.help_again_at = now
