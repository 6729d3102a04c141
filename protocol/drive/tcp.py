"""Links over TCP on trio: dial or serve, prove who is who, then carry messages both ways.

Everything here runs on trio's thread. Deciphering happens there too, a read at a time (about a quarter of a
millisecond), so the loop is never held up.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import trio

from protocol.drive.half_open import HalfOpenPlaces
from protocol.errors import RemoteProtocolError
from protocol.framing import Buffer, Event, Framing, FramingLimits, MessageArrived, PeerClosed, PeerReady
from protocol.handshake import ENTROPY_BYTES, NO_COOKIE, CookieDemanded, CookieJar, Initiator, Responder, Session
from protocol.identity import Identity
from protocol.ids import NodeId
from protocol.limits import (
    CLOSE_S,
    CONNECT_S,
    HANDSHAKE_S,
    PROGRESS_BYTES,
    PROGRESS_S,
    READ_BYTES,
    REKEY_S,
    SEND_QUEUE_BYTES,
    SEND_STALL_S,
    TENSOR_BYTES_MAX,
    UNSENT_BYTES,
    WINDOW_BYTES,
    WRITE_BYTES,
)
from protocol.messages import Message
from protocol.records import STREAM_HEADER_BYTES


class DialError(Exception):
    """No address led to the peer; the text says what each answered."""


class LinkEvents(Protocol):
    """What the owner of links is told, on trio's thread."""

    def on_up(self, link: Link) -> None:
        """A link is proven. Called before any of its messages; an older link to the same peer is down by then."""

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        """A message with its tensors. While this awaits, the link reads no further: that is the back-pressure."""

    def on_down(self, link: Link, reason: str) -> None:
        """The link is gone, for a reason of ours or the peer's. Called once for each `on_up`."""

    def on_rejected(self, address: str, reason: str, detail: str) -> None:
        """A peer broke the protocol (`reason` is one of REJECT_REASONS) and is being cut off."""

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Payload moved: `direction` rx or tx, `kind` as in the metric barnraise_transport_bytes_total."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Bounds that the run decides."""

    tensor_bytes_max: int = TENSOR_BYTES_MAX
    """The largest tensor that can honestly occur."""
    window_bytes: int = WINDOW_BYTES
    """Tensor bytes of one peer under way or undigested; at least the largest message."""
    send_queue_bytes: int = SEND_QUEUE_BYTES
    """Messages and tensors that wait for one peer; above it the link is closed."""


class Link:
    """An open link to a proven peer. `send` and `close` return at once; call them on trio's thread."""

    def __init__(
        self,
        owner: Transport,
        stream: trio.SocketStream,
        session: Session,
        framing: Framing,
        address: str,
        dialled: bool,
    ) -> None:
        """Made by `Transport`."""
        self.peer: NodeId = session.peer
        self.role: str = session.role
        """What the peer's credential says: coordinator, server or volunteer."""
        self.public_key: bytes = session.public_key
        self.credential: bytes = session.credential
        self.address = address
        """HOST:PORT at the other end."""
        self.dialled = dialled
        """Whether we opened it."""
        self.opened_at = trio.current_time()
        self._owner = owner
        self._stream = stream
        self._framing = framing
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._reason = ""
        self._down = False
        self._delivering = False

    def __repr__(self) -> str:
        return f"Link({self.role} {self.peer[:8]} at {self.address})"

    @property
    def closing(self) -> bool:
        """Whether the link takes no more messages."""
        return bool(self._reason)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._framing.queued_bytes

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message; `buffers[i]` is the wire form of `message.tensors[i]` (whose keys must be 0, 1, …).

        The buffers are not copied: leave them unchanged until the link is down or the message was acted upon. Does
        nothing when the link is closing; closes it when more than `send_queue_bytes` wait.
        """
        if self._reason:
            return
        self._framing.send(message, buffers)
        if self._framing.queued_bytes > self._owner.options.send_queue_bytes:
            self._abort(f"the peer is too slow: {self._framing.queued_bytes} bytes wait for it")
        self._wake.set()

    def close(self, reason: str) -> None:
        """Send the control messages that wait, then a clean end; `on_down` follows with this reason."""
        if self._reason:
            return
        self._reason = reason
        self._framing.close()
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + CLOSE_S)
        self._wake.set()

    def _abort(self, reason: str) -> None:
        """Cut the link off without another byte."""
        self._reason = self._reason or reason
        self._scope.cancel()

    def _report_down(self, reason: str) -> None:
        if not self._down:
            self._down = True
            self._owner.events.on_down(self, reason)

    async def _run(self, first: list[Event]) -> None:
        """Carry messages until the link ends. `first`: what arrived together with the peer's first frame."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    async with trio.open_nursery() as halves:
                        halves.start_soon(self._write)
                        halves.start_soon(self._read, first)
                    nursery.cancel_scope.cancel()
        finally:
            self._owner.forget(self)
            self._report_down(self._reason or "this process is ending")
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    async def _write(self) -> None:
        try:
            while not self._framing.close_sent:
                pieces = self._framing.data_to_send(WRITE_BYTES)
                if pieces:
                    with trio.fail_after(SEND_STALL_S):
                        await self._stream.send_all(b"".join(pieces))
                else:
                    await self._wake.wait()
                    self._wake = trio.Event()
        except RemoteProtocolError as error:
            self._reject(error)
        except trio.TooSlowError:
            self._reject(RemoteProtocolError("timeout", f"took no data for {SEND_STALL_S:.0f} s"))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._abort("lost: the connection broke")

    async def _read(self, first: list[Event]) -> None:
        try:
            events = first
            while True:
                for event in events:
                    if isinstance(event, PeerClosed):
                        self.close("closed by the peer")
                        return
                    if isinstance(event, MessageArrived):
                        await self._deliver(event)
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    self._abort("lost: the stream was cut")
                    return
                events = self._framing.receive(data)
                self._wake.set()  # what came may have been credit
        except RemoteProtocolError as error:
            self._reject(error)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._abort("lost: the connection broke")

    async def _deliver(self, event: MessageArrived) -> None:
        if self._reason:
            return
        self._delivering = True
        await self._owner.events.on_message(self, event.message, event.buffers)
        self._delivering = False
        if event.byte_count:
            self._framing.release(event.byte_count)
            self._wake.set()

    async def _watch(self) -> None:
        """Cut off a peer that begins something and does not bring it; change keys by the hour."""
        rekey_at = trio.current_time() + REKEY_S
        before = self._framing.progress
        while True:
            await trio.sleep(PROGRESS_S)
            now = self._framing.progress
            stuck = before.receiving and now.receiving and now.messages == before.messages
            if stuck and not self._delivering and now.byte_count - before.byte_count < PROGRESS_BYTES:
                self._reject(RemoteProtocolError("timeout", f"{now.byte_count - before.byte_count} bytes in a frame"))
            before = now
            if trio.current_time() >= rekey_at:
                self._framing.rekey()
                rekey_at += REKEY_S

    def _reject(self, error: RemoteProtocolError) -> None:
        self._owner.events.on_rejected(self.address, error.reason, error.detail)
        self._abort(f"refused: {error.reason}")


class Transport:
    """Opens links by dialling and by serving, for one identity in one run; at most one link to each peer."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        identity: Identity,
        role: str,
        run_id: bytes,
        credential: Callable[[], bytes],
        admit: Callable[[bytes, bytes], str],
        events: LinkEvents,
        options: LinkOptions | None = None,
    ) -> None:
        """`nursery` runs dialled links; `role` is ours; `credential()` is what we show now; `options` may be replaced
        later and then hold for new links.

        `admit(public_key, credential)` gives the peer's role or raises `RemoteProtocolError`
        (`protocol.membership.Trust.admit` with the time filled in).
        """
        self.events = events
        self.options = options or LinkOptions()
        self._nursery = nursery
        self._identity = identity
        self._role = role
        self._run_id = run_id
        self._credential = credential
        self._admit = admit
        self._links: dict[NodeId, Link] = {}
        self._half_open = HalfOpenPlaces()
        self._jar = CookieJar(os.urandom(32))

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are up, oldest first."""
        return tuple(self._links.values())

    def link_to(self, peer: NodeId) -> Link | None:
        """The link to `peer`, if there is one that takes messages."""
        link = self._links.get(peer)
        return None if link is None or link.closing else link

    def forget(self, link: Link) -> None:
        """For `Link`: it has ended."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept links until cancelled; each lives in a task of its own below this call."""
        await trio.serve_listeners(self._accept, list(listeners))

    async def dial(self, addresses: Sequence[str], peer: NodeId) -> Link:
        """Open a link to `peer` at the first address that answers and proves to be it; or the one that is open.

        Raises `DialError`.
        """
        failures = []
        for address in addresses:
            link = self.link_to(peer)
            if link is not None:
                return link
            try:
                return await self._dial_one(address, peer)
            except DialError as error:
                failures.append(f"{address}: {error}")
        raise DialError("; ".join(failures) or "no address is known")

    async def _dial_one(self, address: str, peer: NodeId) -> Link:
        cookie = NO_COOKIE
        for _ in range(2):
            stream = await _connect(address)
            kept = False
            try:
                outcome = await self._greet_as_initiator(stream, address, peer, cookie)
                if isinstance(outcome, bytes):
                    cookie = outcome
                    continue
                link, first = outcome
                kept = self._register(link)
                if kept:
                    self._nursery.start_soon(link._run, first)
                    return link
                survivor = self.link_to(peer)
                assert survivor is not None, "a link that was preferred is there"
                return survivor
            finally:
                if not kept:
                    await trio.aclose_forcefully(stream)
        raise DialError("the peer is too busy")

    async def _greet_as_initiator(
        self, stream: trio.SocketStream, address: str, peer: NodeId, cookie: bytes
    ) -> tuple[Link, list[Event]] | bytes:
        """A proven link and what came with it, or the cookie that the peer demands. Raises `DialError`."""
        handshake = Initiator(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            peer=peer,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            cookie=cookie,
        )
        try:
            with trio.fail_after(HANDSHAKE_S):
                await stream.send_all(handshake.data_to_send())
                session = None
                while session is None:
                    session = handshake.receive(await _receive(stream))
                if isinstance(session, CookieDemanded):
                    return session.cookie
                await stream.send_all(handshake.data_to_send())
                return await self._open(stream, session, b"", address, dialled=True)
        except RemoteProtocolError as error:
            self.events.on_rejected(address, error.reason, error.detail)
            raise DialError(f"refused by us: {error}") from None
        except trio.TooSlowError:
            raise DialError("no answer in time") from None
        except (trio.BrokenResourceError, _StreamEndedError):
            raise DialError("the peer closed the connection in the handshake (does it know us?)") from None

    async def _accept(self, stream: trio.SocketStream) -> None:
        """One caller: handshake in a half-open place, then the link until it ends."""
        try:
            host, port = stream.socket.getpeername()[:2]
        except OSError:
            return
        address = _address(host, port)
        _tune(stream)
        outcome: tuple[Link, list[Event]] | None = None
        reason, detail = "busy", "gave way to a newer caller before its handshake was over"
        with self._half_open.place(host):
            try:
                with trio.fail_after(HANDSHAKE_S):
                    outcome = await self._greet_as_responder(stream, address)
                    reason = ""
            except RemoteProtocolError as error:
                reason, detail = error.reason, error.detail
            except trio.TooSlowError:
                reason, detail = "timeout", "the handshake was not over in time"
            except (trio.BrokenResourceError, _StreamEndedError):
                reason = ""
        if reason:
            self.events.on_rejected(address, reason, detail)
        if outcome is not None:
            link, first = outcome
            if self._register(link):
                await link._run(first)

    async def _greet_as_responder(self, stream: trio.SocketStream, address: str) -> tuple[Link, list[Event]] | None:
        cookies = self._jar.cookies(address.rpartition(":")[0], trio.current_time()) if self._half_open.crowded else ()
        handshake = Responder(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            cookies=cookies,
        )
        session = None
        while session is None:
            session = handshake.receive(await _receive(stream))
            answer = handshake.data_to_send()
            if answer:
                await stream.send_all(answer)
            if handshake.cookie_sent:
                return None
        return await self._open(stream, session, handshake.trailing, address, dialled=False)

    async def _open(
        self, stream: trio.SocketStream, session: Session, trailing: bytes, address: str, *, dialled: bool
    ) -> tuple[Link, list[Event]]:
        """Exchange the first frames: after them both sides know that the other accepted."""
        framing = Framing(
            session,
            role=self._role,
            header=os.urandom(STREAM_HEADER_BYTES),
            limits=FramingLimits(self.options.tensor_bytes_max, self.options.window_bytes),
            count=self.events.on_bytes,
        )
        await stream.send_all(b"".join(framing.data_to_send(WRITE_BYTES)))
        events = framing.receive(trailing)
        while not events:
            events = framing.receive(await _receive(stream))
        assert isinstance(events[0], PeerReady)
        return Link(self, stream, session, framing, address, dialled), events[1:]

    def _register(self, link: Link) -> bool:
        """Make `link` the one to its peer and report it; False when an older one stays.

        When both sides dial at once, both keep the link that the smaller id dialled. Otherwise the newer one wins:
        the peer would not have opened it if the older one still worked.
        """
        old = self.link_to(link.peer)
        if old is not None and old.dialled != link.dialled and trio.current_time() - old.opened_at < HANDSHAKE_S:
            ours_stays = self._identity.node < link.peer
            if link.dialled != ours_stays:
                return False
        previous = self._links.pop(link.peer, None)
        if previous is not None:
            previous._report_down("replaced by a new link")
            previous._abort("replaced by a new link")
        self._links[link.peer] = link
        self.events.on_up(link)
        return True


class _StreamEndedError(Exception):
    """The peer closed the connection in the middle of the handshake."""


async def _receive(stream: trio.SocketStream) -> bytes:
    data = await stream.receive_some(4096)
    if not data:
        raise _StreamEndedError
    return bytes(data)


async def _connect(address: str) -> trio.SocketStream:
    host, _, port = address.rpartition(":")
    try:
        with trio.fail_after(CONNECT_S):
            stream = await trio.open_tcp_stream(host.strip("[]"), int(port))
    except trio.TooSlowError:
        raise DialError("no connection in time") from None
    except (OSError, ValueError) as error:
        raise DialError(f"no connection: {error}") from None
    _tune(stream)
    return stream


def _tune(stream: trio.SocketStream) -> None:
    """Small messages at once, little unsent in the kernel, and a sender that keeps its rate under loss."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (("TCP_NOTSENT_LOWAT", UNSENT_BYTES), ("TCP_CONGESTION", b"bbr")):
        # Both are Linux's; bbr is there only where its module is loaded.
        with suppress(OSError, AttributeError):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listening sockets at `host` (a name or an address); port 0 lets the system choose."""
    return await trio.open_tcp_listeners(port, host=host)
