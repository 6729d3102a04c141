"""One open link to a proven peer: messages both ways over any ordered reliable stream.

Everything here runs on trio's thread. Deciphering happens there too, a read at a time (about a quarter of a
millisecond), so the loop is never held up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from protocol.drive.limits import Limits, QuotaUsedUpError
from protocol.errors import RemoteProtocolError
from protocol.framing import Buffer, Event, Framing, MessageArrived, PeerClosed
from protocol.handshake import Session
from protocol.ids import NodeId
from protocol.limits import (
    CLOSE_S,
    PROGRESS_BYTES,
    PROGRESS_S,
    READ_BYTES,
    REKEY_S,
    SEND_QUEUE_BYTES,
    SEND_STALL_S,
    TENSOR_BYTES_MAX,
    WINDOW_BYTES,
)
from protocol.messages import Message

PATHS = ("tcp", "quic", "channel", "relay")
"""The ways that a link may take: what `Link.path` says."""


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


class LinkOwner(Protocol):
    """What a link asks of the transport that opened it."""

    @property
    def events(self) -> LinkEvents: ...

    @property
    def options(self) -> LinkOptions: ...

    @property
    def limits(self) -> Limits: ...

    def forget(self, link: Link) -> None:
        """The link has ended."""


class Link:
    """An open link to a proven peer. `send` and `close` return at once; call them on trio's thread."""

    def __init__(
        self,
        owner: LinkOwner,
        stream: trio.abc.Stream,
        session: Session,
        framing: Framing,
        *,
        path: str,
        address: str,
        dialled: bool,
    ) -> None:
        """Made by `protocol.drive.transport.Transport`."""
        self.peer: NodeId = session.peer
        self.role: str = session.role
        """What the peer's credential says: coordinator, server or volunteer."""
        self.public_key: bytes = session.public_key
        self.credential: bytes = session.credential
        self.path = path
        """Which way it takes: one of PATHS."""
        self.address = address
        """HOST:PORT at the other end, or what the way calls it."""
        self.dialled = dialled
        """Whether we opened it."""
        self.opened_at = trio.current_time()
        self.round_trip_s: float | None = None
        """Smoothed, from the link's own questions; None before the first answer."""
        self.sent_bytes = 0
        """Handed to the stream since the handshake, records and all."""
        self.received_bytes = 0
        self._owner = owner
        self._stream = stream
        self._framing = framing
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._reason = ""
        self._down = False
        self._delivering = False

    def __repr__(self) -> str:
        return f"Link({self.role} {self.peer[:8]} by {self.path} at {self.address})"

    @property
    def closing(self) -> bool:
        """Whether the link takes no more messages."""
        return bool(self._reason)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._framing.queued_bytes

    @property
    def loss(self) -> float | None:
        """Share of what this end sent that was lost or sent again, where the way counts it."""
        loss: float | None = getattr(self._stream, "loss", None)
        return loss

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message; `buffers[i]` is the wire form of `message.tensors[i]` (whose keys must be 0, 1, …).

        The buffers are not copied: leave them unchanged until the link is down or the message was acted upon. Does
        nothing when the link is closing; closes it when more than `send_queue_bytes` wait.
        """
        if self._reason:
            return
        self._framing.send(message, buffers)
        if self._framing.queued_bytes > self._owner.options.send_queue_bytes:
            self.abort(f"the peer is too slow: {self._framing.queued_bytes} bytes wait for it")
        self._wake.set()

    def close(self, reason: str) -> None:
        """Send the control messages that wait, then a clean end; `on_down` follows with this reason."""
        if self._reason:
            return
        self._reason = reason
        self._framing.close()
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + CLOSE_S)
        self._wake.set()

    def abort(self, reason: str) -> None:
        """Cut the link off without another byte."""
        self._reason = self._reason or reason
        self._scope.cancel()

    def report_down(self, reason: str) -> None:
        """Tell the owner's events that the link is gone, once."""
        if not self._down:
            self._down = True
            self._owner.events.on_down(self, reason)

    async def discard(self) -> None:
        """Drop a link that never ran: another one to the same peer stays."""
        self._reason = "another link to this peer stays"
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)

    async def run(self, first: list[Event]) -> None:
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
            self.report_down(self._reason or "this process is ending")
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    @property
    def _write_bytes(self) -> int:
        """What leaves at once: less where the stream knows that its line is slow."""
        byte_count = self._owner.limits.write_bytes
        return min(byte_count, int(getattr(self._stream, "write_bytes", byte_count)))

    async def _write(self) -> None:
        try:
            while not self._framing.close_sent:
                pieces = self._framing.data_to_send(self._write_bytes)
                if pieces:
                    data = b"".join(pieces)
                    with trio.fail_after(SEND_STALL_S):
                        await self._stream.send_all(data)
                    self.sent_bytes += len(data)
                else:
                    await self._wake.wait()
                    self._wake = trio.Event()
        except RemoteProtocolError as error:
            self._reject(error)
        except trio.TooSlowError:
            self._reject(RemoteProtocolError("timeout", f"took no data for {SEND_STALL_S:.0f} s"))
        except QuotaUsedUpError as error:
            self.abort(str(error))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abort("lost: the connection broke")

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
                    self.abort("lost: the stream was cut")
                    return
                self.received_bytes += len(data)
                events = self._framing.receive(data)
                self._wake.set()  # what came may have been credit
        except RemoteProtocolError as error:
            self._reject(error)
        except QuotaUsedUpError as error:
            self.abort(str(error))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.abort("lost: the connection broke")

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
        self.abort(f"refused: {error.reason}")
