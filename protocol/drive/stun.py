"""Answers STUN questions beside a TCP listener, and asks them: how a gateway rewrites our UDP.

Every public server of a run answers at its own port, so that nobody needs a third party to get through a NAT. An
answer holds no state and no secret; it is at most 24 bytes longer than its question, and so few a second that the
responder is of no use as a reflector.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import cast

import trio

from protocol.link import stun
from protocol.link.networks import NetworkRates, network_of

ANSWERS_PER_S = 100.0
"""Of one responder: a node that joins asks about five times, so twenty can join in a second."""
ANSWERS_BURST = 500.0
NETWORK_ANSWERS_PER_S = 5.0
"""Of these to one network: a computer that joins each second …"""
NETWORK_ANSWERS_BURST = 60.0
"""… or twelve at once behind one NAT."""
ASK_S = (0.2, 0.4, 0.9)
"""How long each repetition of a question waits for its answer: 1.5 s together, far beyond any round trip."""
_IP_PKTINFO = 8
_IPV6_RECVPKTINFO = 49
_ANCILLARY_BYTES = 64
"""Room for one struct in6_pktinfo."""


def _prepare(sock: trio.socket.SocketType) -> None:
    """A machine with several addresses answers from the one that was asked: a gateway would drop any other.

    Linux hands that address over with each datagram, and takes it back with the answer.
    """
    if sock.family == trio.socket.AF_INET6:
        sock.setsockopt(trio.socket.IPPROTO_IPV6, trio.socket.IPV6_V6ONLY, 1)
    if sys.platform == "linux":
        if sock.family == trio.socket.AF_INET6:
            sock.setsockopt(trio.socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(trio.socket.IPPROTO_IP, _IP_PKTINFO, 1)


class StunResponder:
    """Answers at the addresses of TCP listeners. A port that is taken there for UDP is left alone."""

    def __init__(self) -> None:
        self._left = ANSWERS_BURST
        self._networks = NetworkRates(NETWORK_ANSWERS_PER_S, NETWORK_ANSWERS_BURST)
        self._at = 0.0
        self.answered = 0

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Until cancelled."""
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            for listener in listeners:
                family = listener.socket.family
                host, port = listener.socket.getsockname()[:2]
                main = stack.enter_context(trio.socket.socket(family, trio.socket.SOCK_DGRAM))
                other = stack.enter_context(trio.socket.socket(family, trio.socket.SOCK_DGRAM))
                with suppress(OSError):
                    for sock in (main, other):
                        _prepare(sock)
                    await main.bind((host, port))
                    await other.bind((host, 0))
                    nursery.start_soon(self._serve, main, other)

    async def _serve(self, main: trio.socket.SocketType, other: trio.socket.SocketType) -> None:
        while True:
            try:
                received = await main.recvmsg(stun.DATAGRAM_BYTES_MAX + 1, _ANCILLARY_BYTES)
            except OSError:  # an answer to one of ours that found nobody
                await trio.lowlevel.checkpoint()
                continue
            data, ancillary, _, sender = received
            host, port, *_ = cast("tuple[str, int]", sender)
            if not self._may(host):
                continue
            made = stun.answer(data, host, port)
            if made is not None:
                self.answered += 1
                with suppress(OSError):
                    await (other if made[1] else main).sendmsg([made[0]], ancillary, 0, sender)

    def _may(self, host: str) -> bool:
        """A bucket for each network, so that nobody starves the others, and one for all together. The sender of a
        datagram can be forged: then the network that is named gets no answers, and nobody else notices."""
        now = trio.current_time()
        if not self._networks.may(network_of(host), now):
            return False
        self._left = min(ANSWERS_BURST, self._left + (now - self._at) * ANSWERS_PER_S)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class StunAsker:
    """One UDP socket that asks several servers; what they see of it shows how the gateway maps it."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        """`sock`: bound."""
        self._sock = sock
        self._waiting: dict[bytes, trio.Event] = {}
        self._seen: dict[bytes, tuple[str, int]] = {}

    async def run(self) -> None:
        """Reads answers until cancelled."""
        while True:
            try:
                data, _ = await self._sock.recvfrom(stun.DATAGRAM_BYTES_MAX + 1)
            except OSError:
                await trio.lowlevel.checkpoint()
                continue
            for transaction, event in self._waiting.items():
                found = stun.seen(data, transaction)
                if found is not None:
                    self._seen[transaction] = found
                    event.set()

    async def ask(self, host: str, port: int, *, other_port: bool = False) -> tuple[str, int] | None:
        """How the server at (host, port) sees our socket; None when no answer came within 1.5 s."""
        transaction = os.urandom(stun.TRANSACTION_BYTES)
        event = self._waiting[transaction] = trio.Event()
        try:
            for wait_s in ASK_S:
                with suppress(OSError):
                    await self._sock.sendto(stun.question(transaction, other_port=other_port), (host, port))
                with trio.move_on_after(wait_s):
                    await event.wait()
                if event.is_set():
                    return self._seen.pop(transaction)
            return None
        finally:
            del self._waiting[transaction]
