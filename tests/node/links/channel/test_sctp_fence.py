"""A peer that has passed DTLS cannot make the helper hold or compute more than a little (S6)."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiortc import rtcsctptransport as sctp
from google_crc32c import value as crc32c

from node.links.channel import sctp_fence
from node.links.channel.sctp_fence import FLIGHT_BYTES_MAX, FencedSctp, check_version

FIRST, LAST, UNORDERED = sctp.SCTP_DATA_FIRST_FRAG, sctp.SCTP_DATA_LAST_FRAG, sctp.SCTP_DATA_UNORDERED
TSN = 1000
TAG = 7


class _Wire:
    """Stands where DTLS stands: keeps what the victim sends, without ciphering."""

    state = "connected"
    _role = "server"

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque(maxlen=8)

    def _register_data_receiver(self, receiver: Any) -> None:
        pass

    def _unregister_data_receiver(self, receiver: Any) -> None:
        pass

    async def _send_data(self, data: bytes) -> None:
        self.sent.append(data)


@dataclass
class _Victim:
    association: FencedSctp
    wire: _Wire
    messages: list[bytes] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    @classmethod
    async def opened(cls, first_tsn: int = TSN) -> _Victim:
        """Its association with an attacker who sends from `first_tsn` on."""
        victim = cls.__new__(cls)
        victim.messages, victim.closed = [], []
        victim.wire = _Wire()
        victim.association = FencedSctp(
            victim.wire, on_message=victim.messages.append, on_room=lambda: None, on_closed=victim.closed.append
        )
        opening = asyncio.create_task(victim.association.open())
        await asyncio.sleep(0)
        init = sctp.InitAckChunk()
        init.initiate_tag, init.advertised_rwnd, init.initial_tsn = TAG, 1 << 20, first_tsn
        init.outbound_streams = init.inbound_streams = 65535
        init.params.append((sctp.SCTP_STATE_COOKIE, bytes(24)))
        await victim.take(init)
        await victim.take(sctp.CookieAckChunk())
        await opening
        return victim

    async def take(self, *chunks: sctp.Chunk) -> None:
        """One packet with these chunks."""
        await self.association._handle_data(self.packet(*chunks))

    def packet(self, *chunks: sctp.Chunk) -> bytes:
        """As it comes out of DTLS."""
        packet = sctp.serialize_packet(5000, 5000, self.association._local_verification_tag, chunks[0])
        head = packet[:8]
        body = packet[12:] + b"".join(bytes(chunk) for chunk in chunks[1:])
        checksum: int = crc32c(head + bytes(4) + body)
        return head + checksum.to_bytes(4, "little") + body


def _data(tsn: int, body: bytes, flags: int = 0, stream: int = 0, protocol: int = sctp.WEBRTC_BINARY) -> sctp.DataChunk:
    chunk = sctp.DataChunk(flags=flags)
    chunk.tsn, chunk.stream_id, chunk.stream_seq, chunk.protocol, chunk.user_data = tsn, stream, 0, protocol, body
    return chunk


def _unfinished(size: int) -> Iterator[tuple[sctp.Chunk, ...]]:
    """100 MB of one message that never ends."""
    yield (_data(TSN, bytes(size), FIRST),)
    yield from ((_data(TSN + number, bytes(size)),) for number in range(1, 100_000_000 // size))


def _unfinished_behind_a_hole() -> Iterator[tuple[sctp.Chunk, ...]]:
    """100 MB behind one fragment that never comes."""
    yield from ((_data(TSN + 1 + number, bytes(1160), FIRST | LAST),) for number in range(100_000_000 // 1160))


def _many_messages_with_holes() -> Iterator[tuple[sctp.Chunk, ...]]:
    """Every second fragment."""
    yield from ((_data(TSN + 1 + 2 * number, b"x", FIRST | LAST),) for number in range(100_000))


def _duplicates() -> Iterator[tuple[sctp.Chunk, ...]]:
    """The same fragment 100,000 times."""
    yield from ((_data(TSN, b"x", FIRST | LAST),) for _ in range(100_000))


def _packed_duplicates() -> Iterator[tuple[sctp.Chunk, ...]]:
    """The same, fifty in a packet."""
    yield from (tuple(_data(TSN, b"x", FIRST | LAST) for _ in range(50)) for _ in range(2_000))


def _streams() -> Iterator[tuple[sctp.Chunk, ...]]:
    """A fragment in each of 65,535 streams."""
    yield from ((_data(TSN + number, b"x", FIRST, stream=number),) for number in range(65_535))


def _unordered() -> Iterator[tuple[sctp.Chunk, ...]]:
    yield from ((_data(TSN + number, bytes(1160), UNORDERED),) for number in range(1000))


def _far_ahead() -> Iterator[tuple[sctp.Chunk, ...]]:
    yield (_data(TSN + 70_000, b"x", FIRST | LAST),)


def _wide_acknowledgements() -> Iterator[tuple[sctp.Chunk, ...]]:
    for _ in range(100):
        sack = sctp.SackChunk()
        sack.cumulative_tsn, sack.advertised_rwnd = 0, 1 << 20
        sack.gaps = [(1, 65535)] * 250
        yield (sack,)


def _forwarding() -> Iterator[tuple[sctp.Chunk, ...]]:
    chunk = sctp.ForwardTsnChunk()
    chunk.cumulative_tsn = TSN + 10
    yield (chunk,)


def _reset() -> Iterator[tuple[sctp.Chunk, ...]]:
    yield (sctp.ReconfigChunk(),)


def _wrong_kind() -> Iterator[tuple[sctp.Chunk, ...]]:
    """A data channel of the peer's own."""
    yield (_data(TSN, b"\x03" + bytes(11), FIRST | LAST, protocol=sctp.WEBRTC_DCEP),)


def _two_beginnings() -> Iterator[tuple[sctp.Chunk, ...]]:
    yield (_data(TSN, b"x", FIRST), _data(TSN + 1, b"y", FIRST))


def _end_without_beginning() -> Iterator[tuple[sctp.Chunk, ...]]:
    yield (_data(TSN, b"x", LAST),)


ATTACKS: list[Callable[[], Iterator[tuple[sctp.Chunk, ...]]]] = [
    lambda: _unfinished(1160),
    lambda: _unfinished(1),
    _unfinished_behind_a_hole,
    _many_messages_with_holes,
    _duplicates,
    _packed_duplicates,
    _streams,
    _unordered,
    _far_ahead,
    _wide_acknowledgements,
    _forwarding,
    _reset,
    _wrong_kind,
    _two_beginnings,
    _end_without_beginning,
]
NAMES = [
    "unfinished", "unfinished_small", "behind_a_hole", "holes", "duplicates", "packed_duplicates", "streams",
    "unordered", "far_ahead", "wide_acknowledgements", "forwarding", "reset", "wrong_kind", "two_beginnings",
    "end_without_beginning",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS, ids=NAMES)
def test_an_attack_ends_the_association_before_it_costs_much(attack: Callable[[], Any]) -> None:
    """Aborted, with less than 2 MiB held and less than 0.2 s of processor spent on what came (S6)."""

    async def attacked() -> None:
        victim = await _Victim.opened()
        gc.collect()
        tracemalloc.start()
        try:
            packets = 0
            for chunks in attack():
                packets += 1
                await victim.take(*chunks)
                if victim.association.aborted:
                    break
            held_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert victim.association.aborted and victim.closed == [victim.association.aborted]
        assert held_bytes < 2 << 20

        fresh = await _Victim.opened()
        prepared = [fresh.packet(*chunks) for chunks, _ in zip(attack(), range(packets), strict=False)]
        before_s = time.process_time()
        for packet in prepared:
            await fresh.association._handle_data(packet)
        spent_s = time.process_time() - before_s
        print(f"cut off after {packets} packets, {spent_s * 1000:.1f} ms of processor, {held_bytes >> 10} KiB at most")
        assert fresh.association.aborted and spent_s < 0.2
        await asyncio.gather(victim.association.end(), fresh.association.end())

    asyncio.run(attacked())


def test_nothing_more_is_read_of_a_peer_that_was_cut_off() -> None:
    """What still comes after the abort delivers no message and holds no memory."""

    async def attacked() -> None:
        victim = await _Victim.opened()
        await victim.take(_data(TSN, b"x", FIRST, stream=9))
        await victim.take(_data(TSN + 1, b"hello", FIRST | LAST))
        assert victim.messages == []
        assert victim.association._stream is None
        await victim.association.end()

    asyncio.run(attacked())


def test_a_flight_of_which_every_second_packet_is_lost_is_no_attack() -> None:
    """A router's queue that overflows does that. The acknowledgement fits into a datagram, what is sent again completes
    the stream, also where the numbers begin anew."""

    async def sent_again() -> None:
        for first in (TSN, 2**32 - 100):
            victim = await _Victim.opened(first)
            chunks = [
                _data((first + number) % 2**32, bytes([number % 251]) * 1160, FIRST | LAST)
                for number in range(FLIGHT_BYTES_MAX // 1160)
            ]
            for chunk in chunks[1::2]:
                await victim.take(chunk)
            assert victim.messages == [] and not victim.association.aborted
            assert max(map(len, victim.wire.sent)) < 1200
            for chunk in chunks[::2]:
                await victim.take(chunk)
            assert victim.messages == [chunk.user_data for chunk in chunks]
            await victim.association.end()

    asyncio.run(sent_again())


def test_messages_arrive_whole_and_in_order_however_fragments_come() -> None:
    """Reversed, doubled and interleaved fragments of honest messages."""

    async def honest() -> None:
        victim = await _Victim.opened()
        bodies = [bytes((number,)) * (3 * 1160) for number in range(20)]
        chunks: list[sctp.DataChunk] = []
        for body in bodies:
            for part in range(3):
                flags = (FIRST if part == 0 else 0) | (LAST if part == 2 else 0)
                chunks.append(_data(TSN + len(chunks), body[part * 1160 : (part + 1) * 1160], flags))
        for chunk in [*reversed(chunks[:30]), *chunks[10:20], *chunks[30:]]:
            await victim.take(chunk)
        assert victim.messages == bodies
        assert not victim.association.aborted
        assert victim.association._advertised_rwnd == 1 << 20
        await victim.association.end()

    asyncio.run(honest())


def test_a_late_copy_of_the_first_packet_does_no_harm() -> None:
    """aiortc itself would start counting anew, and take old data for new."""

    async def honest() -> None:
        victim = await _Victim.opened()
        await victim.take(_data(TSN, b"one", FIRST | LAST))
        late = sctp.InitChunk()
        late.initiate_tag, late.advertised_rwnd, late.initial_tsn = TAG, 1 << 20, TSN
        late.outbound_streams = late.inbound_streams = 65535
        packet = sctp.serialize_packet(5000, 5000, 0, late)
        await victim.association._handle_data(packet)
        await victim.take(_data(TSN, b"one", FIRST | LAST))
        await victim.take(_data(TSN + 1, b"two", FIRST | LAST))
        assert victim.messages == [b"one", b"two"]
        await victim.association.end()

    asyncio.run(honest())


def test_an_unknown_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence replaces inner methods; with another version nobody knows whether it still holds."""
    check_version()
    monkeypatch.setattr(sctp_fence, "version", lambda _package: "1.99.0")
    with pytest.raises(RuntimeError, match=r"1\.99\.0"):
        check_version()
