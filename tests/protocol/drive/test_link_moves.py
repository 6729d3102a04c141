"""One link over successive paths: moved when asked, mended when a carrier fails, ended when the peer has gone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from protocol.base.limits import GRACE_S, KEEP_ALIVE_S, SILENT_S
from protocol.drive import link as link_module
from protocol.drive.transport import DialError, Link, Transport
from protocol.messages import Activation, Ping
from tests.protocol.drive.harness import PATIENCE_S, Recorder, Station, activation, admit_all, stations
from tests.protocol.samples import RUN_ID

MIB = 1 << 20


@dataclass
class Way:
    """A path between two stations without sockets: it can break after so many bytes, or hold back all that is sent."""

    breaks_after: float = float("inf")
    holds: bool = False
    moved_bytes: int = 0
    ends: list[_End] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = [_End(self, stream) for stream in trio.testing.memory_stream_pair()]

    async def cut(self) -> None:
        for end in self.ends:
            await end.aclose()


class _End(trio.abc.Stream):
    def __init__(self, way: Way, inner: trio.abc.Stream) -> None:
        self._way = way
        self._inner = inner
        self._held = b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        way = self._way
        await trio.lowlevel.checkpoint()
        if way.holds:
            self._held += data
            return
        data, self._held = self._held + data, b""
        left = way.breaks_after - way.moved_bytes
        part = data if len(data) <= left else data[: int(left)]
        way.moved_bytes += len(part)
        await self._inner.send_all(part)
        if len(part) < len(data):
            await way.cut()
            raise trio.BrokenResourceError

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._inner.receive_some(max_bytes)

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._inner)


async def meet(
    one: Station | Transport, two: Station | Transport, way: Way, *, switch: bool = False, path: str = "quic"
) -> list[Link | DialError]:
    """`one` calls `two` over the way; what each ends with."""
    found: list[Link | DialError] = [DialError("nothing"), DialError("nothing")]

    async def adopt(number: int, us: Transport, them: Transport) -> None:
        try:
            found[number] = await us.adopt(
                way.ends[number],
                them._identity.node,
                initiator=number == 0,
                path=path,
                address="somewhere",
                prologue=b"test",
                switch=switch,
            )
        except DialError as error:
            found[number] = error

    first, second = (end.transport if isinstance(end, Station) else end for end in (one, two))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(adopt, 0, first, second)
        nursery.start_soon(adopt, 1, second, first)
    return found


def undisturbed(*ends: Station) -> bool:
    """Nobody was told of anything but that the link came up, once."""
    return all(len(end.events.up) == 1 and not end.events.down and not end.events.rejected for end in ends)


async def say(link: Link, numbers: range) -> None:
    """A control message and a tensor for each number."""
    for number in numbers:
        link.send(Ping(number=number))
        link.send(activation(100_000, number), [random.Random(number).randbytes(100_000)])
        await trio.sleep(0.001)


def heard(station: Station, count: int) -> Callable[[Recorder], bool]:
    return lambda events: len(events.messages) >= 2 * count


def check(station: Station, count: int) -> None:
    """Everything came once, control in its order, tensors whole."""
    pings = [message.number for _, message, _ in station.events.messages if isinstance(message, Ping)]
    assert pings == list(range(count))
    tensors = {m.task.microbatch: bytes(b[0]) for _, m, b in station.events.messages if isinstance(m, Activation)}
    assert len(station.events.messages) == 2 * count
    assert tensors == {number: random.Random(number).randbytes(100_000) for number in range(count)}


async def test_a_link_that_is_asked_to_moves_and_nobody_notices() -> None:
    """From TCP to another way in the middle of tensors both ways; the old stream is closed, the link is the same."""
    async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:
        link = await two.transport.dial([one.address], one.identity.node)
        await one.events.until(lambda events: events.up)
        other = one.events.up[0]
        nursery.start_soon(say, link, range(60))
        nursery.start_soon(say, other, range(60))
        for turn, (caller, called) in enumerate(((one, two), (two, one), (one, two))):
            await two.events.until(heard(two, 15 * turn + 5))
            before = link.received_bytes
            found = await meet(caller, called, Way(), switch=True)
            assert set(map(id, found)) == {id(link), id(other)}
            assert link.path == other.path == "quic" and link.received_bytes >= before
        await one.events.until(heard(one, 60))
        await two.events.until(heard(two, 60))
        check(one, 60)
        check(two, 60)
        assert undisturbed(one, two) and link.epoch == other.epoch == 3


async def test_a_link_may_move_back_to_tcp() -> None:
    """`dial` with `switch` opens a fresh connection to the same link; without it the open link is the answer."""
    async with stations("server", "server") as (one, two):
        first = (await meet(one, two, Way(), path="relay"))[0]
        assert isinstance(first, Link) and first.path == "relay"
        assert await two.transport.dial([one.address], one.identity.node) is two.events.up[0]
        assert two.events.up[0].path == "relay"
        link = await two.transport.dial([one.address], one.identity.node, switch=True)
        assert link is two.events.up[0] and link.path == "tcp"
        link.send(Ping(number=1))
        await one.events.until(lambda events: events.messages)
        assert first.path == "tcp" and first.epoch == 1 and undisturbed(one, two)


async def test_a_healthy_link_is_not_moved_unasked() -> None:
    """Whoever brings a second path without asking for the move gets the open link, and the path is closed."""
    async with stations("server", "server") as (one, two):
        await two.transport.dial([one.address], one.identity.node)
        await one.events.until(lambda events: events.up)
        way = Way()
        found = await meet(one, two, way)
        assert found[0] is one.events.up[0] and isinstance(found[1], DialError)
        assert one.events.up[0].path == "tcp" and undisturbed(one, two)
        with pytest.raises((trio.ClosedResourceError, trio.BrokenResourceError)):
            await way.ends[0].send_all(b"x")


@pytest.mark.parametrize("seed", range(12))
async def test_carriers_that_break_at_any_byte_cost_nothing(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    """Path after path breaks somewhere, in handshakes too; each time one side brings a new one within the grace."""
    rng = random.Random(seed)
    async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:

        def bring(link: Link, reason: str) -> None:
            async def another() -> None:
                for tries in itertools.count():
                    if not link.ailing or link.closing:
                        return
                    # The last tries work, since the grace is short; a break in a handshake is as good as any other.
                    after = rng.choice((50, 300, 700, 5000, 400_000, 2_000_000)) if tries < 4 else float("inf")
                    caller, called = rng.sample((one, two), 2)
                    await meet(caller, called, Way(after), switch=rng.random() < 0.5 or tries > 4)

            nursery.start_soon(another)

        one.transport.on_path_failed = bring
        (link, other) = await meet(one, two, Way(200_000))
        assert isinstance(link, Link) and isinstance(other, Link)
        nursery.start_soon(say, link, range(60))
        nursery.start_soon(say, other, range(60))
        await one.events.until(heard(one, 60))
        await two.events.until(heard(two, 60))
        check(one, 60)
        check(two, 60)
        assert undisturbed(one, two), f"{seed=}"
        assert link.epoch == other.epoch >= 2
        nursery.cancel_scope.cancel()


async def test_without_another_path_the_link_ends_after_its_grace(autojump_clock: trio.testing.MockClock) -> None:
    """Both sides hear of it once, with the reason, no later than GRACE_S after the carrier failed."""
    async with stations("server", "server") as (one, two):
        told: list[str] = []
        one.transport.on_path_failed = lambda link, reason: told.append(reason)
        way = Way()
        await meet(one, two, way)
        began = trio.current_time()
        await way.cut()
        await one.events.until(lambda events: events.down)
        await two.events.until(lambda events: events.down)
        assert trio.current_time() - began == pytest.approx(GRACE_S, abs=0.1)
        assert told and all(events.down[0][1].startswith("lost: ") for events in (one.events, two.events))
        assert not one.transport.links and not two.transport.links


async def test_a_tcp_connection_that_breaks_ends_the_link_at_once() -> None:
    """A process that dies breaks its connections: its work is given to others without waiting."""
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        await one.events.until(lambda events: events.up)
        with trio.fail_after(GRACE_S / 2):
            await link._carrier.stream.aclose()
            await one.events.until(lambda events: events.down)
            await two.events.until(lambda events: events.down)


@pytest.mark.parametrize("caller", [0, 1])
async def test_a_large_transfer_goes_on_over_a_new_connection_where_it_stopped(
    autojump_clock: trio.testing.MockClock, caller: int
) -> None:
    """TCP breaks in the middle of 16 MiB, twice; either side dials again, and nothing acknowledged is sent anew."""
    async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:
        ways = [Way(5 * MIB), Way(5 * MIB), Way()]
        brought = iter(ways)
        sides = (one, two) if caller == 0 else (two, one)

        def bring(link: Link, reason: str) -> None:
            async def again() -> None:
                await trio.sleep(1.0)
                await meet(*sides, next(brought), path="tcp")

            nursery.start_soon(again)

        sides[0].transport.on_path_failed = bring
        await meet(*sides, next(brought), path="tcp")
        link = one.events.up[0]
        content = random.Random(1).randbytes(16 * MIB)
        link.send(activation(16 * MIB, 3), [content])
        await two.events.until(lambda events: events.messages)
        assert bytes(two.events.messages[0][2][0]) == content
        assert undisturbed(one, two) and link.epoch == 2
        assert sum(way.moved_bytes for way in ways) < 18 * MIB
        nursery.cancel_scope.cancel()


async def test_a_large_transfer_whose_receiver_is_gone_ends_after_the_grace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Nobody answers a new connection: both sides hear of the end once."""
    async with stations("server", "server") as (one, two):
        way = Way(5 * MIB)
        await meet(one, two, way, path="tcp")
        one.events.up[0].send(activation(16 * MIB, 3), [bytes(16 * MIB)])
        began = trio.current_time()
        await one.events.until(lambda events: events.down)
        await two.events.until(lambda events: events.down)
        assert trio.current_time() - began == pytest.approx(GRACE_S, abs=0.5)
        assert not one.transport.links and not two.transport.links


async def test_a_silent_path_is_found_in_seconds_and_left(autojump_clock: trio.testing.MockClock) -> None:
    """Nothing arrives any more and nothing breaks: the owner hears of it, brings another path, and nothing is lost."""
    async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:
        way = Way()
        (link, other) = await meet(one, two, way)
        assert isinstance(link, Link) and isinstance(other, Link)
        await trio.sleep(60.0)
        assert not link.ailing and not other.ailing, "an idle path that works is not silent"
        told: list[float] = []

        def bring(link: Link, reason: str) -> None:
            assert reason.startswith("silent") and link.ailing == reason
            told.append(trio.current_time())
            nursery.start_soon(meet, one, two, Way())

        one.transport.on_path_failed = bring
        way.holds, began = True, trio.current_time()
        await say(link, range(5))
        await say(other, range(5))
        await one.events.until(heard(one, 5))
        await two.events.until(heard(two, 5))
        check(one, 5)
        check(two, 5)
        assert 0 < told[0] - began <= SILENT_S + 2 * KEEP_ALIVE_S and len(told) == 1
        assert undisturbed(one, two) and not link.ailing


async def test_a_silent_path_that_wakes_up_is_well_again(autojump_clock: trio.testing.MockClock) -> None:
    """Whether a silent peer is given up is the machine's affair: the link stays, and what comes again heals it."""
    async with stations("server", "server") as (one, two):
        way = Way()
        (link, _) = await meet(one, two, way)
        assert isinstance(link, Link)
        way.holds = True
        await trio.sleep(2 * SILENT_S)
        assert link.ailing
        way.holds = False
        await trio.sleep(2 * KEEP_ALIVE_S)
        assert not link.ailing and undisturbed(one, two) and link.epoch == 0


async def test_a_receiver_that_is_busy_is_not_silent(autojump_clock: trio.testing.MockClock) -> None:
    """While a message is being digested nothing is read: that says nothing about the path."""
    async with stations("server", "server") as (one, two):
        (link, other) = await meet(one, two, Way())
        assert isinstance(link, Link) and isinstance(other, Link)
        one.events.hold = trio.Event()
        other.send(Ping(number=1))
        await trio.sleep(10 * SILENT_S)
        assert not link.ailing and not other.ailing
        one.events.hold.set()


async def test_the_round_trip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the machines, on both sides, for the path that is in use."""
    monkeypatch.setattr(link_module, "KEEP_ALIVE_S", 0.01)
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        with trio.fail_after(PATIENCE_S):
            while link.round_trip_s is None or one.events.up[0].round_trip_s is None:
                await trio.sleep(0.01)
        assert 0 < link.round_trip_s < 5
        await meet(one, two, Way(), switch=True)
        assert link.path == "quic"
        with trio.fail_after(PATIENCE_S):
            while link.round_trip_s is None:
                await trio.sleep(0.01)


async def test_both_sides_may_ask_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Of two attempts at the same moment one counts, on both sides, and the link works."""
    for seed in range(20):
        rng = random.Random(seed)
        async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:
            (link, other) = await meet(one, two, Way())
            assert isinstance(link, Link) and isinstance(other, Link)
            ways = [Way(), Way(), Way()]

            async def attempt(way: Way, delay_s: float, call: Callable[..., Awaitable[object]] = meet) -> None:
                await trio.sleep(delay_s)
                first, second = rng.sample((one, two), 2)  # noqa: B023 - awaited below, in this turn of the loop
                await call(first, second, way, switch=True)

            async with trio.open_nursery() as attempts:
                for way in ways:
                    attempts.start_soon(attempt, way, rng.choice((0.0, 0.0, 0.001)))
            nursery.start_soon(say, link, range(5))
            nursery.start_soon(say, other, range(5))
            await one.events.until(heard(one, 5))
            await two.events.until(heard(two, 5))
            check(one, 5)
            check(two, 5)
            assert undisturbed(one, two) and link.epoch == other.epoch >= 1, f"{seed=}"
            nursery.cancel_scope.cancel()


async def test_a_peer_that_was_started_again_is_a_new_link() -> None:
    """It does not know the old link: ours ends, and a new one begins on the path that was meant for a move."""
    async with stations("server", "server") as (one, two), trio.open_nursery() as nursery:
        await meet(one, two, Way())
        reborn = Recorder()
        second = Transport(
            nursery,
            identity=two.identity,
            role="server",
            run_id=RUN_ID,
            credential=lambda: b"server",
            admit=admit_all,
            events=reborn,
        )
        found = await meet(one.transport, second, Way(), switch=True)
        assert all(isinstance(link, Link) for link in found)
        assert [reason for _, reason in one.events.down] == ["replaced by a new link"]
        assert len(one.events.up) == 2 and one.transport.links == (found[0],) and len(reborn.up) == 1
        found[0].send(Ping(number=1))  # type: ignore[union-attr]
        await reborn.until(lambda events: events.messages)
        nursery.cancel_scope.cancel()


async def test_a_link_that_closes_does_not_move() -> None:
    """What is closing ends; the path that comes then carries a new link."""
    async with stations("server", "server") as (one, two):
        (link, _) = await meet(one, two, Way())
        assert isinstance(link, Link)
        link.close("enough")
        found = await meet(one, two, Way(), switch=True)
        assert all(isinstance(new, Link) and new is not link for new in found)
        await one.events.until(lambda events: len(events.down) == 1 and len(events.up) == 2)


async def test_the_wrong_peer_on_an_adopted_stream_is_refused() -> None:
    """Whoever brings a stream says who is at its other end; both roles check it, and close the stream."""
    async with stations("server", "server", "server") as (one, two, three):
        way = Way()
        results: list[str] = []

        async def adopt(us: Station, stream: trio.abc.Stream, peer: Station, initiator: bool) -> None:
            with pytest.raises(DialError) as told:
                await us.transport.adopt(
                    stream, peer.identity.node, initiator=initiator, path="quic", address="x", prologue=b""
                )
            results.append(str(told.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(adopt, one, way.ends[0], two, True)
            nursery.start_soon(adopt, three, way.ends[1], one, False)
        assert any("identity" in text for text in results) and not one.events.up and not three.events.up


async def test_the_prologue_is_agreed_on() -> None:
    """Two ends that saw different fingerprints never authenticate: somebody sits between them."""
    async with stations("server", "server") as (one, two):
        way = Way()
        failures: list[DialError] = []

        async def adopt(us: Station, number: int, peer: Station) -> None:
            try:
                await us.transport.adopt(
                    way.ends[number],
                    peer.identity.node,
                    initiator=number == 0,
                    path="channel",
                    address="x",
                    prologue=bytes([number]),
                )
            except DialError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(adopt, one, 0, two)
            nursery.start_soon(adopt, two, 1, one)
        assert len(failures) == 2 and not one.events.up and not two.events.up
