"""TCP: connect to whoever answers first, listen, and tune sockets for tensors behind small messages.

Several addresses of one peer are raced (RFC 8305, "happy eyeballs"): names are looked up side by side, addresses of
both families take turns, and each attempt has a quarter of a second's start over the next one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import trio

from protocol.base.errors import BadInputError
from protocol.base.limits import CONNECT_CANDIDATES_MAX, CONNECT_S, CONNECT_STAGGER_S, UNSENT_BYTES
from protocol.drive.addresses import ANY_HOST, host_port


@dataclass(frozen=True)
class Candidate:
    """One way to connect: what was asked for, and what its name stands for."""

    rank: int
    """The place of `address` among those that were given."""
    address: str
    """HOST:PORT as it was given."""
    family: int
    target: tuple[Any, ...]
    """As the socket wants it."""


class Race:
    """Connects to several addresses side by side; the next winner is to be had when one turns out to be useless."""

    def __init__(self, may: Callable[[str], bool]) -> None:
        """Made by `racing`."""
        self._may = may
        self.failures: list[str] = []
        """What became of each address that led nowhere."""
        self._untried: list[Candidate] = []
        self._resolving = 0
        self._changed = trio.Event()

    async def next(self) -> tuple[trio.SocketStream, Candidate] | None:
        """The connection that is there first, or None when nothing is left to try; others stop, for the next call."""
        winner: tuple[trio.SocketStream, Candidate] | None = None
        running: list[Candidate] = []

        async def attempt(candidate: Candidate, over: trio.Event) -> None:
            nonlocal winner
            try:
                stream = await connect(candidate)
            except OSError as error:
                self.failures.append(f"{candidate.address}: no connection: {said(error)}")
                running.remove(candidate)
                over.set()
                self._notify()
                return
            if winner is None:
                winner = stream, candidate
                running.remove(candidate)
                attempts.cancel_scope.cancel()
            else:
                await trio.aclose_forcefully(stream)

        try:
            async with trio.open_nursery() as attempts:
                while self._untried or running or self._resolving:
                    if not self._untried:
                        await self._changed.wait()
                        continue
                    candidate, over = self._untried.pop(0), trio.Event()
                    running.append(candidate)
                    attempts.start_soon(attempt, candidate, over)
                    with trio.move_on_after(CONNECT_STAGGER_S):
                        await over.wait()
        except BaseException:
            if winner is not None:  # whoever asked for it is being cancelled
                winner[0].socket.close()
            raise
        self._untried[:0] = running
        return winner

    async def _resolve(self, rank: int, address: str) -> None:
        """Adds what one address stands for, in its place."""
        host, _, port = address.rpartition(":")
        try:
            with trio.fail_after(CONNECT_S):
                found = await trio.socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except trio.TooSlowError:
            self.failures.append(f"{address}: no connection: the name was not found in time")
        except (OSError, ValueError) as error:
            self.failures.append(f"{address}: no connection: {error}")
        else:
            allowed = [entry for entry in found if self._may(str(entry[4][0]))]
            if not allowed:
                self.failures.append(f"{address}: not dialled: it lies in a private network, or on this computer")
            self._untried += [Candidate(rank, address, int(family), target) for family, _, _, _, target in allowed]
            self._untried.sort(key=lambda candidate: candidate.rank)
            self._untried = interleaved(self._untried)[:CONNECT_CANDIDATES_MAX]
        self._resolving -= 1
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def anywhere(host: str) -> bool:
    """For peers that our own side names."""
    return True


@asynccontextmanager
async def racing(addresses: Sequence[str], may: Callable[[str], bool] = anywhere) -> AsyncIterator[Race]:
    """A race between HOST:PORT addresses of one peer, best first; what it has begun ends with the block.

    `may`: whether to connect to an IP address; a name counts by what it stands for.
    """
    race = Race(may)
    async with trio.open_nursery() as nursery:
        race._resolving = len(addresses)
        for rank, address in enumerate(addresses):
            if _is_numeric(address):
                await race._resolve(rank, address)  # asks nobody, so the first attempt can be the best one
            else:
                nursery.start_soon(race._resolve, rank, address)
        try:
            yield race
        finally:
            nursery.cancel_scope.cancel()


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def interleaved(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The families take turns, the first one's first; within a family the order stays (RFC 8305, section 4)."""
    if not candidates:
        return []
    first = [candidate for candidate in candidates if candidate.family == candidates[0].family]
    second = [candidate for candidate in candidates if candidate.family != candidates[0].family]
    turns = [candidate for pair in zip(first, second, strict=False) for candidate in pair]
    shorter = min(len(first), len(second))
    return turns + first[shorter:] + second[shorter:]


async def connect(candidate: Candidate) -> trio.SocketStream:
    """A tuned connection. Raises `OSError`, also when CONNECT_S is over."""
    sock = trio.socket.socket(candidate.family, socket.SOCK_STREAM)
    try:
        with trio.fail_after(CONNECT_S):
            await sock.connect(candidate.target)
        stream = trio.SocketStream(sock)  # sets options of its own
        tune(sock)
        return stream
    except trio.TooSlowError:
        sock.close()
        raise TimeoutError("no answer in time") from None
    except BaseException:
        sock.close()
        raise


def said(error: OSError) -> str:
    """What the system said, without trio's and Python's frames around it."""
    if isinstance(error, socket.gaierror):  # its numbers are not the system's
        return error.strerror or str(error)
    return os.strerror(error.errno) if error.errno else str(error)


def tune(sock: trio.socket.SocketType) -> None:
    """Small messages at once, little unsent in the kernel, and a sender that keeps its rate under loss."""
    for option, value in (("TCP_NODELAY", 1), ("TCP_NOTSENT_LOWAT", UNSENT_BYTES), ("TCP_CONGESTION", b"bbr")):
        # The last two are Linux's; bbr is there only where its module is loaded.
        with suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def take_in_at_most(sock: trio.socket.SocketType, byte_count: int) -> None:
    """Bound what the kernel takes in before it is read (Linux takes twice that, for its own bookkeeping)."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, byte_count)


def caller_of(stream: trio.SocketStream) -> tuple[str, str]:
    """(host, HOST:PORT) of the other end. Raises `OSError` when it has already gone."""
    host, port = stream.socket.getpeername()[:2]
    return host, host_port(host, port)


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listening sockets at `host` (a name, an address, or "*"); port 0 lets the system choose."""
    if host != ANY_HOST:
        return await trio.open_tcp_listeners(port, host=host)
    listeners = await trio.open_tcp_listeners(port, host="0.0.0.0")  # noqa: S104 - said so by whoever wrote "*"
    with suppress(OSError):  # no IPv6 here, or somebody else has the port there: IPv4 does
        listeners += await trio.open_tcp_listeners(listeners[0].socket.getsockname()[1], host="::")
    return listeners


async def open_all_listeners(sockets: Sequence[tuple[str, int]]) -> tuple[list[trio.SocketListener], list[int]]:
    """Listening sockets at every (host, port), all or none, and the port that each pair got.

    Raises `BadInputError`, which names the one that cannot be had.
    """
    listeners: list[trio.SocketListener] = []
    ports = []
    for host, port in sockets:
        try:
            opened = await open_listeners(host, port)
        except OSError as error:
            for listener in listeners:
                await listener.aclose()
            raise BadInputError(f"--listen {host_port(host, port)}: {said(error)}") from error
        listeners += opened
        ports.append(opened[0].socket.getsockname()[1])
    return listeners, ports
