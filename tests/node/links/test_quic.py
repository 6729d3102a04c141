"""QUIC as a stream: it keeps trio's promises, over a real socket, beside strangers and with abrupt ends."""

from __future__ import annotations

import hashlib

import trio
from trio.testing import check_two_way_stream

from node.links.quic import QuicStream
from tests.node.links.quic_pair import open_pair, pair


async def test_it_is_a_stream_as_trio_defines_one() -> None:
    """trio's own conformance test, with a receiver that reads nothing for the clogged kind."""
    async with trio.open_nursery() as nursery:

        async def make() -> tuple[QuicStream, QuicStream]:
            return await open_pair(nursery)

        await check_two_way_stream(make, None)
        nursery.cancel_scope.cancel()


async def test_bytes_go_both_ways_at_once_and_arrive_as_they_were_sent() -> None:
    """Four megabytes each way, compared by their digest."""
    async with pair() as (client, server):

        async def send(stream: QuicStream, seed: int) -> None:
            await stream.send_all(hashlib.shake_256(bytes([seed])).digest(4 << 20))

        async def receive(stream: QuicStream, seed: int) -> None:
            digest = hashlib.sha256()
            count = 0
            while count < 4 << 20:
                data = await stream.receive_some()
                digest.update(data)
                count += len(data)
            assert digest.digest() == hashlib.sha256(hashlib.shake_256(bytes([seed])).digest(4 << 20)).digest()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send, client, 1)
            nursery.start_soon(send, server, 2)
            nursery.start_soon(receive, server, 1)
            nursery.start_soon(receive, client, 2)
