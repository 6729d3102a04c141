"""Memberships are dated by the wall clock of now, though the machine's own time knows nothing of how that was set."""

from __future__ import annotations

import pytest

from coordinator.live.memberships import EARLY_S
from coordinator.live.orders import Ban
from coordinator.live.records import Banned
from coordinator.live.roster import sweep_s
from coordinator.live.signals import Helpers
from protocol.base.ids import NodeId
from protocol.base.machine import Ordered, WallClockMoved
from protocol.messages import Reach, Welcome
from protocol.trust.membership import MEMBERSHIP_S, Membership
from tests.coordinator.live.desk import Desk

WALL_OFFSET_S = 1e9
"""Of a desk when it begins."""
TWO_HOURS_S = 7200.0


class DatedDesk(Desk):
    """A desk that keeps what is signed."""

    def __init__(self, helpers: Helpers | None = None) -> None:
        super().__init__(helpers=helpers)
        self.signed: list[Membership] = []
        self.machine._memberships._sign = self._sign

    def _sign(self, membership: Membership) -> bytes:
        self.signed.append(membership)
        return b"membership %d" % membership.serial

    def set_clock(self, by_s: float) -> None:
        self.feed(WallClockMoved(self.machine.outbox.wall_offset_s + by_s))

    def wall_s(self) -> float:
        return self.now + self.machine.outbox.wall_offset_s


@pytest.mark.parametrize("by_s", [TWO_HOURS_S, -TWO_HOURS_S])
def test_who_joins_after_the_clock_was_set_gets_an_hour_of_the_new_one(by_s: float) -> None:
    """Also a ban and what was logged bear the new time."""
    desk = DatedDesk()
    desk.set_clock(by_s)
    desk.server("s0")
    assert desk.machine.outbox.wall_offset_s == WALL_OFFSET_S + by_s
    assert desk.signed[-1].not_after == int(WALL_OFFSET_S + by_s + desk.now + MEMBERSHIP_S)
    desk.feed(Ordered(Ban(NodeId("s9"), "no")))
    assert [ban.wall_s for ban in desk.written(Banned)] == [desk.wall_s()]
    assert desk.machine.outbox.events[-1]["wall_s"] == desk.wall_s()
    [said] = desk.logged("wall clock moved")
    assert said["detail"].startswith(f"by {by_s:+,.0f} s: ")


def test_memberships_that_a_clock_set_forward_ends_are_renewed_at_once() -> None:
    """Everybody whose clock was right all the time takes them for over."""
    desk = DatedDesk()
    desk.server("s0")
    desk.server("s1")
    desk.set_clock(TWO_HOURS_S)
    effects = desk.stay(2 * sweep_s(desk.machine.config.limits), "s0", "s1")
    assert [len(desk.sent(node, Welcome, effects)) for node in ("s0", "s1")] == [1, 1]
    assert all(membership.not_after > desk.wall_s() for membership in desk.signed[2:])


@pytest.mark.parametrize("by_s", [EARLY_S / 2, -TWO_HOURS_S])
def test_a_clock_that_ends_no_membership_early_makes_nobody_work(by_s: float) -> None:
    """Set a little forward, or back."""
    desk = DatedDesk()
    desk.server("s0")
    desk.set_clock(by_s)
    assert not desk.sent("s0", Welcome, desk.stay(2 * sweep_s(desk.machine.config.limits), "s0"))


def test_what_opens_a_relay_is_renewed_with_them() -> None:
    """The credentials of a TURN server run out by the same clock."""
    desk = DatedDesk(Helpers(turn=("turn.example:3478",), turn_secret=b"secret"))
    desk.server("s0")
    desk.set_clock(TWO_HOURS_S)
    effects = desk.stay(4 * sweep_s(desk.machine.config.limits), "s0")
    [reach] = desk.sent("s0", Reach, effects)
    assert int(reach.username.partition(":")[0]) > desk.wall_s()
