"""QUIC and a peer that has the keys and means harm: it ends its own connection, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import trio
from aioquic._buffer import Buffer
from aioquic.quic.events import StreamDataReceived
from aioquic.tls import Epoch

from node.links.quic.quic import GATHERED_BYTES, QuicStream
from node.links.quic.quic_connection import (
    ACK_RANGES_MAX,
    HOLES_MAX,
    PATHS_MAX,
    STREAM_ID,
    FencedConnection,
    first_destination,
    quic_configuration,
)
from tests.node.links.quic.quic_pair import CERTIFICATE, pair, udp_socket

CLIENT, SERVER = ("127.0.0.1", 1001), ("127.0.0.1", 1002)
PACKET_BYTES = 1150


class _Forger:
    """A client whose handshake is honest, and which then seals packets of its own making for the server."""

    def __init__(self) -> None:
        self.client = FencedConnection(quic_configuration(client=True, certificate=None, idle_s=1e6))
        self.client.connect(SERVER, now=0.0)
        first = self.client.datagrams_to_send(0.0)
        self.victim = FencedConnection(
            quic_configuration(client=False, certificate=CERTIFICATE, idle_s=1e6),
            original_destination=first_destination(first[0][0]),
        )
        self.now = 0.0
        self._to_victim(first)
        for _ in range(5):
            self.now += 0.01
            for data, _ in self.victim.datagrams_to_send(self.now):
                self.client.receive_datagram(data, SERVER, self.now)
            self._to_victim(self.client.datagrams_to_send(self.now))
        self.client.send_stream_data(STREAM_ID, b"\x01")
        self._to_victim(self.client.datagrams_to_send(self.now))

    def _to_victim(self, datagrams: list[tuple[bytes, tuple[str, int]]]) -> None:
        for data, _ in datagrams:
            self.victim.receive_datagram(data, CLIENT, self.now)

    def say(self, frames: bytes, source: tuple[str, int] = CLIENT, step: int = 1) -> None:
        """A packet with these frames; its number is `step` beyond the last one."""
        crypto = self.client._cryptos[Epoch.ONE_RTT]
        number = self.client._packet_number
        self.client._packet_number += step
        first = 0x43 | crypto.send.key_phase << 2
        header = bytes([first]) + self.victim.host_cid + (number & 0xFFFFFFFF).to_bytes(4, "big")
        self.now += 1e-5
        self.victim.receive_datagram(crypto.encrypt_packet(header, frames, number), source, self.now)


def _pieces(head: bytes, piece_bytes: int, gap_bytes: int) -> Iterator[bytes]:
    """Packets full of frames that each carry a piece of a stream; `head` is what stands before the offset."""
    offset = 8
    while True:
        buffer = Buffer(PACKET_BYTES + 100)
        while buffer.tell() < PACKET_BYTES:
            buffer.push_bytes(head)
            buffer.push_uint_var(offset)
            buffer.push_uint_var(piece_bytes)
            buffer.push_bytes(bytes(piece_bytes))
            offset += piece_bytes + gap_bytes
        yield buffer.data_slice(0, buffer.tell())


@pytest.mark.parametrize(
    ("head", "ranges"),
    [
        (bytes((0x0E, STREAM_ID)), lambda victim: victim._streams[STREAM_ID].receiver._ranges),
        (bytes((0x06,)), lambda victim: victim._crypto_streams[Epoch.ONE_RTT].receiver._ranges),
    ],
    ids=["stream", "crypto"],
)
def test_holes_on_purpose_end_the_connection(head: bytes, ranges: Callable[[FencedConnection], object]) -> None:
    """Every frame would be compared with all holes before it: 470 kB had cost a minute."""
    forger = _Forger()
    packets = _pieces(head, 1, 1)
    for _ in range(20):
        forger.say(next(packets))
    assert forger.victim.ending is not None and "holes" in forger.victim.ending.reason_phrase
    assert len(ranges(forger.victim)) <= HOLES_MAX + 20  # type: ignore[arg-type]


def test_what_loss_leaves_of_a_window_is_no_attack() -> None:
    """Each second datagram of a window by chance is the worst that loss can do."""
    assert HOLES_MAX > (4 << 20) / 1200 / 4


def test_packets_that_ask_for_no_answer_leave_no_list_behind() -> None:
    forger = _Forger()
    for _ in range(1000):
        forger.say(bytes(8), step=2)  # padding
    assert len(forger.victim._spaces[Epoch.ONE_RTT].ack_queue) <= ACK_RANGES_MAX
    assert forger.victim.ending is None


def test_a_peer_that_is_everywhere_at_once_is_remembered_at_a_few_places() -> None:
    """And where it stays, it is found."""
    forger = _Forger()
    for port in range(2000, 2100):
        forger.say(b"\x01", ("127.0.0.1", port))
        forger.victim.datagrams_to_send(forger.now)
        assert len(forger.victim._network_paths) <= PATHS_MAX
    assert forger.victim._network_paths[0].addr == ("127.0.0.1", 2099)


@pytest.mark.parametrize("by", ["stop_stream", "reset_stream"])
@pytest.mark.parametrize("serves", [False, True], ids=["client", "server"])
async def test_a_stream_that_the_peer_resets_breaks_as_any_other(by: str, serves: bool) -> None:
    """STOP_SENDING and RESET_STREAM, which we never send: no assertion of the library's comes out."""
    async with pair() as (client, server):
        attacker, victim = (client, server) if serves else (server, client)
        await client.send_all(b"hello")
        assert await server.receive_some() == b"hello"
        connection = attacker._connection
        assert connection is not None
        getattr(connection, by)(STREAM_ID, 7)
        attacker._wake.set()
        with pytest.raises(trio.BrokenResourceError, match="the peer reset the stream"):
            await victim.send_all(bytes(100 << 20))
        with pytest.raises(trio.BrokenResourceError, match="the peer reset the stream"):
            await victim.receive_some()
        await victim.aclose()


async def test_a_stream_that_was_reset_under_accepted_bytes_can_be_closed() -> None:
    async with pair() as (client, server):
        server._socket.close()  # nothing is acknowledged any more
        await client.send_all(b"never acknowledged")
        connection = client._connection
        assert connection is not None
        connection._streams[STREAM_ID].sender.reset(7)
        await client.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await client.send_all(b"more")


async def test_bytes_that_come_one_by_one_are_kept_together() -> None:
    """A window of one-byte frames had made a million objects of them."""
    async with pair() as (client, server):
        connection = client._connection
        assert connection is not None
        byte_count = 20_000
        for _ in range(byte_count // 100):
            connection.send_stream_data(STREAM_ID, bytes(100))
        client._wake.set()
        with trio.fail_after(5):
            while sum(map(len, server._received)) < byte_count:
                await trio.sleep(0.01)
        _feed(server, byte_count)
        assert len(server._received) <= 2 * (2 * byte_count / GATHERED_BYTES + 1)
        received = 0
        while received < 2 * byte_count:
            received += len(await server.receive_some(700))


def _feed(stream: QuicStream, byte_count: int) -> None:
    """As the library tells of frames of one byte each."""
    for _ in range(byte_count):
        stream._on_data(StreamDataReceived(data=b"z", end_stream=False, stream_id=STREAM_ID))


async def test_a_peer_may_not_move_where_nobody_may_be_reached() -> None:
    """ICE would send nothing there, so QUIC does not either, though the packets are the peer's own."""
    asked: list[tuple[str, int]] = []

    def may_reach(host: str, port: int) -> bool:
        asked.append((host, port))
        return False

    async with pair(may_reach=may_reach) as (victim, attacker):
        await victim.send_all(b"hello")
        assert await attacker.receive_some() == b"hello"
        elsewhere = await udp_socket()
        to_victim = victim._socket._raw.getsockname()
        connection = attacker._connection
        assert connection is not None
        for _ in range(3):
            connection.send_ping(1)
            for data, _ in connection.datagrams_to_send(trio.current_time()):
                await elsewhere.sendto(data, to_victim)
        with trio.fail_after(5):
            while not asked:
                await trio.sleep(0.01)
        assert asked[0] == elsewhere.getsockname()
        assert victim._connection is not None
        assert [path.addr for path in victim._connection._network_paths] == [victim.remote]
        elsewhere.close()
