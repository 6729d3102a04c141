"""One open link to a proven peer: messages both ways over an ordered reliable stream, and over the next one after it.

A link can leave its path for another one that the same two processes have proven: `protocol.link.framing` then repeats
what was lost, and nobody above notices. That happens when it is asked for, and when a path has gone quiet or a carrier
of ours has failed and another path comes within GRACE_S. A TCP connection that breaks is the end of the link at once,
unless MEND_BYTES are under way: the peer's process has most likely ended, and its work should go to others.

Each side says something every KEEP_ALIVE_S, so a path that carries nothing any more is found within SILENT_S; the
transport's owner is told and may bring another path. Whether a silent *peer* is given up is not decided here: machines
ask with messages of their own (`node.machine.wanted`), by the run's configuration and in the simulated world too, and
only on links where no message came.

Everything here runs on trio's thread. Deciphering happens there too, a read at a time (about a quarter of a
millisecond), so the loop is never held up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import (
    AHEAD_BYTES_MIN,
    AHEAD_S,
    CLOSE_S,
    GRACE_S,
    KEEP_ALIVE_S,
    MEND_BYTES,
    PROGRESS_BYTES,
    PROGRESS_S,
    READ_BYTES,
    REKEY_S,
    ROUND_TRIP_S,
    SEND_STALL_S,
    SILENT_S,
    UNSENT_BYTES,
    WRITE_BYTES,
)
from protocol.drive.limits import Limits, Metered, QuotaUsedUpError
from protocol.drive.link_options import LinkOptions
from protocol.link.budget import Account
from protocol.link.frames import NO_LINK, TOKEN_BYTES, Hello
from protocol.link.framing import Buffer, Event, Framing, MessageArrived, PeerClosed, PongArrived
from protocol.link.paths import Path
from protocol.messages import Message
from protocol.trust.handshake import Session

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

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        """A peer broke the protocol (`reason` is one of REJECT_REASONS) and is being cut off, or so many like it."""

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Payload moved: `direction` rx or tx, `kind` as in the metric barnraise_transport_bytes_total."""


MENDABLE = frozenset({"quic", "channel", "relay"})
"""Paths whose break says something about what carries them, and little about the peer's process."""


class LinkOwner(Protocol):
    """What a link asks of the transport that opened it."""

    @property
    def events(self) -> LinkEvents: ...

    @property
    def options(self) -> LinkOptions: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def endings(self) -> trio.CapacityLimiter:
        """Held for a turn of the loop by each link that was cut."""
        ...

    def forget(self, link: Link) -> None:
        """The link has ended."""

    def path_failed(self, link: Link, reason: str) -> None:
        """The link's path carries nothing at present; another one is welcome."""

    def moved(self, link: Link) -> None:
        """The link has left its path for another one."""

    def at_fault(self, link: Link, reason: str) -> None:
        """The link ends for what the peer said on it: a word of REJECT_REASONS."""


@dataclass(eq=False)
class Carrier:
    """The stream that a link runs on, and what it is called."""

    stream: trio.abc.Stream
    path: str
    address: str
    dialled: bool
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    broken: str = ""
    """Why it can no longer be used."""
    mends: bool = False
    """Whether to wait for another one when it is broken."""
    ended: trio.Event = field(default_factory=trio.Event)
    """It was closed."""

    async def close(self) -> None:
        """At once, also while being cancelled."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self.stream)
        self.ended.set()


class Link:
    """An open link to a proven peer. `send` and `close` return at once; call them on trio's thread."""

    def __init__(self, owner: LinkOwner, session: Session, framing: Framing, carrier: Carrier, link_id: bytes) -> None:
        """Made by `protocol.drive.transport.Transport`."""
        self.peer: NodeId = session.peer
        self.role: str = session.role
        """What the peer's credential says: coordinator, server or volunteer."""
        self.public_key: bytes = session.public_key
        self.credential: bytes = session.credential
        self.opened_at = trio.current_time()
        self.round_trip_s: float | None = None
        """Smoothed, of the present path, from the link's own questions; None before the first answer."""
        self.sent_bytes = 0
        """Handed to streams since the handshake, records and all."""
        self.received_bytes = 0
        self.link_id = link_id
        """Known to its two ends only."""
        self.account: Account | None = None
        """What it holds of the process's memory."""
        self.options = owner.options
        """What it was opened under."""
        self.epoch = 0
        """Paths left so far."""
        self.attempts = trio.Lock()
        """Held while this side tries to move to another path: one attempt at a time."""
        self.ailing = ""
        """Why the present path is thought to carry nothing; empty: it does."""
        self.watch: Callable[[str, Message, int, float], None] = _nobody
        """Told, when a message with tensors has left or come: which of `send` and `receive`, the message, its bytes,
        and when its first frame went or came (by trio's clock)."""
        self._owner = owner
        self._framing = framing
        self._carrier = carrier
        self._left: list[Carrier] = []
        self._attempt = 0
        self._attempting = False
        self._answered_attempt = 0
        """The peer's attempt that brought the present path, or 0."""
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._moved = trio.Event()
        self._inbox: list[Event] = []
        self._filled = trio.Event()
        self._drained = trio.Event()
        self._reason = ""
        self._down = False
        self._delivering = False
        self._reading = False
        self.heard_at = self.opened_at
        self.was_silent_s = 0.0
        """Before it went another way last: how long nothing had come."""
        self._ping_number = 0
        self._asked_number = 0
        self._pinged_at: float | None = None
        self._answered_at = self.opened_at
        self._ahead_bytes = WRITE_BYTES

    def __repr__(self) -> str:
        return f"Link({self.role} {self.peer[:8]} by {self.path} at {self.address})"

    @property
    def path(self) -> str:
        """Which way it takes: one of PATHS."""
        return self._carrier.path

    @property
    def address(self) -> str:
        """HOST:PORT at the other end, or what the way calls it."""
        return self._carrier.address

    @property
    def dialled(self) -> bool:
        """Whether we opened it."""
        return self._carrier.dialled

    @property
    def closing(self) -> bool:
        """Whether the link takes no more messages."""
        return bool(self._reason)

    @property
    def resumable(self) -> bool:
        """Whether it can go on over another path."""
        return not self._reason and self._framing.resumable

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._framing.queued_bytes

    @property
    def has_much_under_way(self) -> bool:
        """Whether something large has come in part, or waits to be sent: words wait behind it on a slow line."""
        return self._framing.queued_bytes > 0 or self._framing.progress.receiving

    @property
    def loss(self) -> float | None:
        """Share of what this end sent that was lost or sent again, where the way counts it."""
        loss: float | None = getattr(self._carrier.stream, "loss", None)
        return loss

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message; `buffers[i]` is the wire form of `message.tensors[i]` (whose keys must be 0, 1, …).

        The buffers are not copied: leave them unchanged until the link is down or the message was acted upon. Does
        nothing when the link is closing; closes it when more than `send_queue_bytes` wait.
        """
        if self._reason:
            return
        self._framing.tell_time(trio.current_time())
        self._framing.send(message, buffers)
        if self._framing.queued_bytes > self._owner.options.send_queue_bytes:
            self.abort(f"the peer is too slow: {self._framing.queued_bytes} bytes wait for it")
        self._wake.set()

    def look_again(self) -> None:
        """Something may leave that was held back."""
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

    def give_way(self, sentence: str) -> None:
        """Others need the memory that this link's unfinished messages hold: it ends at once, with a sentence."""
        self._reject(RemoteProtocolError("busy", sentence))

    def at_fault(self, reason: str = "unexpected") -> None:
        """For who closes it for something that the peer said: the peer waits before it may come again."""
        self._owner.at_fault(self, reason)

    def report_down(self, reason: str) -> None:
        """Tell the owner's events that the link is gone, once."""
        if not self._down:
            self._down = True
            self._owner.events.on_down(self, reason)

    # ---- moving to another path ------------------------------------------------------------------------------------

    def offer(self, token: bytes) -> Hello:
        """Our HELLO on a new path, as its initiator; then call `attempt_over`. `token`: if it must be a new link."""
        self._attempt += 1
        self._attempting = True
        self._framing.hold_acknowledgements(True)
        return self._framing.hello(resume=self.link_id, epoch=self.epoch, attempt=self._attempt, token=token)

    def attempt_over(self) -> None:
        """Whatever became of it."""
        self._attempting = False
        self._framing.hold_acknowledgements(False)

    def agrees(self, hello: Hello, we_come_first: bool) -> bool:
        """As the responder: whether the link moves to the path on which the peer said `hello`.

        Both sides leave the same paths in the same order: an attempt that started before the latest move is void,
        unless that move was the peer's own and our answer to it was lost; of two attempts at once that of the side
        that comes first counts (`we_come_first`: that is us).
        """
        if not self.resumable or (self._attempting and we_come_first):
            return False
        unheard = hello.epoch == self.epoch - 1 and 0 < self._answered_attempt < hello.attempt
        return self.epoch <= hello.epoch <= self.epoch + 1 or unheard

    def answer(self, carrier: Carrier, records: Path, hello: Hello, rest: Iterable[tuple[int, bytes]]) -> None:
        """As the responder: move to `carrier`. Raises `RemoteProtocolError` when the peer's numbers cannot be."""
        reply = self._framing.hello(resume=self.link_id, epoch=hello.epoch + 1, attempt=hello.attempt)
        self._framing.move(records, hello, reply.received, say=reply)
        self._answered_attempt = hello.attempt
        self._move(carrier, hello.epoch + 1, rest)

    def answered(
        self, carrier: Carrier, records: Path, offer: Hello, hello: Hello, rest: Iterable[tuple[int, bytes]]
    ) -> bool:
        """As the initiator: move to `carrier`, where the peer has agreed to `offer`; False when it is void by now.

        Raises `RemoteProtocolError` when the peer's numbers cannot be.
        """
        if not self.resumable or self.epoch != offer.epoch:
            return False
        self._framing.move(records, hello, offer.received)
        self._answered_attempt = 0
        self._move(carrier, offer.epoch + 1, rest)
        return True

    def _move(self, carrier: Carrier, epoch: int, rest: Iterable[tuple[int, bytes]]) -> None:
        self.epoch = epoch
        self.ailing = ""
        self._left.append(self._carrier)
        self._carrier.scope.cancel()
        self._carrier = carrier
        self.round_trip_s = self._pinged_at = None
        self.was_silent_s = trio.current_time() - self.heard_at
        self.heard_at = self._answered_at = trio.current_time()
        try:
            self._take(self._framing.take(rest))
        except RemoteProtocolError as error:
            self._reject(error)
        self._moved.set()
        self._moved = trio.Event()
        self._owner.moved(self)

    def _path_broke(self, carrier: Carrier, reason: str) -> None:
        """The stream has ended without a word; perhaps only what carried it has."""
        if carrier is not self._carrier:
            return
        carrier.mends = carrier.path in MENDABLE or self._framing.under_way_bytes >= MEND_BYTES
        if self.resumable and (carrier.mends or self._attempting):
            self.ailing = carrier.broken = reason
            carrier.scope.cancel()
        else:
            self.abort(f"lost: {reason}")

    # ---- carrying --------------------------------------------------------------------------------------------------

    def runs_on(self, stream: trio.abc.Stream) -> bool:
        """Whether it is this stream that carries the link now."""
        return self._carrier.stream is stream

    async def leaves(self, stream: trio.abc.Stream) -> None:
        """Wait until the link uses this stream no more."""
        for carrier in (self._carrier, *self._left):
            if carrier.stream is stream:
                await carrier.ended.wait()

    async def run(self, first: list[Event]) -> None:
        """Carry messages until the link ends. `first`: what arrived together with the peer's first frame."""
        self._take(first)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._keep_alive)
                    nursery.start_soon(self._deliver_all)
                    while await self._carry(self._carrier):
                        await self._close_left()
                    nursery.cancel_scope.cancel()
        finally:
            self._framing.close()  # nothing that waits here holds others back
            self._owner.forget(self)
            self.report_down(self._reason or "this process is ending")
            await self._close_left()
            await self._carrier.close()

    async def _carry(self, carrier: Carrier) -> bool:
        """Use one path to its end; whether there is another one now."""
        with carrier.scope:
            async with trio.open_nursery() as halves:
                halves.start_soon(self._write, carrier)
                halves.start_soon(self._read, carrier)
        if carrier is self._carrier and carrier.broken:
            moved = self._moved
            await carrier.close()
            with trio.move_on_after(GRACE_S):
                async with self.attempts:
                    pass  # one that is under way may bring the other path: that is why this one was left
                if carrier is self._carrier and carrier.mends:
                    self._owner.path_failed(self, carrier.broken)
                    await moved.wait()
            if carrier is self._carrier:
                self.abort(f"lost: {carrier.broken}")
        return carrier is not self._carrier

    async def _close_left(self) -> None:
        while self._left:
            await self._left.pop().close()

    def _write_bytes(self, carrier: Carrier) -> int:
        """What leaves at once: less where we have seen, or the stream knows, that its line is slow."""
        byte_count = min(self._ahead_bytes, self._owner.limits.write_bytes)
        return min(byte_count, int(getattr(carrier.stream, "write_bytes", byte_count)))

    async def _write(self, carrier: Carrier) -> None:
        try:
            while carrier is self._carrier and not self._framing.close_sent:
                self._framing.tell_time(trio.current_time())
                pieces = self._framing.data_to_send(self._write_bytes(carrier))
                if pieces:
                    data = b"".join(pieces)
                    with trio.fail_after(SEND_STALL_S):
                        await carrier.stream.send_all(data)
                    self.sent_bytes += len(data)
                    for gone in self._framing.departed():
                        self.watch("send", gone.message, gone.byte_count, gone.began_s)
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
            await self._cut(carrier, "the connection broke")

    async def _read(self, carrier: Carrier) -> None:
        try:
            while True:
                while self._inbox:
                    await self._drained.wait()
                self._reading = True
                wait_for = getattr(carrier.stream, "wait_for", None)
                if wait_for is not None:
                    wait_for(self._framing.missing_bytes)
                data = await carrier.stream.receive_some(READ_BYTES)
                self._reading = False
                if carrier is not self._carrier:
                    return
                if not data:
                    await self._cut(carrier, "the stream was cut")
                    return
                self.received_bytes += len(data)
                self.heard_at = trio.current_time()
                if not carrier.broken:
                    self.ailing = ""
                self._framing.tell_time(self.heard_at)
                events = self._framing.receive(data)
                self._take(events)
                if events and isinstance(events[-1], PeerClosed):
                    return
        except RemoteProtocolError as error:
            self._reject(error)
        except QuotaUsedUpError as error:
            self.abort(str(error))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._cut(carrier, "the connection broke")

    async def _cut(self, carrier: Carrier, reason: str) -> None:
        """The other side has ended the stream. Where hundreds do so at once, everybody else gets turns in between."""
        async with self._owner.endings:
            self._path_broke(carrier, reason)
            await trio.lowlevel.checkpoint()

    def _take(self, events: Iterable[Event]) -> None:
        """Keep what came for `_deliver_all`; what came may also have been credit, or a question."""
        for event in events:
            if isinstance(event, PongArrived):
                self._take_pong(event.number)
            else:
                self._inbox.append(event)
                if isinstance(event, MessageArrived) and event.buffers:
                    self.watch("receive", event.message, event.byte_count, event.began_s)
        if self._inbox:
            self._filled.set()
        self._wake.set()

    async def _deliver_all(self) -> None:
        """Hand over what came, one after the other. It is a task of its own: no change of the path may cut it short."""
        while True:
            while self._inbox:
                event = self._inbox[0]
                if isinstance(event, PeerClosed):
                    self.close("closed by the peer")
                elif isinstance(event, MessageArrived):
                    await self._deliver(event)
                self._inbox.pop(0)
            self._drained.set()
            self._drained = trio.Event()
            await self._filled.wait()
            self._filled = trio.Event()

    async def _deliver(self, event: MessageArrived) -> None:
        if self._reason:
            return
        self._delivering = True
        await self._owner.events.on_message(self, event.message, event.buffers)
        self._delivering = False
        if event.byte_count:
            self._framing.release(event.byte_count)
            self._wake.set()

    # ---- watching --------------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Say something when nothing else is said, measure the round trip, and notice a path that carries nothing."""
        sent_bytes = self.sent_bytes
        while True:
            waited = self._framing.queued_bytes > 0
            await trio.sleep(KEEP_ALIVE_S)
            if waited and self._framing.queued_bytes:
                self._hurry((self.sent_bytes - sent_bytes) / KEEP_ALIVE_S)
                self._wake.set()  # what is held back for others sends a little now and then
            if not self._framing.keeping or self._framing.close_sent:
                sent_bytes = self.sent_bytes
                continue  # a peer of an older version, or one that does not answer
            now = trio.current_time()
            if self.sent_bytes == sent_bytes or now - self._answered_at >= ROUND_TRIP_S:
                self._ping_number += 1
                if self._pinged_at is None:
                    self._pinged_at, self._asked_number = now, self._ping_number
                self._framing.ping(self._ping_number)
                self._wake.set()
            sent_bytes = self.sent_bytes
            if not self._reading:
                self.heard_at = now  # we do not listen: what the peer says waits in the kernel
            elif now - self.heard_at >= SILENT_S and not self.ailing:
                self.ailing = f"silent for {now - self.heard_at:.0f} s"
                self._owner.path_failed(self, self.ailing)

    def _hurry(self, rate: float) -> None:
        """The line carries `rate` bytes a second at present: hand it no more at once than it sends in AHEAD_S."""
        self._ahead_bytes = int(min(WRITE_BYTES, max(AHEAD_BYTES_MIN, rate * AHEAD_S)))
        stream = self._carrier.stream
        if isinstance(stream, Metered):
            stream.keep_unsent(int(min(UNSENT_BYTES, max(AHEAD_BYTES_MIN, rate * AHEAD_S))))

    def _take_pong(self, number: int) -> None:
        if self._pinged_at is None or number != self._asked_number:
            return
        now = trio.current_time()
        sample_s = now - self._pinged_at
        self._pinged_at, self._answered_at = None, now
        # Smoothed as TCP does it (RFC 6298, section 2).
        self.round_trip_s = sample_s if self.round_trip_s is None else self.round_trip_s * 7 / 8 + sample_s / 8

    async def _watch(self) -> None:
        """Cut off a peer that begins something and does not bring it; change keys by the hour."""
        rekey_at = trio.current_time() + REKEY_S
        withholding_since: float | None = None
        before = self._framing.progress
        while True:
            await trio.sleep(PROGRESS_S)
            now, time = self._framing.progress, trio.current_time()
            stuck = before.receiving and now.receiving and now.messages == before.messages
            if stuck and not self._delivering and now.byte_count - before.byte_count < PROGRESS_BYTES:
                self._reject(RemoteProtocolError("timeout", f"{now.byte_count - before.byte_count} bytes in a frame"))
            if not now.withholding or now.kept != before.kept:
                withholding_since = None
            elif withholding_since is None:
                withholding_since = time
            elif time - withholding_since >= SEND_STALL_S:
                self._reject(RemoteProtocolError("timeout", f"acknowledged nothing for {SEND_STALL_S:.0f} s"))
            before = now
            if time >= rekey_at:
                self._framing.rekey()
                rekey_at += REKEY_S

    def _reject(self, error: RemoteProtocolError) -> None:
        self._owner.events.on_rejected(self.address, error.reason, error.detail)
        self._owner.at_fault(self, error.reason)
        self.abort(f"refused: {error.reason}")


def _nobody(direction: str, message: Message, byte_count: int, began_s: float) -> None:
    """Who watches a link that nobody watches."""


def name_link(initiator_token: bytes, responder_token: bytes) -> bytes:
    """The name of a new link, from what both HELLOs say; none when one side keeps nothing."""
    if not initiator_token or not responder_token:
        return NO_LINK
    return hashlib.blake2b(initiator_token + responder_token, digest_size=TOKEN_BYTES, person=b"br-link").digest()
