"""QUIC as a stream: it keeps trio's promises, over real sockets, through losses, new mappings and abrupt ends."""

from __future__ import annotations

import gc
import hashlib
import os

import pytest
import trio
from trio.testing import check_two_way_stream

from node.links.quic.certificate import new_certificate
from node.links.quic.quic import SILENT_S, UNSENT_BYTES, QuicError, QuicStream, open_quic
from node.links.quic.quic_connection import RECEIVE_WINDOW_BYTES, STREAM_ID
from tests.node.links.quic.quic_pair import CERTIFICATE, open_pair, pair, pair_through_gateway, udp_socket


def _bytes(seed: int, byte_count: int) -> bytes:
    return hashlib.shake_256(bytes([seed])).digest(byte_count)


async def _receive(stream: QuicStream, byte_count: int) -> bytes:
    data = b""
    while len(data) < byte_count:
        piece = await stream.receive_some()
        assert piece, f"ended after {len(data)} of {byte_count} bytes: {stream.reason}"
        data += piece
    return data


async def _carry(sender: QuicStream, receiver: QuicStream, seed: int, byte_count: int) -> None:
    """Send so many bytes, and see that they arrive as they were."""
    data = _bytes(seed, byte_count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.send_all, data)
        assert await _receive(receiver, byte_count) == data


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_it_is_a_stream_as_trio_defines_one() -> None:
    """trio's own conformance test."""
    async with trio.open_nursery() as nursery:

        async def make() -> tuple[QuicStream, QuicStream]:
            return await open_pair(nursery)

        await check_two_way_stream(make, None)
        nursery.cancel_scope.cancel()


async def test_bytes_go_both_ways_at_once_and_arrive_as_they_were_sent() -> None:
    """Four megabytes each way."""
    async with pair() as (client, server), trio.open_nursery() as nursery:
        nursery.start_soon(_carry, client, server, 1, 4 << 20)
        nursery.start_soon(_carry, server, client, 2, 4 << 20)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_what_is_lost_on_the_way_arrives_all_the_same(seed: int) -> None:
    """Every twentieth datagram of either direction is dropped."""
    async with pair_through_gateway(seed) as (client, server, gateway):
        gateway.loss = 0.05
        await _carry(client, server, seed, 1 << 20)
        await _carry(server, client, seed, 1 << 20)


async def test_a_gateway_that_maps_anew_does_not_end_it() -> None:
    """The client's address changes twice in the middle of transfers both ways; the server validates the new path."""
    async with pair_through_gateway() as (client, server, gateway):
        await _carry(client, server, 1, 100_000)
        for seed in (2, 3):
            await gateway.rebind()
            await _carry(client, server, seed, 1 << 20)
            await _carry(server, client, seed, 1 << 20)
        connection = server._connection
        assert connection is not None
        assert connection._network_paths[0].addr == gateway.outer.getsockname()
        # Its question may have been lost among the bulk at a full socket, and is asked again.
        with trio.fail_after(SILENT_S):
            while not connection._network_paths[0].is_validated:
                await trio.sleep(0.01)


async def test_a_new_path_is_asked_again_when_the_first_question_was_lost() -> None:
    """Otherwise the server might send there three times what comes from there, and no more, for ever."""
    async with pair_through_gateway() as (client, server, gateway):
        await _carry(client, server, 1, 10_000)
        connection = server._connection
        assert connection is not None
        gateway.inwards_loss = 1.0
        await gateway.rebind()
        await client.send_all(b"from elsewhere")
        assert await _receive(server, 14) == b"from elsewhere"
        while not (connection._network_paths[0].local_challenge_sent and gateway.inwards_dropped):
            await trio.sleep(0.001)
        gateway.inwards_loss = 0.0
        with trio.fail_after(SILENT_S):
            while not connection._network_paths[0].is_validated:
                await trio.sleep(0.01)
        await _carry(server, client, 2, 1 << 20)


async def test_a_send_that_is_cancelled_leaves_nothing_behind() -> None:
    """Nobody reads; the send is given up, both ends are closed: no task and no file stays."""
    files = _open_files()
    async with trio.open_nursery() as nursery:
        tasks = len(trio.lowlevel.current_task().child_nurseries[0].child_tasks)
        for _ in range(3):
            client, server = await open_pair(nursery)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as sending:
                    sending.start_soon(client.send_all, bytes(4 * RECEIVE_WINDOW_BYTES))
                    while client._connection is None or client._connection.unacknowledged_bytes == 0:
                        await trio.sleep(0.001)
                    scope.cancel()
            await server.aclose()
            await client.aclose()
            await client._ended.wait()
            await server._ended.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == tasks
    assert _open_files() == files


async def test_what_was_accepted_arrives_after_a_forceful_close() -> None:
    """As with TCP, where the kernel goes on: the last words of a link are sent just before its stream is closed."""
    async with pair() as (client, server):
        await client.send_all(b"last words")
        await trio.aclose_forcefully(client)
        assert await _receive(server, 10) == b"last words"
        assert await server.receive_some() == b""


async def test_a_process_that_ends_says_so() -> None:
    """Its nursery is cancelled: the peer learns it at once, and what was sent before can still be read."""
    async with trio.open_nursery() as nursery:
        left, right = await udp_socket(), await udp_socket()
        to_left, to_right = left.getsockname(), right.getsockname()
        async with trio.open_nursery() as doomed:
            opened: list[QuicStream] = []

            async def open_server() -> None:
                opened.append(await open_quic(nursery, right, to_left, client=False, certificate=CERTIFICATE))

            nursery.start_soon(open_server)
            client = await open_quic(doomed, left, to_right, client=True, peer_fingerprint=CERTIFICATE.fingerprint)
            while not opened:
                await trio.sleep(0.001)
            doomed.cancel_scope.cancel()
        with trio.fail_after(SILENT_S / 2), pytest.raises(trio.BrokenResourceError, match="this process is ending"):
            await opened[0].receive_some()
        assert client.reason == "this process is ending"


@pytest.mark.slow
async def test_a_peer_that_falls_silent_is_found_within_five_seconds() -> None:
    """Its packets stop without a word; whoever waits for bytes, or sends some, is told."""
    async with pair_through_gateway() as (client, server, gateway):
        await trio.sleep(2.0)
        assert not client.reason and not server.reason, "a connection without traffic is kept alive"
        gateway.loss = 1.0
        with trio.fail_after(5.0):
            async with trio.open_nursery() as nursery:
                for stream in (client, server):
                    nursery.start_soon(_expect_silence, stream)


async def _expect_silence(stream: QuicStream) -> None:
    with pytest.raises(trio.BrokenResourceError, match="silent"):
        await stream.receive_some()


async def test_another_certificate_than_the_signed_one_is_refused() -> None:
    """Both sides are told; nothing stays open."""
    files = _open_files()
    async with trio.open_nursery() as nursery:
        left, right = await udp_socket(), await udp_socket()
        to_left, to_right = left.getsockname(), right.getsockname()
        other = new_certificate()

        async def serve() -> None:
            with pytest.raises(QuicError, match="not the one that was signed for"):
                await open_quic(nursery, right, to_left, client=False, certificate=other)

        async with trio.open_nursery() as both:
            both.start_soon(serve)
            with pytest.raises(QuicError, match="not the one that was signed for"):
                await open_quic(nursery, left, to_right, client=True, peer_fingerprint=CERTIFICATE.fingerprint)
    assert _open_files() == files


@pytest.mark.parametrize("client", [True, False])
async def test_nobody_at_the_other_end(client: bool) -> None:
    """The wait ends in time, with a sentence, and the socket is closed."""
    files = _open_files()
    async with trio.open_nursery() as nursery:
        with pytest.raises(QuicError, match="in time"):
            await open_quic(
                nursery,
                await udp_socket(),
                ("127.0.0.1", 9),
                client=client,
                certificate=CERTIFICATE,
                peer_fingerprint=CERTIFICATE.fingerprint,
                open_s=0.2,
            )
    assert _open_files() == files


async def test_opening_can_be_cancelled() -> None:
    """Nothing stays of it."""
    files = _open_files()
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0.05):
            await open_quic(nursery, await udp_socket(), ("127.0.0.1", 9), client=False, certificate=CERTIFICATE)
    assert _open_files() == files


async def test_a_slow_reader_holds_the_sender_back() -> None:
    """Nobody reads: the receiver holds a window and no more, the sender that and what may wait; later all arrives."""
    data = _bytes(7, 3 * RECEIVE_WINDOW_BYTES)
    async with pair() as (client, server):
        sent = trio.Event()

        async def send() -> None:
            await client.send_all(data)
            sent.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            held = -1
            while held != sum(map(len, server._received)):
                held = sum(map(len, server._received))
                await trio.sleep(0.3)
            assert RECEIVE_WINDOW_BYTES - 2000 <= held <= RECEIVE_WINDOW_BYTES
            assert not sent.is_set()
            assert client._connection is not None
            assert client._connection.unacknowledged_bytes <= RECEIVE_WINDOW_BYTES + UNSENT_BYTES[1]
            assert await _receive(server, len(data)) == data


async def test_a_peer_that_ignores_the_window_is_cut_off() -> None:
    """It may lie to itself about what it was granted; at the first byte too many the connection ends."""
    async with pair() as (client, server):
        connection = client._connection
        assert connection is not None
        connection._remote_max_data = connection._streams[STREAM_ID].max_stream_data_remote = 1 << 50
        with pytest.raises(trio.BrokenResourceError, match="data limit"):
            await client.send_all(bytes(3 * RECEIVE_WINDOW_BYTES))
        assert sum(map(len, server._received)) <= RECEIVE_WINDOW_BYTES


async def test_holes_in_the_stream_hold_no_more_than_a_window() -> None:
    """A byte far ahead of the rest would make aioquic's buffer as long as the gap."""
    async with pair() as (client, server):
        connection = client._connection
        assert connection is not None
        sender = connection._streams[STREAM_ID].sender
        sender._buffer_start = sender._buffer_stop = sender.highest_offset = 1 << 40
        connection._remote_max_data = connection._streams[STREAM_ID].max_stream_data_remote = 1 << 50
        connection.send_stream_data(STREAM_ID, b"far away")
        client._wake.set()
        with pytest.raises(trio.BrokenResourceError, match="data limit"):
            await server.receive_some()
        assert server._connection is not None
        assert len(server._connection._streams[STREAM_ID].receiver._buffer) <= RECEIVE_WINDOW_BYTES
