"""A read that waits for what is missing of a record: woken once for it, and never kept from what is there."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from protocol.drive.limits import WAIT_FOR_BYTES_MAX, Limits, Metered
from protocol.drive.tcp import open_listeners
from tests.protocol.drive.harness import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a read wait for more than a byte")


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[trio.SocketStream, Metered]]:
    """Two ends of a TCP connection; the second one is metered."""
    (listener,) = await open_listeners("127.0.0.1", 0)
    host, port = listener.socket.getsockname()
    async with listener, await trio.open_tcp_stream(host, port) as near, await listener.accept() as far:
        yield near, Metered(far, Limits())


async def test_a_read_waits_for_as_much_as_it_was_told() -> None:
    """Not for a part of it: with half of the bytes there the system does not call the socket readable."""
    async with pair() as (near, far):
        far.wait_for(5000)
        await near.send_all(bytes(4999))
        with trio.move_on_after(0.05) as waiting:
            await trio.lowlevel.wait_readable(far.inner.socket)
        assert waiting.cancelled_caught
        await near.send_all(b"x")
        with trio.fail_after(PATIENCE_S):
            await trio.lowlevel.wait_readable(far.inner.socket)
        assert len(await far.receive_some()) == 5000


async def test_an_end_is_told_at_once() -> None:
    """What will not come any more is not waited for."""
    async with pair() as (near, far):
        far.wait_for(5000)
        await near.send_all(b"abc")
        await near.aclose()
        with trio.fail_after(PATIENCE_S):
            assert await far.receive_some() == b"abc"
            assert await far.receive_some() == b""


async def test_a_read_never_waits_for_more_than_a_slow_line_brings_in_time() -> None:
    """However long the record, and never for nothing."""
    async with pair() as (_, far):
        for asked, expected in ((1 << 20, WAIT_FOR_BYTES_MAX), (17, 17), (0, 1)):
            far.wait_for(asked)
            assert far.inner.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == expected


async def test_tiny_pieces_fill_no_window_that_nobody_empties() -> None:
    """A small buffer full of one-byte segments is handed over, though fewer bytes are there than were waited for."""
    async with pair() as (near, far):
        far.inner.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        data, got = os.urandom(3 * WAIT_FOR_BYTES_MAX), b""

        async def send() -> None:
            for start in range(0, len(data), 7):
                await near.send_all(data[start : start + 7])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            with trio.fail_after(PATIENCE_S):
                while len(got) < len(data):
                    far.wait_for(len(data) - len(got))
                    got += await far.receive_some()
        assert got == data
