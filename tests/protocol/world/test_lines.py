"""Lines of the simulated world: shared on the way up, never carrying more than they can."""

from __future__ import annotations

from protocol.world.lines import Downlink, Uplink


def test_transfers_share_a_line_up_and_the_small_one_is_through_first() -> None:
    """100 bytes and 300 begin together at 100 bytes/s: each has half, then the large one has all."""
    line = Uplink(100.0)
    line.add(100.0, "small", 0.0)
    line.add(300.0, "large", 0.0)
    assert line.next_s(0.0) == 2.0
    assert line.through(2.0) == ["small"]
    assert line.next_s(2.0) == 4.0
    assert line.through(4.0) == ["large"]
    assert line.next_s(4.0) is None and line.waiting_bytes == 0.0


def test_a_transfer_that_comes_later_slows_the_others_from_then_on() -> None:
    """After half a second alone, two share: 50 of 100 bytes are left, at 50 bytes/s."""
    line = Uplink(100.0)
    line.add(100.0, "first", 0.0)
    line.add(1000.0, "second", 0.5)
    assert line.next_s(0.5) == 1.5


def test_a_line_down_takes_in_no_more_than_its_rate() -> None:
    """Two transfers of a second each that were sent at once are through one after the other; a slow sender waits for
    nobody."""
    line = Downlink(100.0)
    assert line.arrives(100.0, 1.0) == 1.0
    assert line.arrives(100.0, 1.0) == 2.0
    assert line.arrives(100.0, 10.0) == 10.0
