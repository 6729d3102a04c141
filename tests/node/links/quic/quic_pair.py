"""Two QUIC streams that are connected over loopback, and what to put between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random

import trio

from node.links.quic.certificate import new_certificate
from node.links.quic.datagrams import ByteLimits
from node.links.quic.quic import QuicStream, open_quic

CERTIFICATE = new_certificate()


async def udp_socket() -> trio.socket.SocketType:
    """Bound to a free port of 127.0.0.1."""
    sock = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    await sock.bind(("127.0.0.1", 0))
    return sock


async def open_pair(
    nursery: trio.Nursery,
    limits: ByteLimits | None = None,
    may_reach: Callable[[str, int], bool] = lambda host, port: True,
) -> tuple[QuicStream, QuicStream]:
    """(client, server), both open; `limits` and `may_reach` are the client's."""
    left, right = await udp_socket(), await udp_socket()
    to_left, to_right = left.getsockname(), right.getsockname()
    opened: dict[bool, QuicStream] = {}

    async def open_one(client: bool) -> None:
        if client:
            stream = await open_quic(
                nursery,
                left,
                to_right,
                client=True,
                peer_fingerprint=CERTIFICATE.fingerprint,
                limits=limits,
                may_reach=may_reach,
            )
        else:
            stream = await open_quic(nursery, right, to_left, client=False, certificate=CERTIFICATE)
        opened[client] = stream

    async with trio.open_nursery() as both:
        both.start_soon(open_one, True)
        both.start_soon(open_one, False)
    return opened[True], opened[False]


@asynccontextmanager
async def pair(
    limits: ByteLimits | None = None, may_reach: Callable[[str, int], bool] = lambda host, port: True
) -> AsyncIterator[tuple[QuicStream, QuicStream]]:
    """`open_pair` with a nursery of its own, ended with the block."""
    async with trio.open_nursery() as nursery:
        client, server = await open_pair(nursery, limits, may_reach)
        try:
            yield client, server
        finally:
            nursery.cancel_scope.cancel()


class Gateway:
    """A NAT in front of the client, in this process: forwards both ways, may forget its mapping, lose, or go dark."""

    def __init__(self, inner: trio.socket.SocketType, outer: trio.socket.SocketType, seed: int = 1) -> None:
        self.loss = 0.0
        self.inwards_loss = 0.0
        """Beyond `loss`, of what comes to the client."""
        self.inwards_dropped = 0
        self.outer = outer
        self._inner = inner
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._random = Random(seed)
        self._scope = trio.CancelScope()

    def serve(self, server: tuple[str, int]) -> None:
        """Where the client's datagrams go."""
        self._server = server

    async def rebind(self) -> None:
        """Forget the mapping: the server sees another address from now on, and the old one leads nowhere."""
        self.outer = await udp_socket()
        self._scope.cancel()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._outwards)
                while True:
                    outer = self.outer
                    with trio.CancelScope() as self._scope:
                        await self._inwards(outer)
                    outer.close()
        finally:
            self._inner.close()
            self.outer.close()

    async def _outwards(self) -> None:
        while True:
            data, address = await self._inner.recvfrom(65535)
            self._client = address
            if self._server is not None and self._random.random() >= self.loss:
                await self.outer.sendto(data, self._server)

    async def _inwards(self, outer: trio.socket.SocketType) -> None:
        while True:
            data, _ = await outer.recvfrom(65535)
            if self._client is not None and self._random.random() >= max(self.loss, self.inwards_loss):
                await self._inner.sendto(data, self._client)
            else:
                self.inwards_dropped += 1


@asynccontextmanager
async def pair_through_gateway(seed: int = 1) -> AsyncIterator[tuple[QuicStream, QuicStream, Gateway]]:
    """(client, server, the gateway between them)."""
    gateway = Gateway(await udp_socket(), await udp_socket(), seed)
    left, right = await udp_socket(), await udp_socket()
    gateway.serve(right.getsockname())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.run)
        opened: dict[bool, QuicStream] = {}

        async def open_client() -> None:
            opened[True] = await open_quic(
                nursery, left, gateway._inner.getsockname(), client=True, peer_fingerprint=CERTIFICATE.fingerprint
            )

        async with trio.open_nursery() as both:
            both.start_soon(open_client)
            opened[False] = await open_quic(
                nursery, right, gateway.outer.getsockname(), client=False, certificate=CERTIFICATE
            )
        try:
            yield opened[True], opened[False], gateway
        finally:
            nursery.cancel_scope.cancel()
