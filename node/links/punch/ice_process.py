"""The punching helper: one process per daemon that runs aioice and aiortc on asyncio, and moves bytes.

It holds no key of the node: the daemon signs and proves, this process gets addresses to try and gives back either a
punched UDP socket or the bytes of a data channel. It ends when the daemon does: when the socket pair closes, and at
the latest a second later, by force.

    python -m node.links.punch.ice_process FRAMES_FD SOCKETS_FD
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import psutil

from node.links.punch import ice
from node.links.punch.helper_frames import (
    CONNECTIONS_MAX,
    AskCensus,
    Census,
    ChannelReady,
    Close,
    Connect,
    Credit,
    Ended,
    FrameReader,
    Gather,
    Gathered,
    Order,
    SocketReady,
    Traffic,
    data_frame,
    order_frame,
)
from node.links.quic.certificate import new_certificate
from node.platform.pairs import pass_socket
from protocol.base.errors import RemoteProtocolError
from protocol.link.candidates import Candidate, IpAddress, Reach, acceptable_address, offered_candidates

if TYPE_CHECKING:
    from node.links.channel.channel import Channel

PARENT_CHECK_S = 0.5
TRAFFIC_EVERY_S = 0.05
"""Short enough for a limit of bytes per second to be held evenly, long enough to cost nothing."""


class _Connection:
    """One peer: from its sockets to its stream."""

    def __init__(self, helper: _Helper, number: int, order: Gather) -> None:
        self.number = number
        self._helper = helper
        self._order = order
        self._reach = Reach(lan=order.lan, loopback=order.loopback)
        self._ice = ice.Ice(controlling=order.controlling, may_reach=self._may_reach)
        self._channel: Channel | None = None
        self._task = asyncio.create_task(self._gather())
        self._traffic_task = asyncio.create_task(self._keep_reporting())

    def _may_reach(self, ip: IpAddress, port: int) -> bool:
        return acceptable_address(ip, port, self._reach)

    async def _gather(self) -> None:
        try:
            addresses = own_addresses(loopback=self._order.loopback)
            found = await self._ice.gather(addresses, self._order.stun, self._order.turn, self._order.within_s)
        except OSError as error:
            self.finish(f"no socket: {error}")
            return
        self._reach = Reach(self._order.lan, self._order.loopback, found)
        self._helper.load_channels()
        self._helper.tell(
            self.number,
            Gathered(
                self._ice.local_username,
                self._ice.local_password,
                self._helper.certificate.fingerprint,
                offered_candidates(found, self._reach),
            ),
        )

    def connect(self, order: Connect) -> None:
        if not self._task.done() or self._channel is not None or self._ice.remote_username is not None:
            raise RemoteProtocolError("unexpected", "an order to connect out of turn")
        self._reach = replace(self._reach, same_site=order.same_site)
        self._task = asyncio.create_task(self._connect(order))

    async def _connect(self, order: Connect) -> None:
        try:
            async with asyncio.timeout(order.within_s):
                relayed = await self._ice.punch(order.ufrag, order.password, order.candidates)
                host, port = self._ice.remote
                if "quic" in order.ways and self._ice.both_own_sockets:
                    await self._hand_over(host, port)
                    return
                if "channel" not in order.ways:
                    raise ice.PunchError("a TURN server lies in between, and the peer has no data channel")
                self._channel = await self._open_channel(order.dtls_fingerprint)
                self._helper.tell(self.number, ChannelReady(self._channel.peer_fingerprint, host, port, relayed))
        except TimeoutError:
            self.finish(f"no connection within {order.within_s:.0f} s")
        except (ice.PunchError, ConnectionError) as error:
            self.finish(str(error))

    async def _hand_over(self, host: str, port: int) -> None:
        handle = self._ice.take_socket()
        try:
            pass_socket(self._helper.sockets, self.number.to_bytes(4, "big"), handle.fileno())
        finally:
            handle.close()
        self._helper.tell(self.number, SocketReady(host, port))
        self._helper.forget(self, "")

    async def _open_channel(self, fingerprint: bytes) -> Channel:
        from aiortc.rtcdtlstransport import RTCCertificate

        from node.links.channel.channel import Channel
        from node.links.channel.sctp_fence import check_version

        check_version()
        own = self._helper.certificate
        return await Channel.open(
            self._ice,
            RTCCertificate(own.key, own.certificate),
            client=self._order.controlling,
            fingerprint=fingerprint,
            deliver=lambda data: self._helper.write(data_frame(self.number, data)),
            grant=lambda count: self._helper.tell(self.number, Credit(count)),
            ended=lambda reason, clean: self.finish(reason, clean=clean),
        )

    def data(self, data: bytes) -> None:
        if self._channel is not None:
            self._channel.send(data)

    def consumed(self, byte_count: int) -> None:
        if self._channel is not None:
            self._channel.consumed(byte_count)

    async def _keep_reporting(self) -> None:
        """Tell the daemon now and then what its connection handed to sockets and took from them."""
        while True:
            await asyncio.sleep(TRAFFIC_EVERY_S)
            self._report_traffic()

    def _report_traffic(self) -> None:
        up_bytes, down_bytes = self._ice.take_traffic()
        if up_bytes or down_bytes:
            self._helper.tell(self.number, Traffic(up_bytes, down_bytes))

    def finish(self, reason: str, *, clean: bool = False) -> None:
        """Report the end, once, and clear up."""
        self._helper.forget(self, reason, clean=clean)

    async def clear_up(self) -> None:
        """Nothing of this connection is left after this."""
        for task in (self._task, self._traffic_task):
            task.cancel()
        await asyncio.gather(self._task, self._traffic_task, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()
        await self._ice.end()
        self._report_traffic()


class _Helper(asyncio.Protocol):
    """All connections, and the socket pair to the daemon."""

    def __init__(self, sockets: socket.socket) -> None:
        self.sockets = sockets
        self.certificate = new_certificate()
        self.over = asyncio.Event()
        self._reader = FrameReader(daemon=False)
        self._connections: dict[int, _Connection] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._loading: threading.Thread | None = None
        self._transport: asyncio.WriteTransport

    # ---- from the daemon ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for number, frame in self._reader.receive(data):
                self._obey(number, frame)
        except (RemoteProtocolError, ValueError) as error:
            print(f"punching helper: {error}", file=sys.stderr)
            self.over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.over.set()

    def _obey(self, number: int, frame: Order | bytes) -> None:
        connection = self._connections.get(number)
        if isinstance(frame, AskCensus):
            sockets = psutil.Process().net_connections("inet") if frame.count_sockets else []
            self.tell(number, Census(len(self._connections), len(asyncio.all_tasks()), len(sockets)))
        elif isinstance(frame, Gather):
            if connection is not None:
                raise RemoteProtocolError("unexpected", f"connection {number} is there already")
            if len(self._connections) >= CONNECTIONS_MAX:
                self.tell(number, Ended("the helper has too many connections"))
                return
            self._connections[number] = _Connection(self, number, frame)
        elif connection is None:
            return  # it ended while this was on its way
        elif isinstance(frame, bytes):
            connection.data(frame)
        elif isinstance(frame, Connect):
            connection.connect(frame)
        elif isinstance(frame, Credit):
            connection.consumed(frame.byte_count)
        elif isinstance(frame, Close):
            self.forget(connection, "")

    # ---- to the daemon -----------------------------------------------------------------------------------------------

    def load_channels(self) -> None:
        """Import what data channels need, a third of a second, while letters travel."""
        if self._loading is None:
            self._loading = threading.Thread(target=import_module, args=("node.links.channel.channel",), daemon=True)
            self._loading.start()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def tell(self, number: int, order: Order) -> None:
        self.write(order_frame(number, order))

    def forget(self, connection: _Connection, reason: str, *, clean: bool = False) -> None:
        """Clear a connection up; `reason` is for the daemon, which needs none when it gave the order."""
        if self._connections.get(connection.number) is not connection:
            return
        del self._connections[connection.number]
        if reason:
            self.tell(connection.number, Ended(reason[:256], clean))
        task = asyncio.create_task(connection.clear_up())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def own_addresses(*, loopback: bool) -> list[str]:
    """Addresses of this machine's interfaces that are up, the one that leads outward first; no link-local ones."""
    stats = psutil.net_if_stats()
    found: list[str] = []
    for name, entries in psutil.net_if_addrs().items():
        if name not in stats or not stats[name].isup:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address:
                candidate = Candidate("host", socket.inet_pton(entry.family, entry.address), 65535)
                if offered_candidates((candidate,), Reach(loopback=loopback)):
                    found.append(entry.address)
    outward = _outward_address()
    return sorted(found, key=lambda address: (address != outward, ":" in address, address.startswith("127.")))


def _outward_address() -> str:
    """The address that packets to the internet leave from. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return ""


async def _serve(frames: socket.socket, sockets: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    # What goes wrong in a packet's handler concerns one connection, whose own deadlines deal with it.
    loop.set_exception_handler(lambda _loop, _context: None)
    _, helper = await loop.create_connection(lambda: _Helper(sockets), sock=frames)
    await helper.over.wait()


def _end_with_parent(parent: int) -> None:
    """In a thread, so that a loop that hangs ends too."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(3)


def main() -> None:
    """Serve the daemon that started us, until it goes."""
    frames_fd, sockets_fd, parent = (int(text) for text in sys.argv[1:4])
    ice.check_version()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    gc.collect()
    gc.freeze()  # modules never die: a collection need not look at them
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    with socket.socket(fileno=frames_fd) as frames, socket.socket(fileno=sockets_fd) as sockets:
        frames.setblocking(False)
        asyncio.run(_serve(frames, sockets))
    os._exit(0)


if __name__ == "__main__":
    main()
