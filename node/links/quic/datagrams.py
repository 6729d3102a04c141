"""A UDP socket for bulk: trains of datagrams in one call of the kernel each way, under the owner's limits.

Linux cuts one large write into datagrams (UDP_SEGMENT) and hands over several that came together (UDP_GRO); a call
per datagram would cost as much as its cipher. Where the kernel offers neither, datagrams go one by one.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import trio

SOCKET_BUFFER_BYTES = 4 << 20
"""Asked of the kernel; it may give less. A burst waits there while the loop does something else."""
RECEIVE_BATCH = 32
"""Datagrams read before other tasks have their turn: about two milliseconds with what QUIC does to them."""
GATHER_S = 0.002
"""When datagrams come one by one, we wait so long for company: a turn of the loop costs as much as a datagram."""

_UDP_SEGMENT = 103
_UDP_GRO = 104
_IP_MTU_DISCOVER = 10
_IPV6_MTU_DISCOVER = 23
_IP_PMTUDISC_PROBE = 3
_DATAGRAM_BYTES_MAX = 65535
_TRAIN_BYTES_MAX = 65000
"""All of a train must fit an IP packet."""
_BULK_BYTES = 1000
_TRAIN_MAX = 64
"""UDP_MAX_SEGMENTS of older kernels."""

Address = tuple[str, int] | tuple[str, int, int, int]
"""As the socket's family has it."""
Datagram = tuple[bytes, Address]
"""What, and to or from where."""


class ByteLimits(Protocol):
    """The owner's limits: every datagram waits here for its turn."""

    @property
    def receive_buffer_bytes(self) -> int | None:
        """What the kernel may take in before it is read; None: as much as it likes."""

    async def take_up(self, byte_count: int) -> None:
        """Raises `trio.BrokenResourceError` when nothing may be sent any more."""

    async def take_down(self, byte_count: int) -> None:
        """Raises `trio.BrokenResourceError` when nothing may be read any more."""


class DatagramSocket:
    """Takes a trio UDP socket over. A datagram that cannot be sent is lost, as it could be further on."""

    def __init__(self, sock: trio.socket.SocketType, limits: ByteLimits | None) -> None:
        self._limits = limits
        self._raw = socket.socket(sock.family, socket.SOCK_DGRAM, fileno=sock.detach())
        self._raw.setblocking(False)
        self._trains = True
        self._busy = False
        # Under a limit the queue in front of us must be short: it is where the sender's excess waits and gets lost.
        room = None if limits is None else limits.receive_buffer_bytes
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_RCVBUF, room or SOCKET_BUFFER_BYTES),
            (socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES),
            (socket.IPPROTO_UDP, _UDP_GRO, 1),
            # No fragments (RFC 9000 section 14), and no belief in ICMP about sizes, which anybody could have sent.
            (socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE),
            (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IP_PMTUDISC_PROBE),
        ):
            with suppress(OSError):
                self._raw.setsockopt(level, option, value)

    def close(self) -> None:
        """At once."""
        self._raw.close()

    def send_now(self, datagram: bytes, address: Address) -> None:
        """A last word, past the limits and without waiting."""
        with suppress(OSError):
            self._raw.sendto(datagram, address)

    async def send(self, datagrams: Sequence[Datagram]) -> None:
        """Hand all to the kernel, in order, when the limits allow it. Raises what they raise."""
        if self._limits is not None:
            await self._limits.take_up(sum(len(datagram) for datagram, _ in datagrams))
        for train, address in trains(datagrams):
            if self._trains or len(train) == 1:
                await self._send_train(train, address)
            else:
                for datagram in train:
                    await self._send_train([datagram], address)
        await trio.lowlevel.checkpoint()

    async def _send_train(self, train: list[bytes], address: Address) -> None:
        control = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", len(train[0])))] if len(train) > 1 else []
        while True:
            try:
                self._raw.sendmsg(train, control, 0, address)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._raw)
            except OSError:
                if not control:
                    return  # the route may come back, or silence ends the connection
                self._trains = False
                for datagram in train:
                    await self._send_train([datagram], address)
                return
            else:
                return

    async def receive(self) -> list[Datagram]:
        """What is there, at least one try and about RECEIVE_BATCH at most, when the limits allow it.

        Raises what they raise.
        """
        await trio.lowlevel.wait_readable(self._raw)
        if self._busy:
            await trio.sleep(GATHER_S)
        batch: list[Datagram] = []
        for _ in range(RECEIVE_BATCH):
            try:
                batch.extend(self._receive_train())
            except BlockingIOError:
                break
            except OSError:
                continue  # an ICMP error about something we sent, which anybody could have made
            if len(batch) >= RECEIVE_BATCH:
                break
        # Not after a full batch, where more waits already, nor for single messages.
        self._busy = len(batch) < RECEIVE_BATCH and any(len(datagram) >= _BULK_BYTES for datagram, _ in batch)
        if self._limits is not None:
            await self._limits.take_down(sum(len(datagram) for datagram, _ in batch))
        return batch

    def _receive_train(self) -> Iterator[Datagram]:
        data, control, _, address = self._raw.recvmsg(_DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(4))
        size = len(data)
        for level, kind, value in control:
            if level == socket.IPPROTO_UDP and kind == _UDP_GRO:
                size = struct.unpack("=i", value[:4])[0]
        if size == len(data):
            return iter([(data, address)])
        return ((data[start : start + size], address) for start in range(0, len(data), size))


def trains(datagrams: Sequence[Datagram]) -> Iterator[tuple[list[bytes], Address]]:
    """Runs that the kernel takes as one: to one address, of one size, only the last one shorter."""
    train: list[bytes] = []
    last: Address | None = None
    for datagram, address in datagrams:
        if train:
            full = len(train) >= _TRAIN_MAX or (len(train) + 1) * len(train[0]) > _TRAIN_BYTES_MAX
            if full or address != last or len(train[-1]) < len(train[0]) or len(datagram) > len(train[0]):
                assert last is not None
                yield train, last
                train = []
        train.append(datagram)
        last = address
    if last is not None:
        yield train, last
