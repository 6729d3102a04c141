"""Data channels on bad lines, and peers that do not keep to what we agreed, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest
from aiortc.rtcdtlstransport import RTCCertificate

from node.links.channel.channel import MESSAGE_BYTES, Channel
from node.links.punch.helper_frames import WINDOW_BYTES
from node.links.quic.certificate import new_certificate


class _Line:
    """One end of a line that loses, delays and reorders datagrams, by the drawn numbers alone."""

    def __init__(self, random: Random, loss: float, delay_s: float) -> None:
        self._random, self._loss, self._delay_s = random, loss, delay_s
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.other: _Line
        self.cut = False

    async def receive(self) -> bytes:
        return await self._arrived.get()

    async def transmit(self, data: bytes) -> None:
        if not self.cut and self._random.random() >= self._loss:
            loop = asyncio.get_running_loop()
            loop.call_later(self._random.random() * self._delay_s, self.other._arrived.put_nowait, data)


class _End:
    """A daemon's end: sends what it has as credit comes, takes everything that comes."""

    def __init__(self, line: _Line) -> None:
        self.line = line
        self.credit = 0
        self.received = bytearray()
        self.consumes = True
        self.ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()
        self.changed = asyncio.Event()
        self.channel: Channel

    def deliver(self, data: bytes) -> None:
        self.received += data
        if self.consumes:
            self.channel.consumed(len(data))
        self.changed.set()

    def grant(self, byte_count: int) -> None:
        self.credit += byte_count
        self.changed.set()

    async def open(self, certificate: RTCCertificate, *, client: bool, fingerprint: bytes) -> None:
        self.channel = await Channel.open(
            self.line,
            certificate,
            client=client,
            fingerprint=fingerprint,
            deliver=self.deliver,
            grant=self.grant,
            ended=lambda reason, clean: self.ended.set_result((reason, clean)),
        )

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def send(self, data: bytes) -> None:
        while data:
            while not self.credit:
                await self.wait()
            piece, data = data[: self.credit], data[self.credit :]
            self.credit -= len(piece)
            self.channel.send(piece)


def with_pair(
    act: Callable[[_End, _End], Awaitable[None]], *, seed: int = 1, loss: float = 0.0, delay_s: float = 0.0
) -> None:
    """Open a channel between two ends and run `act` on them."""

    async def run() -> None:
        random = Random(seed)
        lines = [_Line(random, 0.0, delay_s) for _ in range(2)]
        lines[0].other, lines[1].other = lines[1], lines[0]
        own = [new_certificate() for _ in range(2)]
        ends = [_End(line) for line in lines]
        await asyncio.gather(
            *(
                end.open(
                    RTCCertificate(own[number].key, own[number].certificate),
                    client=number == 0,
                    fingerprint=own[1 - number].fingerprint,
                )
                for number, end in enumerate(ends)
            )
        )
        for line in lines:
            line._loss = loss
        try:
            async with asyncio.timeout(90):
                await act(*ends)
        finally:
            for end in ends:
                await end.channel.end()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "delay_s"), [(0.0, 0.02), (0.01, 0.0), (0.05, 0.02), (0.2, 0.005)])
def test_an_honest_peer_on_a_bad_line_is_not_cut_off(loss: float, delay_s: float) -> None:
    """Whatever is lost and reordered, the fence stays open and every byte arrives, both ways at once."""
    data = Random(3).randbytes(200_000 if loss > 0.1 else 1_500_000)

    async def act(alice: _End, bob: _End) -> None:
        sending = asyncio.gather(alice.send(data), bob.send(data[::-1]))
        while len(alice.received) < len(data) or len(bob.received) < len(data):
            assert not alice.ended.done() and not bob.ended.done()
            await asyncio.wait((asyncio.ensure_future(alice.wait()), asyncio.ensure_future(bob.wait())), timeout=1)
        await sending
        assert bob.received == data and alice.received == data[::-1]

    with_pair(act, loss=loss, delay_s=delay_s)


@pytest.mark.slow
def test_a_peer_that_is_gone_is_noticed_within_seconds() -> None:
    """The line goes dead without a word: each side says so by itself (aiortc alone would take half a minute)."""

    async def act(alice: _End, bob: _End) -> None:
        alice.line.cut = bob.line.cut = True
        began = asyncio.get_running_loop().time()
        reasons = await asyncio.gather(alice.ended, bob.ended)
        assert [clean for _, clean in reasons] == [False, False] and "nothing came" in reasons[0][0]
        assert asyncio.get_running_loop().time() - began < 15

    with_pair(act)


@pytest.mark.slow
def test_an_idle_channel_stays_open() -> None:
    """Heartbeats are answered: after more than the time of silence that would end it, it still carries."""

    async def act(alice: _End, bob: _End) -> None:
        await asyncio.sleep(7)
        await alice.send(b"still here")
        while bob.received != b"still here":
            await bob.wait()

    with_pair(act)


def test_a_clean_end_comes_after_everything_that_was_sent() -> None:
    async def act(alice: _End, bob: _End) -> None:
        await alice.send(b"x" * 50_000)
        await alice.channel.close()
        assert await bob.ended == ("the peer closed the connection", True)
        assert len(bob.received) == 50_000

    with_pair(act)


def test_nobody_gets_more_than_the_window_while_the_reader_sleeps() -> None:
    async def act(alice: _End, bob: _End) -> None:
        bob.consumes = False
        sending = asyncio.create_task(alice.send(bytes(2 * WINDOW_BYTES)))
        while len(bob.received) < WINDOW_BYTES:
            await bob.wait()
        await asyncio.sleep(0.2)
        assert len(bob.received) == WINDOW_BYTES and not sending.done()
        bob.consumes = True
        bob.channel.consumed(WINDOW_BYTES)
        await sending
        while len(bob.received) < 2 * WINDOW_BYTES:
            await bob.wait()

    with_pair(act)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\x00" + bytes(MESSAGE_BYTES), "too long"),
        (b"\x00", "unknown kind"),
        (b"\x01" + bytes(7), "unknown kind"),
        (b"\x01" + bytes(8), "credit that cannot be"),
        (b"\x01" + (2**63).to_bytes(8, "big"), "credit that cannot be"),
        (b"\x02 and more", "unknown kind"),
        (b"\x03", "unknown kind"),
    ],
)
def test_a_message_that_cannot_be_ends_the_channel(message: bytes, reason: str) -> None:
    async def act(alice: _End, bob: _End) -> None:
        alice.channel._sctp.channel.send(message)
        assert reason in (await bob.ended)[0]

    with_pair(act)


def test_a_peer_that_ignores_our_window_is_cut_off() -> None:
    async def act(alice: _End, bob: _End) -> None:
        bob.consumes = False
        for _ in range(WINDOW_BYTES // 10_000 + 1):
            alice.channel._sctp.channel.send(b"\0" + bytes(10_000))
        assert "more bytes than we said" in (await bob.ended)[0]
        assert len(bob.received) <= WINDOW_BYTES

    with_pair(act)


def test_our_own_daemon_cannot_send_without_credit() -> None:
    async def act(alice: _End, _bob: _End) -> None:
        with pytest.raises(ValueError, match="credit"):
            alice.channel.send(bytes(WINDOW_BYTES))

    with_pair(act)
