"""The owner's limits: the rate holds whatever the sizes and however many links, and no byte escapes the quota."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from protocol.base.errors import BadInputError
from protocol.drive.limits import (
    BURST_S,
    CLOCK_S,
    RESERVE_PART,
    SMALL_BYTES,
    Bucket,
    Limits,
    LineLimits,
    Quota,
    QuotaUsedUpError,
)
from protocol.drive.transport import DialError
from protocol.messages import Ping
from tests.protocol.drive.harness import activation, stations

RATE = 1e6
HALF_MINUTE_S = 30.0
MIB = 1 << 20


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


class Wall:
    """A clock on the wall that a test sets; runs with trio's when told so."""

    def __init__(self, text: str, running: bool = False) -> None:
        self.time = at(text)
        self._began = trio.current_time() if running else None

    def __call__(self) -> float:
        return self.time + (0.0 if self._began is None else trio.current_time() - self._began)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_the_rate_holds_for_any_sizes_and_many_links(
    autojump_clock: trio.testing.MockClock, direction: str, seed: int
) -> None:
    """Over half a minute within 2 %, neither more nor, while all want to send, less; small ones are counted too."""
    rng = random.Random(seed)
    limits = Limits(RATE, RATE, clock=trio.current_time)
    take: Callable[[int], object] = limits.take_up if direction == "up" else limits.take_down
    sizes = [rng.choice((1, 100, SMALL_BYTES, 20_000, 65_536)) for _ in range(8)]

    async def link(size: int) -> None:
        while True:
            await take(size)  # type: ignore[misc]
            await trio.sleep(0.05 if size <= SMALL_BYTES else 0)

    await trio.sleep(100.0)  # an idle line saves nothing up
    with trio.move_on_after(HALF_MINUTE_S):
        async with trio.open_nursery() as nursery:
            for size in sizes:
                nursery.start_soon(link, size)
            nursery.start_soon(link, 65_536)
    assert 0.98 * RATE * HALF_MINUTE_S <= limits.moved_bytes <= 1.02 * RATE * HALF_MINUTE_S, f"{seed=} {sizes=}"


async def test_small_messages_overtake_tensors_but_not_the_limit(autojump_clock: trio.testing.MockClock) -> None:
    """Behind a queue of records a small message leaves at once; small ones alone are held to the rate as well."""
    limits = Limits(up_bytes_per_s=RATE)
    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(limits.take_up, 100_000)
        await trio.sleep(0.3)
        began = trio.current_time()
        await limits.take_up(100)
        assert trio.current_time() == began
        nursery.cancel_scope.cancel()
    limits = Limits(up_bytes_per_s=RATE)
    with trio.move_on_after(HALF_MINUTE_S):
        while True:
            await limits.take_up(SMALL_BYTES)
            await trio.lowlevel.checkpoint()
    assert limits.moved_bytes <= 1.02 * RATE * HALF_MINUTE_S


async def test_datagrams_are_paid_for_or_refused(autojump_clock: trio.testing.MockClock) -> None:
    """A way over UDP asks for each datagram: what is over the rate has to wait (up) or is dropped (down)."""
    limits = Limits(RATE, RATE)
    moved = {True: 0, False: 0}
    while trio.current_time() < HALF_MINUTE_S:
        moved[True] += limits.try_take_up(1200) * 1200
        moved[False] += limits.try_take_down(1200) * 1200
        await trio.sleep(0.001)  # offers 1.2 times the rate
    assert all(0.98 <= count / (RATE * HALF_MINUTE_S) <= 1.02 for count in moved.values()), moved


def test_a_bucket_pays_its_debt_and_saves_little() -> None:
    """The wait after a big piece is the time that it takes; an hour of silence is worth BURST_S."""
    bucket = Bucket(100.0, 0.0)
    bucket.spend(100.0, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0 - BURST_S)
    bucket.spend(0.0, 3600.0)
    bucket.spend(100.0, 3600.0)
    assert bucket.wait_s(3600.0) == pytest.approx(1.0 - BURST_S)
    assert Bucket(None, 0.0).wait_s(5.0) == 0.0


# ---- the quota -----------------------------------------------------------------------------------------------------


def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    """A clean end keeps the exact count; a kill at any moment leaves one that is a little too high, never too low."""
    wall, file = Wall("2026-11-22"), tmp_path / "transfers.json"
    quota = Quota(10 * MIB, file, wall)
    quota.spend(3 * MIB)
    quota.close()
    rng = random.Random(7)
    used = 3 * MIB
    for _ in range(5):
        quota = Quota(10 * MIB, file, wall)
        assert 10 * MIB - used - 5 * (MIB + 1) <= quota.remaining_bytes <= 10 * MIB - used
        before = quota.remaining_bytes
        spent = rng.randrange(MIB // 2)
        quota.spend(spent)
        used += spent
        assert quota.remaining_bytes == before - spent


def test_the_month_turns_and_never_back(tmp_path: Path) -> None:
    """At midnight UTC of the first everything is there again; a clock that is set back gives nothing back."""
    wall, file = Wall("2026-11-30T23:59:59"), tmp_path / "transfers.json"
    quota = Quota(1000, file, wall)
    quota.spend(1000)
    assert quota.remaining_bytes == 0
    wall.time += 1
    assert quota.remaining_bytes == 1000
    quota.spend(400)
    wall.time = at("2026-11-01")
    assert quota.remaining_bytes == 600
    quota.close()
    assert Quota(1000, file, wall).remaining_bytes == 600
    assert Quota(1000, file, Wall("2027-01-01")).remaining_bytes == 1000


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"month": "x", "bytes": 1}', '{"month": "2026-11", "bytes": -1}']
)
def test_a_damaged_record_is_named_and_counts_as_a_month_that_is_used_up(tmp_path: Path, content: str) -> None:
    """It is not taken for zero: the owner decides, and would pay. Nor does it end every start for ever: the next month
    begins by itself."""
    wall, file = Wall("2026-11-22"), tmp_path / "transfers.json"
    file.write_text(content)
    with capture_logs() as said:
        quota = Quota(1000, file, wall)
    assert [(line["event"], line["file"]) for line in said] == [("this month's record is lost", str(file))]
    assert not quota.has_room and quota.remaining_bytes == 0
    assert Quota(1000, file, wall).remaining_bytes == 0
    wall.time = at("2026-12-01")
    assert quota.has_room and quota.remaining_bytes == 1000


def test_the_record_survives_a_power_cut(tmp_path: Path, power_cut: Callable[[Path], None]) -> None:
    """It was renamed into place without its bytes: a server with a quota did not begin any more."""
    wall, file = Wall("2026-11-22"), tmp_path / "transfers.json"
    Quota(100 * MIB, file, wall).spend(30 * MIB)
    power_cut(file)
    assert 60 * MIB < Quota(100 * MIB, file, wall).remaining_bytes <= 70 * MIB


def test_a_record_that_cannot_be_is_named(tmp_path: Path) -> None:
    """Its folder is none: no month will change that."""
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=r"transfers\.json: cannot be used as the record"):
        Quota(1000, tmp_path / "file" / "transfers.json", Wall("2026-11-22"))


def test_a_disk_that_fills_up_costs_the_record_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts on in memory, and notes again when there is room; also one that begins on a full disk."""
    file, full = tmp_path / "transfers.json", True
    replace = os.replace

    def refuse(draft: Path, path: Path) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(draft, path)

    monkeypatch.setattr(os, "replace", refuse)
    quota = Quota(100 * MIB, file, Wall("2026-11-22"))
    quota.spend(30 * MIB)
    assert quota.remaining_bytes == 70 * MIB
    full = False
    quota.spend(30 * MIB)
    assert Quota(100 * MIB, file, Wall("2026-11-22")).remaining_bytes <= 40 * MIB


async def test_the_quota_is_announced_then_shut(tmp_path: Path) -> None:
    """With its reserve left it says so; what would go beyond it is refused before it moves, and all after that."""
    quota = Quota(100_000, tmp_path / "transfers.json", Wall("2026-11-22"))
    limits = Limits(quota=quota)
    await limits.take_up(49_000)
    assert limits.try_take_down(49_999) and not limits.low.is_set()
    await limits.take_down(1)
    assert limits.low.is_set() and not limits.used_up.is_set()
    assert limits.remaining_bytes == 100_000 * RESERVE_PART == limits.read_bytes
    with pytest.raises(QuotaUsedUpError):
        await limits.take_up(1001)
    assert limits.used_up.is_set() and not limits.try_take_down(1)
    with pytest.raises(QuotaUsedUpError):
        await limits.turn_down()
    assert limits.moved_bytes == 99_000


async def test_the_wait_ends_when_the_month_turns(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    """Nobody calls: the clock is looked at, also when it was set meanwhile."""
    wall = Wall("2026-11-28T12:00:00", running=True)
    limits = Limits(quota=Quota(1000, tmp_path / "transfers.json", wall))
    limits.spend_up(1000)
    await limits.wait_for_the_month()
    left_s = at("2026-12-01") - at("2026-11-28T12:00:00")
    assert left_s <= trio.current_time() <= left_s + CLOCK_S
    assert not limits.low.is_set() and limits.remaining_bytes == 1000
    assert limits.try_take_up(500)


async def test_no_byte_escapes_the_quota_on_a_link(tmp_path: Path) -> None:
    """Handshakes, records and keep-alive are in the count; at its end the link is cut with the reason named."""
    async with stations("server", "server") as (one, two):
        quota = Quota(MIB, tmp_path / "transfers.json", Wall("2026-11-22"))
        two.transport.limits = Limits(quota=quota)
        link = await two.transport.dial([one.address], one.identity.node)
        assert two.transport.limits.moved_bytes > 400, "the handshake was not counted"
        while not two.transport.limits.used_up.is_set():
            link.send(activation(MIB // 8), [bytes(MIB // 8)])
            link.send(Ping(number=1))
            await trio.sleep(0.001)
        await two.events.until(lambda events: events.down)
        assert two.events.down[0][1] == "this month's transfer quota is used up"
        assert two.transport.limits.moved_bytes <= MIB
        moved_bytes = two.transport.limits.moved_bytes
        with pytest.raises(DialError, match="quota"):
            await two.transport.dial([one.address], one.identity.node)
        assert two.transport.limits.moved_bytes == moved_bytes
        assert json.loads((tmp_path / "transfers.json").read_text())["bytes"] >= moved_bytes


def test_units_of_the_command_line(tmp_path: Path) -> None:
    """Mbit/s are a million bits, a gigabyte is a thousand million bytes."""
    limits = LineLimits(8.0, 80.0, 1.0).open(tmp_path / "state")
    assert (limits.up_bytes_per_s, limits.down_bytes_per_s, limits.remaining_bytes) == (1e6, 1e7, 10**9)
    limits.close()
    free = LineLimits().open(tmp_path)
    assert (free.up_bytes_per_s, free.down_bytes_per_s, free.remaining_bytes) == (None, None, None)
    free.close()


# ---- real sockets --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_the_limit_of_a_link_over_tcp_holds_within_two_percent() -> None:
    """Half a minute of tensors and control over real sockets: what arrived is the rate, within 2 %. One link has its
    limit up and another one down, side by side."""
    async with trio.open_nursery() as nursery:
        for direction in ("up", "down"):
            nursery.start_soon(_a_limit_over_tcp_holds, direction)


async def _a_limit_over_tcp_holds(direction: str) -> None:
    rate = 2.5e6
    async with stations("server", "server") as (one, two):
        sender, receiver = (two, one) if direction == "up" else (one, two)
        two.transport.limits = Limits(rate if direction == "up" else None, rate if direction == "down" else None)
        link = await two.transport.dial([one.address], one.identity.node)
        await one.events.until(lambda events: events.up)
        (out,) = sender.transport.links
        (back,) = receiver.transport.links
        data = bytes(4 * MIB)
        for _ in range(int(rate * 1.5 * HALF_MINUTE_S / len(data))):
            out.send(activation(len(data)), [data])
        await trio.sleep(2.0)
        began, before = trio.current_time(), back.received_bytes
        while trio.current_time() < began + HALF_MINUTE_S:
            out.send(Ping(number=1))
            await trio.sleep(0.1)
        measured = (back.received_bytes - before) / (trio.current_time() - began)
        assert 0.98 <= measured / rate <= 1.02, f"{direction}: {measured / rate:.4f} of the limit"
        link.close("measured")


async def test_who_waits_for_the_end_of_a_quota_hears_of_one_that_was_set_later(tmp_path: Path) -> None:
    """An owner sets a quota while the daemon works: it waits for the same event as before. (It waited for one that
    nobody set any more, and worked on without a line.)"""
    limits = Limits()
    low, used_up = limits.low, limits.used_up
    limits.set_quota(1000.0, tmp_path)
    limits._spend(limits._up, 1000)
    assert low.is_set() and used_up.is_set()
    limits.set_quota(None, tmp_path)
    assert not limits.low.is_set() and not limits.used_up.is_set()
    limits.close()


async def test_a_refusal_ends_the_month_also_with_more_than_the_reserve_left(tmp_path: Path) -> None:
    """A write of 5,000 bytes does not fit into the 4,000 that are left of 100,000: the line is shut, and says so, until
    the month turns or the owner sets another quota. (The line was shut, but 4 % counted as room: the owner's computer
    began again and was refused again, for minutes, with its device busy.)"""
    wall = Wall("2026-11-22")
    quota = Quota(100_000, tmp_path / "transfers.json", wall)
    limits = Limits(quota=quota)
    limits.spend_up(96_000)
    assert limits.has_room and not limits.low.is_set()
    with pytest.raises(QuotaUsedUpError):
        await limits.take_up(5000)
    assert limits.has_room is False and limits.low.is_set()
    limits.renew()
    assert limits.used_up.is_set(), "who begins again would be refused again"
    wall.time = at("2026-12-01")
    assert limits.has_room
    limits.renew()
    assert not limits.used_up.is_set() and limits.try_take_up(5000)
    limits.close()


async def test_a_greater_quota_opens_a_line_that_was_shut(tmp_path: Path) -> None:
    """What was refused under the old one may go now."""
    limits = Limits()
    limits.set_quota(100_000, tmp_path)
    limits.spend_up(96_000)
    assert not limits.try_take_up(5000) and limits.has_room is False
    limits.set_quota(200_000, tmp_path)
    assert limits.has_room and limits.remaining_bytes == 104_000 and limits.try_take_up(5000)
    limits.close()
