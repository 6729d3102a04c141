"""Lines of the simulated world: shared on the way up, never carrying more than they can."""

from __future__ import annotations

from random import Random

import pytest

from protocol.world.lines import Downlink, Uplink


def test_transfers_share_a_line_up_and_the_small_one_is_through_first() -> None:
    """100 bytes and 300 begin together at 100 bytes/s: each has half, then the large one has all."""
    line = Uplink(100.0)
    line.add(100.0, "a", "small", 0.0)
    line.add(300.0, "b", "large", 0.0)
    assert line.next_s(0.0) == 2.0
    assert line.through(2.0) == ["small"]
    assert line.next_s(2.0) == 4.0
    assert line.through(4.0) == ["large"]
    assert line.next_s(4.0) is None and line.waiting_bytes == 0.0


def test_a_transfer_that_comes_later_slows_the_others_from_then_on() -> None:
    """After half a second alone, two share: 50 of 100 bytes are left, at 50 bytes/s."""
    line = Uplink(100.0)
    line.add(100.0, "a", "first", 0.0)
    line.add(1000.0, "b", "second", 0.5)
    assert line.next_s(0.5) == 1.5


def test_transfers_of_one_queue_go_one_after_the_other() -> None:
    """Two of queue `a` and one of `b`, 100 bytes each at 100 bytes/s: the second of `a` begins when the first is
    through, and a cleared line begins anew."""
    line = Uplink(100.0)
    for queue, item in (("a", "first"), ("a", "second"), ("b", "third")):
        line.add(100.0, queue, item, 0.0)
    assert line.next_s(0.0) == 2.0
    assert line.through(2.0) == ["first", "third"]
    assert line.next_s(2.0) == 3.0
    line.clear()
    line.add(100.0, "a", "fourth", 2.0)
    assert line.next_s(2.0) == 3.0 and line.through(3.0) == ["fourth"]


def test_a_line_down_takes_in_no_more_than_its_rate() -> None:
    """Two transfers of a second each that were sent at once are through one after the other; a slow sender waits for
    nobody."""
    line = Downlink(100.0)
    assert line.arrives(100.0, 1.0) == 1.0
    assert line.arrives(100.0, 1.0) == 2.0
    assert line.arrives(100.0, 10.0) == 10.0


def test_a_sum_waits_until_results_of_its_step_are_through_and_then_has_the_whole_line() -> None:
    """A sum of 300 bytes goes alone for a second at 100 bytes/s; a result of 100 that comes then is through a second
    later, as if the sum were not there, and the sum at 4 s, when it would have been beside it, too."""
    line = Uplink(100.0)
    line.add(300.0, "sums", "sum", 0.0, after=7)
    line.add(100.0, "results", "result", 1.0, step=7, after=6)
    assert line.next_s(1.0) == 2.0 and line.through(2.0) == ["result"]
    assert line.next_s(2.0) == 4.0 and line.through(4.0) == ["sum"]
    assert line.waiting_bytes == 0.0 and line.next_s(4.0) is None


def test_a_sum_that_comes_behind_results_begins_when_the_last_of_them_is_through() -> None:
    """Of its step and of the one before, which goes first."""
    line = Uplink(100.0)
    line.add(100.0, "results of 6", "older", 0.0, step=6, after=5)
    line.add(100.0, "results of 7", "same", 0.0, step=7, after=6)
    line.add(100.0, "sums", "sum", 0.0, after=7)
    assert line.next_s(0.0) == 1.0 and line.through(1.0) == ["older"]
    assert line.next_s(1.0) == 2.0 and line.through(2.0) == ["same"]
    assert line.next_s(2.0) == 3.0 and line.through(3.0) == ["sum"]


def test_a_sum_shares_the_line_with_results_of_the_next_step() -> None:
    """100 bytes each at 100 bytes/s: both are through at 2 s; a cleared line holds nothing back."""
    line = Uplink(100.0)
    line.add(100.0, "sums", "sum", 0.0, after=7)
    line.add(100.0, "results", "next", 0.0, step=8, after=7)
    assert line.next_s(0.0) == 2.0 and sorted(line.through(2.0)) == ["next", "sum"]
    line.add(100.0, "results", "same", 2.0, 7, 6)
    line.clear()
    line.add(100.0, "sums", "sum", 2.0, after=7)
    assert line.next_s(2.0) == 3.0


@pytest.mark.parametrize("busy", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("days", [0.0, 0.1, 1.0, 31.0])
def test_a_fast_line_gets_through_everything_however_late_it_is(days: float, busy: float) -> None:
    """A byte of a line of 10 Gbit/s takes less than the clock can tell apart after some hours, and a line that has
    carried terabytes counts them in steps of some thousandths: each transfer is through after one look or two."""
    drawn = Random(7)
    line = Uplink(10e9 / 8)
    now = days * 86_400.0
    line._given = busy * now * line.rate  # as if it had been busy for such a share of its time
    for _ in range(1000):
        count = drawn.randrange(1, 9)
        for number in range(count):
            line.add(drawn.uniform(1.0, 1e9), number, number, now)
        looks = 0
        while (next_s := line.next_s(now)) is not None:
            looks += 1
            assert looks <= 2 * count, "it looks again and again"
            now = max(now, next_s)
            line.through(now)
        now += drawn.random()
