"""One reliable byte stream over QUIC on a UDP socket that already reaches the peer.

aioquic computes, trio waits: one task reads datagrams, one sends them and keeps the timers, and the stream's owner
meets them in bounded buffers. Who the peer is gets proven by the handshake inside the stream, as on every way; QUIC's
own keys only make sure that what comes out is what the holder of the server's certificate and its peer put in, so
the client compares that certificate's digest with the one that was signed for it.

The peer's address may change while the connection lives (a NAT forgets and maps anew): packets from elsewhere are
looked at when they carry a connection id of ours, 8 random bytes, and after they are deciphered aioquic answers there
with at most three times what came, until the new path is validated (RFC 9000 sections 8.2 and 9). All others cost a
comparison. A STUN packet that comes late on the shared socket has the QUIC bit clear (RFC 9443) and is dropped too.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from node.links.quic.certificate import Certificate
from node.links.quic.datagrams import Address, DatagramSocket
from node.links.quic.datagrams import ByteLimits as ByteLimits
from node.links.quic.quic_connection import (
    CONNECTION_ID_BYTES,
    RECEIVE_WINDOW_BYTES,
    STREAM_ID,
    FencedConnection,
    first_destination,
    quic_configuration,
)

SILENT_S = 4.5
"""A peer that says nothing for this long is gone: three of our pings went without an answer."""
PING_S = 1.5
"""We ask when nothing came for this long; NATs forget a UDP mapping after 30 s at the earliest (RFC 4787)."""
CHALLENGE_S = 0.5
"""A new path of the peer that has not proven itself is asked this often (RFC 9000 section 8.2.1)."""
OPEN_S = 5.0
"""For QUIC's own handshake: one round trip, with room for three losses."""
LINGER_S = 2.0
"""After `aclose`, for what was accepted to arrive; then the connection is cut."""
UNSENT_S = 0.015
"""Accepted bytes wait for the line for so long at its present rate: what a control message finds before itself …"""
UNSENT_BYTES = (8 << 10, 128 << 10)
"""… within these bounds."""
GREETING = b"\x01"
"""The client's first byte: it accepted the server's certificate, and the server may speak."""
GATHERED_BYTES = 4096
"""Pieces that came together are kept as one up to here."""
REASON_CHARACTERS_MAX = 100
"""Of what a peer says when it ends the connection; it goes into our log."""

_QUIC_BIT = 0x40
_LONG_HEADER = 0x80
T = TypeVar("T")


class QuicError(Exception):
    """No connection came about; the text says why."""


async def open_quic(
    nursery: trio.Nursery,
    sock: trio.socket.SocketType,
    remote: Address,
    *,
    client: bool,
    certificate: Certificate | None = None,
    peer_fingerprint: bytes | None = None,
    limits: ByteLimits | None = None,
    may_reach: Callable[[str, int], bool] = lambda host, port: True,
    open_s: float = OPEN_S,
) -> QuicStream:
    """A stream to the peer at `remote`, which calls this too, with the other value of `client`.

    The server shows `certificate`; the client accepts only the one whose digest is `peer_fingerprint`. `sock` is a
    UDP socket, bound, and from now on ours: it is closed with the stream, and when this fails. `nursery` runs the
    stream's tasks. `may_reach`: whether the peer may move to (host, port). The server returns when it is certain that
    the client accepted it. Raises `QuicError`.
    """
    datagrams = DatagramSocket(sock, limits)
    try:
        if client and (peer_fingerprint is None or len(peer_fingerprint) != 32):
            raise ValueError("a client needs the server's fingerprint, 32 bytes")
        if not client and certificate is None:
            raise ValueError("a server needs a certificate")
        stream = QuicStream(datagrams, remote, client, certificate, peer_fingerprint or b"", may_reach)
    except BaseException:
        datagrams.close()
        raise
    nursery.start_soon(stream._run)
    try:
        with trio.fail_after(open_s):
            await stream._opened.wait()
    except trio.TooSlowError:
        stream._cut("no QUIC handshake in time")
        await stream._ended.wait()
        raise QuicError(stream.reason) from None
    except BaseException:
        stream._cut("given up")
        raise
    if stream._terminated:
        raise QuicError(stream.reason)
    return stream


class QuicStream(trio.abc.Stream):
    """Made by `open_quic`. Its errors are those of `trio.abc.Stream`."""

    def __init__(
        self,
        datagrams: DatagramSocket,
        remote: Address,
        client: bool,
        certificate: Certificate | None,
        peer_fingerprint: bytes,
        may_reach: Callable[[str, int], bool],
    ) -> None:
        self.remote = remote
        """Where the peer is, as far as we were told."""
        self.reason = ""
        """Why the connection ended, once it has."""
        self.ignored_datagrams = 0
        """Datagrams that were dropped unread: not QUIC, or from elsewhere."""
        self._socket = datagrams
        self._client = client
        self._peer_fingerprint = peer_fingerprint
        self._may_reach = may_reach
        self._configuration = quic_configuration(client=client, certificate=certificate, idle_s=SILENT_S)
        self._connection: FencedConnection | None = None
        self._origin: bytes | None = None
        self._scope = trio.CancelScope()
        self._opened = trio.Event()
        self._ended = trio.Event()
        self._wake = trio.Event()
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._received: deque[bytearray] = deque()
        self._read_bytes = 0
        self._sending = False
        self._receiving = False
        self._peer_finished = False
        self._terminated = False
        self._clean = False
        self._closed = False
        self._linger_until = float("inf")
        self._pinged_at = self._challenge_at = trio.current_time()
        if client:
            self._connection = FencedConnection(self._configuration)
            self._connection.connect(remote, now=trio.current_time())

    @property
    def loss(self) -> float | None:
        """Share of what we sent that was lost; None while that is not known."""
        return None if self._connection is None else self._connection.controller.loss

    # ---- the stream ----

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when the last byte was accepted: little of it, UNSENT_S, did not leave yet."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            view = memoryview(data).cast("B")
            while True:
                connection = self._check_sendable()
                piece = view[: max(self._unsent_bytes_max - connection.unsent_bytes, 0)]
                if piece:
                    self._guarded(connection.send_stream_data, STREAM_ID, piece)  # it copies any buffer
                    self._check_sendable()
                    self._wake.set()
                    view = view[len(piece) :]
                if not view:
                    return
                await self._room()
        finally:
            self._sending = False

    async def wait_send_all_might_not_block(self) -> None:
        """Returns when a byte would be accepted."""
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this stream")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            while self._check_sendable().unsent_bytes >= self._unsent_bytes_max:
                await self._room()
        finally:
            self._sending = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come, at most `max_bytes`; nothing when the peer closed the stream."""
        size = RECEIVE_WINDOW_BYTES if max_bytes is None else operator.index(max_bytes)
        if size < 1:
            raise ValueError("max_bytes must be at least 1")
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this stream")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint()
            while True:
                if self._closed:
                    raise trio.ClosedResourceError
                if self._received:
                    return self._take(size)
                if self._peer_finished or (self._terminated and self._clean):
                    return b""
                if self._terminated:
                    raise trio.BrokenResourceError(self.reason)
                self._readable = trio.Event()
                await self._readable.wait()
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        """Take no more, and let what was accepted arrive: a task goes on for that, for LINGER_S at the most."""
        if not self._closed:
            self._closed = True
            self._received.clear()
            if self._connection is not None and not self._terminated:
                if self._connection.unacknowledged_bytes:
                    self._guarded(self._connection.send_stream_data, STREAM_ID, b"", True)
                self._linger_until = trio.current_time() + LINGER_S
            self._wake_all()
        await trio.lowlevel.checkpoint()

    def _check_sendable(self) -> FencedConnection:
        if self._closed:
            raise trio.ClosedResourceError
        if self._terminated:
            raise trio.BrokenResourceError(self.reason)
        assert self._connection is not None, "the stream is handed out when it is open"
        return self._connection

    @property
    def _unsent_bytes_max(self) -> int:
        rate = 0.0 if self._connection is None else self._connection.controller.pacing_bytes_per_s
        return int(min(max(UNSENT_S * rate, UNSENT_BYTES[0]), UNSENT_BYTES[1]))

    async def _room(self) -> None:
        self._writable = trio.Event()
        await self._writable.wait()

    def _take(self, size: int) -> bytes:
        pieces = []
        room = size
        while self._received and room:
            piece = self._received.popleft()
            if len(piece) > room:
                self._received.appendleft(piece[room:])
                piece = piece[:room]
            pieces.append(piece)
            room -= len(piece)
        self._was_read(size - room)
        return b"".join(pieces)

    def _was_read(self, byte_count: int) -> None:
        self._read_bytes += byte_count
        if self._connection is not None and self._connection.grant(self._read_bytes + RECEIVE_WINDOW_BYTES):
            self._wake.set()

    def _wake_all(self) -> None:
        for event in (self._wake, self._readable, self._writable):
            event.set()

    # ---- the tasks ----

    async def _run(self) -> None:
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._within_limits, self._read_datagrams)
                    await self._within_limits(self._drive)
                    nursery.cancel_scope.cancel()
        finally:
            self._end("this process is ending", clean=False)
            self._say_goodbye()
            self._socket.close()
            self._ended.set()

    @property
    def _belonging(self) -> FencedConnection | None:
        """The connection, unless we serve and it was only begun by a packet that could not be deciphered."""
        connection = self._connection
        return connection if connection is not None and (self._client or connection.started) else None

    async def _within_limits(self, task: Callable[[], Awaitable[None]]) -> None:
        try:
            await task()
        except trio.BrokenResourceError as error:
            self._cut(str(error))

    async def _drive(self) -> None:
        """Keep the timers, and send what is due."""
        while not self._terminated:
            now = trio.current_time()
            self._wake = trio.Event()
            until = self._keep_time(now)
            datagrams = None
            connection = self._belonging
            if connection is not None:
                if not connection.held_back(now):
                    datagrams = self._guarded(connection.datagrams_to_send, now)
                until = min(until, connection.get_timer() or until)
                self._after_sending()
            if datagrams:
                await self._socket.send(datagrams)
            elif not self._terminated:
                with trio.move_on_at(until):
                    await self._wake.wait()

    def _keep_time(self, now: float) -> float:
        """Do what is due, and say when the next thing is."""
        connection = self._belonging
        if connection is None:
            return float("inf")
        ping_at = max(connection.heard_at, self._pinged_at) + PING_S
        if self._opened.is_set() and now >= connection.heard_at + SILENT_S:
            self._end(f"the peer was silent for {SILENT_S} s", clean=False)
        elif self._opened.is_set() and now >= ping_at:
            connection.send_ping(0)
            self._pinged_at, ping_at = now, now + PING_S
        if now >= self._challenge_at:
            connection.challenge_again()
            self._challenge_at = now + CHALLENGE_S
        if self._closed and (not connection.unacknowledged_bytes or now >= self._linger_until):
            self._end("closed", clean=True)
        timer = connection.get_timer()
        if timer is not None and now >= timer:
            self._guarded(connection.handle_timer, now)
            self._take_events()
        return min(connection.heard_at + SILENT_S, ping_at, self._linger_until)

    def _after_sending(self) -> None:
        assert self._connection is not None
        self._take_events()
        if self._connection.has_room and not self._sending:
            self._connection.controller.on_idle()
        if self._connection.unsent_bytes <= self._unsent_bytes_max // 2:
            self._writable.set()

    async def _read_datagrams(self) -> None:
        while True:
            batch = await self._socket.receive()
            now = trio.current_time()
            for datagram, address in batch:
                self._on_datagram(datagram, address, now)
            self._take_events()
            self._wake.set()

    def _on_datagram(self, datagram: bytes, address: Address, now: float) -> None:
        if self._terminated:
            return
        if address[:2] == self.remote[:2]:
            address = self.remote
        if not datagram or not datagram[0] & _QUIC_BIT or not self._may_be_ours(datagram, address):
            self.ignored_datagrams += 1
            return
        connection = self._connection
        assert connection is not None
        self._guarded(connection.receive_datagram, datagram, address, now)

    def _may_be_ours(self, datagram: bytes, address: Address) -> bool:
        """Whether a datagram is worth deciphering."""
        long_header = datagram[0] & _LONG_HEADER
        if address is not self.remote:
            connection = self._connection
            if connection is None or long_header or not self._opened.is_set():
                return False
            return connection.owns(datagram[1 : 1 + CONNECTION_ID_BYTES]) and self._may_reach(*address[:2])
        if self._client or (self._connection is not None and self._connection.started):
            return True
        # We serve, and nobody's first packet has been deciphered: the one whose packet is, is our client.
        destination = first_destination(datagram) if long_header else None
        if destination is None:
            return False
        if destination != self._origin:
            self._connection = FencedConnection(self._configuration, original_destination=destination)
            self._origin = destination
        return True

    # ---- what aioquic says ----

    def _guarded(self, step: Callable[..., T], *arguments: object) -> T | None:
        """Run a step of aioquic's; whatever it trips over ends this connection and nothing else."""
        try:
            return step(*arguments)
        except Exception as error:
            self._cut(f"QUIC broke: {error!r}")
            return None

    def _take_events(self) -> None:
        connection = self._belonging
        if connection is None:
            return
        while (event := connection.next_event()) is not None:
            self._on_event(connection, event)
        ending = connection.ending
        if ending is not None:
            self._on_ending(ending)

    def _on_event(self, connection: FencedConnection, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            self._on_data(event)
        elif isinstance(event, StopSendingReceived | StreamReset):
            self._cut("the peer reset the stream")
        elif isinstance(event, HandshakeCompleted) and self._client:
            if connection.peer_certificate_sha256 == self._peer_fingerprint:
                connection.send_stream_data(STREAM_ID, GREETING)
                self._opened.set()
            else:
                self._cut("the server's certificate is not the one that was signed for")

    def _on_data(self, event: StreamDataReceived) -> None:
        data = event.data
        if not self._client and not self._opened.is_set() and data:
            if data[:1] != GREETING:
                self._cut("the client began with another byte than the greeting")
                return
            data = data[1:]
            self._was_read(1)
            self._opened.set()
        if data and not self._closed:
            # A piece costs 40 bytes beside its content, and a peer may send it byte by byte.
            if self._received and len(self._received[-1]) + len(data) <= GATHERED_BYTES:
                self._received[-1] += data
            else:
                self._received.append(bytearray(data))
        self._peer_finished = self._peer_finished or event.end_stream
        self._readable.set()

    def _on_ending(self, ending: ConnectionTerminated) -> None:
        if ending.error_code == QuicErrorCode.NO_ERROR:
            self._end("closed by the peer", clean=True)
        else:
            text = ending.reason_phrase[:REASON_CHARACTERS_MAX] or hex(ending.error_code)
            self._end(f"QUIC ended: {text!r}", clean=False)

    def _end(self, reason: str, *, clean: bool) -> None:
        """The connection carries no more; only the first call counts."""
        if not self._terminated:
            self._terminated, self._clean, self.reason = True, clean, reason
            self._opened.set()
            self._wake_all()

    def _cut(self, reason: str) -> None:
        self._end(reason, clean=False)
        self._scope.cancel()

    def _say_goodbye(self) -> None:
        """Tell the peer, twice as one may be lost: nobody will answer here any more."""
        connection = self._belonging
        if connection is not None:
            code = QuicErrorCode.NO_ERROR if self._clean else QuicErrorCode.INTERNAL_ERROR
            # With a frame type, as QUIC's own errors have one: in the handshake no other kind keeps its text.
            connection.close(error_code=code, frame_type=QuicFrameType.PADDING, reason_phrase=self.reason)
            for datagram, address in self._guarded(connection.datagrams_to_send, trio.current_time()) or ():
                self._socket.send_now(datagram, address)
                self._socket.send_now(datagram, address)
