"""Two QUIC streams that are connected over loopback, and what to put between them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from node.links.certificate import new_certificate
from node.links.datagrams import ByteLimits
from node.links.quic import QuicStream, open_quic

CERTIFICATE = new_certificate()


async def udp_socket() -> trio.socket.SocketType:
    """Bound to a free port of 127.0.0.1."""
    sock = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", 0))
    return sock


async def open_pair(nursery: trio.Nursery, limits: ByteLimits | None = None) -> tuple[QuicStream, QuicStream]:
    """(client, server), both open; `limits` are the client's."""
    left, right = await udp_socket(), await udp_socket()
    to_left, to_right = left.getsockname(), right.getsockname()
    opened: dict[bool, QuicStream] = {}

    async def open_one(client: bool) -> None:
        if client:
            stream = await open_quic(
                nursery, left, to_right, client=True, peer_fingerprint=CERTIFICATE.fingerprint, limits=limits
            )
        else:
            stream = await open_quic(nursery, right, to_left, client=False, certificate=CERTIFICATE)
        opened[client] = stream

    async with trio.open_nursery() as both:
        both.start_soon(open_one, True)
        both.start_soon(open_one, False)
    return opened[True], opened[False]


@asynccontextmanager
async def pair(limits: ByteLimits | None = None) -> AsyncIterator[tuple[QuicStream, QuicStream]]:
    """`open_pair` with a nursery of its own, ended with the block."""
    async with trio.open_nursery() as nursery:
        client, server = await open_pair(nursery, limits)
        try:
            yield client, server
        finally:
            nursery.cancel_scope.cancel()
