"""QUIC among strangers: what is not the peer's is dropped, what the owner does not allow is not sent."""

from __future__ import annotations

import struct
from random import Random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.links.quic.datagrams import Datagram, DatagramSocket, trains
from node.links.quic.quic import QuicStream, open_quic
from node.links.quic.quic_connection import (
    ACK_RANGES_MAX,
    CONNECTION_ID_BYTES,
    DATAGRAM_BYTES,
    FencedConnection,
    first_destination,
    quic_configuration,
)
from tests.node.links.quic.quic_pair import CERTIFICATE, pair, udp_socket


def _garbage(random: Random) -> bytes:
    """Everything that could come: STUN, long and short headers, single bytes, nothing."""
    head = random.choice(
        [b"", b"\x00\x01\x00\x00\x21\x12\xa4\x42", b"\xc0\x00\x00\x00\x01\x08", b"\x40", b"\xff", b"\x16"]
    )
    return head + random.randbytes(random.choice([0, 1, 20, 1200, 1400]))


async def _talk(client: QuicStream, server: QuicStream) -> None:
    for sender, receiver in ((client, server), (server, client)):
        await sender.send_all(b"are you there")
        assert await receiver.receive_some() == b"are you there"


@pytest.mark.parametrize("seed", range(3))
async def test_garbage_from_the_peers_own_address_is_ignored(seed: int) -> None:
    """From the very socket of the client, before, between and after its packets."""
    random = Random(seed)
    left, right = await udp_socket(), await udp_socket()
    to_left, to_right = left.getsockname(), right.getsockname()
    opened: dict[bool, QuicStream] = {}
    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            opened[False] = await open_quic(nursery, right, to_left, client=False, certificate=CERTIFICATE)

        async with trio.open_nursery() as both:
            both.start_soon(serve)
            for _ in range(30):
                await left.sendto(_garbage(random), to_right)
            opened[True] = await open_quic(
                nursery, left, to_right, client=True, peer_fingerprint=CERTIFICATE.fingerprint
            )
        client, server = opened[True], opened[False]
        for _ in range(100):
            client._socket.send_now(_garbage(random), to_right)
            server._socket.send_now(_garbage(random), to_left)
        await _talk(client, server)
        for packet in _short_packets(server, random):
            client._socket.send_now(packet, to_right)
        await _talk(client, server)
        assert server.ignored_datagrams > 0
        nursery.cancel_scope.cancel()


def _short_packets(stream: QuicStream, random: Random) -> list[bytes]:
    """Packets to a connection id that is the stream's, with nothing true in them."""
    connection = stream._connection
    assert connection is not None
    return [b"\x41" + connection.host_cid + random.randbytes(size) for size in (0, 3, 20, 200, 1190)]


async def test_a_stranger_changes_nothing() -> None:
    """From another address: garbage costs a comparison, and even the right connection id moves no path."""
    random = Random(5)
    async with pair() as (client, server):
        stranger = await udp_socket()
        ignored = server.ignored_datagrams
        to_server = client.remote
        for _ in range(50):
            await stranger.sendto(random.randbytes(1200), to_server)
        for packet in _short_packets(server, random):
            await stranger.sendto(packet, to_server)
        await _talk(client, server)
        assert server.ignored_datagrams >= ignored + 50
        assert server._connection is not None
        assert [path.addr for path in server._connection._network_paths] == [server.remote]
        stranger.close()


async def test_the_servers_place_is_not_taken_by_a_packet_that_cannot_be_deciphered() -> None:
    """A first packet with a false body: the client that comes after it finds the server as it was."""
    left, right = await udp_socket(), await udp_socket()
    to_left, to_right = left.getsockname(), right.getsockname()
    async with trio.open_nursery() as nursery:
        opened: list[QuicStream] = []

        async def serve() -> None:
            opened.append(await open_quic(nursery, right, to_left, client=False, certificate=CERTIFICATE))

        nursery.start_soon(serve)
        client = FencedConnection(quic_configuration(client=True, certificate=None, idle_s=5.0))
        client.connect(to_right, now=trio.current_time())
        packet = bytearray(client.datagrams_to_send(trio.current_time())[0][0])
        packet[100] ^= 1
        assert first_destination(bytes(packet)) is not None
        await left.sendto(packet, to_right)
        stream = await open_quic(nursery, left, to_right, client=True, peer_fingerprint=CERTIFICATE.fingerprint)
        await stream.send_all(b"hello")
        while not opened:
            await trio.sleep(0.001)
        assert await opened[0].receive_some() == b"hello"
        nursery.cancel_scope.cancel()


@given(st.binary(min_size=1, max_size=40), st.integers(0, 1500))
def test_a_first_packet_is_told_from_anything_else(head: bytes, byte_count: int) -> None:
    """Any bytes give a connection id of 8 to 20 bytes, or None."""
    destination = first_destination(head.ljust(max(byte_count, 1), b"\0"))
    assert destination is None or 8 <= len(destination) <= 20


def test_an_acknowledgement_has_a_bound() -> None:
    """A peer that leaves every second number out gets the newest ranges acknowledged; the rest is forgotten."""
    connection = FencedConnection(quic_configuration(client=True, certificate=None, idle_s=5.0))
    connection.connect(("127.0.0.1", 9), now=0.0)
    space = connection._loss.spaces[0]
    for number in range(0, 2000, 2):
        space.ack_queue.add(number)
    space.largest_received_packet, space.largest_received_time, space.ack_at = 1998, 0.0, 0.0
    datagrams = connection.datagrams_to_send(0.0)
    assert datagrams
    assert len(space.ack_queue) == ACK_RANGES_MAX
    assert space.ack_queue.bounds().stop == 1999


class _Account:
    """Limits that count, and end at a sum."""

    receive_buffer_bytes = None

    def __init__(self, byte_count_max: int) -> None:
        self.up_bytes = self.down_bytes = 0
        self._byte_count_max = byte_count_max

    async def take_up(self, byte_count: int) -> None:
        self._check()
        self.up_bytes += byte_count

    async def take_down(self, byte_count: int) -> None:
        self._check()
        self.down_bytes += byte_count

    def _check(self) -> None:
        if self.up_bytes + self.down_bytes > self._byte_count_max:
            raise trio.BrokenResourceError("this month's transfer quota is used up")


async def test_every_datagram_is_paid_for() -> None:
    """What the client pays is what its gateway would see: payload, headers of QUIC, acknowledgements, handshake."""
    account = _Account(1 << 40)
    async with pair(account) as (client, server):
        opened_down = account.down_bytes
        assert account.up_bytes >= DATAGRAM_BYTES and opened_down >= DATAGRAM_BYTES
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send_all, bytes(1 << 20))
            received = 0
            while received < 1 << 20:
                received += len(await server.receive_some())
    assert 1.02 * (1 << 20) <= account.up_bytes <= 1.2 * (1 << 20)
    assert 0 < account.down_bytes - opened_down <= 0.1 * (1 << 20)


async def test_a_quota_that_is_used_up_ends_it_with_the_reason() -> None:
    """The stream breaks; no datagram goes out past the end except the goodbye."""
    async with pair(_Account(200_000)) as (client, _server):
        with pytest.raises(trio.BrokenResourceError, match="quota is used up"):
            await client.send_all(bytes(1 << 20))


@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 1)), max_size=200))
def test_trains_are_what_the_kernel_takes(parts: list[tuple[int, int]]) -> None:
    """In order and complete; one address, one size, only the last shorter, at most 64 and at most 65,000 bytes."""
    datagrams: list[Datagram] = [(bytes([i % 251]) * size, ("10.0.0.1", to)) for i, (size, to) in enumerate(parts)]
    found = list(trains(datagrams))
    assert [(datagram, address) for train, address in found for datagram in train] == datagrams
    for train, _ in found:
        assert len(train) <= 64 and sum(map(len, train)) <= 65_000
        assert all(len(datagram) == len(train[0]) for datagram in train[:-1])
        assert len(train[-1]) <= len(train[0])


async def test_trains_arrive_as_single_datagrams() -> None:
    """Whether the kernel offers to cut and to gather them or not."""
    for offered in (True, False):
        left, right = await udp_socket(), await udp_socket()
        to_right = right.getsockname()
        sender, receiver = DatagramSocket(left, None), DatagramSocket(right, None)
        sender._trains = offered
        sent: list[Datagram] = [(struct.pack("=I", i) * (300 if i != 49 else 7), to_right) for i in range(50)]
        await sender.send(sent)
        received: list[bytes] = []
        with trio.fail_after(5):
            while len(received) < len(sent):
                received += [datagram for datagram, _ in await receiver.receive()]
        assert received == [datagram for datagram, _ in sent]
        sender.close()
        receiver.close()


def test_connection_ids_are_long_enough_not_to_be_guessed() -> None:
    """A stranger would have to guess 64 bits for us to look at its packet."""
    connection = FencedConnection(quic_configuration(client=True, certificate=None, idle_s=5.0))
    assert len(connection.host_cid) == CONNECTION_ID_BYTES == 8
    assert connection.owns(connection.host_cid)
    assert not connection.owns(bytes(CONNECTION_ID_BYTES))
