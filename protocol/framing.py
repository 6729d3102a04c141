"""Messages and tensors as frames on an established record stream; control never waits behind bulk.

A frame is one record; the record's kind says what it holds (integers big endian):

    HELLO   minor version (2 bytes), window (8): the first frame of each direction
    MESSAGE an encoded message without tensors, or its last part
    PART    a part of such a message, when it is longer than a record
    BULK    number (4), an encoded message that has tensors
    CHUNK   number (4), the next bytes of that message's tensors; a chunk never holds bytes of two tensors
    CREDIT  byte count (8) that the receiver is done with
    END     nothing; the record is the stream's final one

Control messages leave before anything that waits, in their order. Up to OPEN_BULK_MAX messages with tensors are
under way at once and take turns chunk by chunk, so a small one may overtake a large one. The receiver announces a
window; a sender opens a message with tensors only while the bytes of all its open and undigested ones fit, and the
receiver gives bytes back when it is done with the message. So what a peer can make us hold is bounded by the
window, and nothing is allocated before header, role, shapes and window have been checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from protocol.codec import (
    PROTOCOL_MINOR,
    check_allowed,
    check_tensors,
    decode,
    encode,
    tensors_of,
    traffic_kind,
)
from protocol.errors import LocalProtocolError, RemoteProtocolError
from protocol.handshake import Session
from protocol.ids import TensorRef
from protocol.limits import (
    HEADER_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    OPEN_BULK_MAX,
    RECORD_BYTES_MAX,
    TENSOR_BYTES_MAX,
    WINDOW_BYTES,
)
from protocol.messages import Message
from protocol.records import RecordReader, RecordWriter

Buffer = bytes | bytearray | memoryview
CountBytes = Callable[[str, str, int, int], None]
"""(direction, kind, bytes, messages): payload that was handed out or delivered."""

_NUMBER_BYTES = 4
_COUNT_BYTES = 8
_CHUNK_BYTES = RECORD_BYTES_MAX - _NUMBER_BYTES
_WINDOW_BYTES_MAX = 1 << 40


class Frame(IntEnum):
    """The kinds of frames; the module's docstring says what each holds."""

    HELLO = 1
    MESSAGE = 2
    PART = 3
    BULK = 4
    CHUNK = 5
    CREDIT = 6
    END = 7


@dataclass(frozen=True, slots=True)
class FramingLimits:
    """Bounds that the run decides."""

    tensor_bytes_max: int = TENSOR_BYTES_MAX
    """The largest tensor that can honestly occur."""
    window_bytes: int = WINDOW_BYTES
    """Tensor bytes of one peer under way or undigested; at least the largest message."""


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer's first frame: it finished the handshake, and accepted us."""

    minor: int


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message with all its tensors: `buffers[i]` holds the wire form of `message.tensors[i]` (whose key is i)."""

    message: Message
    buffers: tuple[memoryview, ...]
    """Writable, of bytes, and the receiver's own."""
    byte_count: int
    """Bytes to give back with `release` when the receiver is done with the message (0 without tensors)."""


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer ended the stream cleanly; everything it sent has been delivered."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Two of these, some time apart, show whether a peer brings what it began."""

    receiving: bool
    """It has begun something that it must go on bringing: a record, a message, or tensors."""
    messages: int
    """Messages completed so far."""
    byte_count: int
    """Bytes received so far."""


Event = PeerReady | MessageArrived | PeerClosed


@dataclass(slots=True)
class _Outgoing:
    """A message with tensors on its way out."""

    header: bytes
    kind: str
    byte_count: int
    buffers: deque[memoryview]
    number: int = 0
    offset: int = 0


@dataclass(slots=True)
class _Incoming:
    """A message with tensors on its way in."""

    message: Message
    header_bytes: int
    byte_count: int
    wanted: deque[TensorRef]
    """Tensors that are not complete; the last buffer, if any, belongs to the first of them once a chunk came."""
    buffers: list[memoryview] = field(default_factory=list)
    offset: int = 0
    """Bytes of the last buffer that are there."""


class Framing:
    """One link's frames, both ways. Sans-I/O: no clock, no socket, randomness handed in."""

    def __init__(
        self,
        session: Session,
        *,
        role: str,
        header: bytes,
        limits: FramingLimits | None = None,
        count: CountBytes | None = None,
    ) -> None:
        """`role` is our own; `header` is 24 random bytes for the sending stream."""
        self._limits = limits or FramingLimits()
        self._role = role
        self._peer_role = session.role
        self._count = count or (lambda direction, kind, byte_count, message_count: None)
        self._writer = RecordWriter(session.send_key, header)
        self._reader = RecordReader(session.receive_key)
        # Sending.
        hello = PROTOCOL_MINOR.to_bytes(2, "big") + self._limits.window_bytes.to_bytes(_COUNT_BYTES, "big")
        self._ready: deque[bytes] = deque((header + self._writer.seal(Frame.HELLO, hello),))
        self._control: deque[bytes] = deque()
        self._waiting: deque[_Outgoing] = deque()
        self._open_out: deque[_Outgoing] = deque()
        self._queued_bytes = 0
        self._next_out = 0
        self._peer_window_bytes = 0
        self._unacknowledged_bytes = 0
        self._credit_due_bytes = 0
        self._closing = False
        self._closed = False
        # Receiving.
        self._peer_ready = False
        self._parts = bytearray()
        self._open_in: dict[int, _Incoming] = {}
        self._next_in = 0
        self._held_bytes = 0
        self._received_bytes = 0
        self._received_messages = 0

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message. `buffers[i]` is the wire form of `message.tensors[i]`; it is not copied: leave it as it is.

        Does nothing after `close`. Raises `LocalProtocolError` for a message that the peer would refuse.
        """
        if self._closing:
            return
        try:
            check_allowed(type(message), self._role, self._peer_role)
            byte_count = check_tensors(tensors_of(message), self._limits.tensor_bytes_max)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
        encoded = encode(message)
        views = deque(memoryview(buffer).cast("B") for buffer in buffers)
        if [view.nbytes for view in views] != [tensor.byte_count for tensor in tensors_of(message)]:
            raise LocalProtocolError(f"{type(message).__name__}: the buffers are not those of its tensors")
        self._queued_bytes += len(encoded) + byte_count
        if not views:
            self._control.append(encoded)
        elif len(encoded) > HEADER_BYTES_MAX:
            raise LocalProtocolError(f"{type(message).__name__}: {len(encoded)} bytes beside its tensors")
        else:
            self._waiting.append(_Outgoing(encoded, traffic_kind(message), byte_count, views))

    def release(self, byte_count: int) -> None:
        """We are done with that many tensor bytes of delivered messages: the peer may send as many again."""
        self._held_bytes -= byte_count
        assert self._held_bytes >= 0, "more released than delivered"
        self._credit_due_bytes += byte_count

    def rekey(self) -> None:
        """Change the key of our direction with the next record."""
        self._writer.rekey()

    def close(self) -> None:
        """Send the control messages that wait, then the final record; tensors under way are given up."""
        self._closing = True
        self._waiting.clear()
        self._open_out.clear()
        self._queued_bytes = sum(len(encoded) for encoded in self._control)

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages and tensors that wait here to be sent."""
        return self._queued_bytes

    @property
    def close_sent(self) -> bool:
        """Whether the final record was handed out."""
        return self._closed

    def data_to_send(self, budget: int) -> list[bytes]:
        """Records to write now: about `budget` bytes, at most one record more. Empty: nothing to send at present.

        Ask for little at a time: what was handed out can no longer be overtaken by a control message. Raises
        `RemoteProtocolError` when the peer's window can never take a message.
        """
        pieces: list[bytes] = []
        left = budget
        while left > 0:
            if not self._ready and not self._seal_next():
                break
            piece = self._ready.popleft()
            pieces.append(piece)
            left -= len(piece)
        return pieces

    def _seal_next(self) -> bool:
        """Seal the most urgent frame into `_ready`; False when there is none."""
        if self._closed:
            return False
        if self._credit_due_bytes:
            self._seal(Frame.CREDIT, self._credit_due_bytes.to_bytes(_COUNT_BYTES, "big"))
            self._credit_due_bytes = 0
        elif self._control:
            self._seal_message(self._control.popleft())
        elif self._closing:
            self._ready.append(self._writer.seal(Frame.END, b"", final=True))
            self._closed = True
        elif self._waiting and len(self._open_out) < OPEN_BULK_MAX and self._window_allows(self._waiting[0]):
            self._seal_bulk(self._waiting.popleft())
        elif self._open_out:
            self._seal_chunk(self._open_out.popleft())
        else:
            return False
        return True

    def _seal(self, kind: int, plain: bytes) -> None:
        self._ready.append(self._writer.seal(kind, plain))

    def _seal_message(self, encoded: bytes) -> None:
        """All parts at once: they are few, and parts of two messages may not mix."""
        for start in range(0, len(encoded), RECORD_BYTES_MAX):
            part = encoded[start : start + RECORD_BYTES_MAX]
            self._seal(Frame.MESSAGE if start + len(part) == len(encoded) else Frame.PART, part)
        self._queued_bytes -= len(encoded)
        self._count("tx", "control", len(encoded), 1)

    def _window_allows(self, outgoing: _Outgoing) -> bool:
        if not self._peer_ready:
            return False
        if outgoing.byte_count > self._peer_window_bytes:
            detail = f"a window of {self._peer_window_bytes} bytes, where one message needs {outgoing.byte_count}"
            raise RemoteProtocolError("size", detail)
        return self._unacknowledged_bytes + outgoing.byte_count <= self._peer_window_bytes

    def _seal_bulk(self, outgoing: _Outgoing) -> None:
        outgoing.number = self._next_out
        self._next_out = (self._next_out + 1) % 2**32
        self._unacknowledged_bytes += outgoing.byte_count
        self._seal(Frame.BULK, outgoing.number.to_bytes(_NUMBER_BYTES, "big") + outgoing.header)
        self._queued_bytes -= len(outgoing.header)
        self._open_out.append(outgoing)

    def _seal_chunk(self, outgoing: _Outgoing) -> None:
        buffer = outgoing.buffers[0]
        chunk = buffer[outgoing.offset : outgoing.offset + _CHUNK_BYTES]
        self._seal(Frame.CHUNK, outgoing.number.to_bytes(_NUMBER_BYTES, "big") + chunk)
        self._queued_bytes -= len(chunk)
        outgoing.offset += len(chunk)
        if outgoing.offset == len(buffer):
            outgoing.buffers.popleft()
            outgoing.offset = 0
        if outgoing.buffers:
            self._open_out.append(outgoing)
        else:
            self._count("tx", outgoing.kind, len(outgoing.header) + outgoing.byte_count, 1)

    # ---- receiving ----------------------------------------------------------------------------------------------

    def receive(self, data: Buffer) -> list[Event]:
        """Feed bytes of the stream; what they complete. Raises `RemoteProtocolError`: the link is dead after that."""
        self._received_bytes += len(data)
        events: list[Event] = []
        for kind, plain in self._reader.feed(data):
            event = self._take_frame(kind, plain)
            if event is not None:
                events.append(event)
                self._received_messages += 1
        return events

    @property
    def progress(self) -> Progress:
        """How far receiving has come."""
        receiving = bool(self._reader.mid_record or self._parts or self._open_in or not self._peer_ready)
        return Progress(receiving, self._received_messages, self._received_bytes)

    def _take_frame(self, kind: int, plain: bytes) -> Event | None:
        if self._peer_ready == (kind == Frame.HELLO):
            raise RemoteProtocolError("decode", f"frame {kind} at a place where it cannot be")
        if self._parts and kind not in (Frame.PART, Frame.MESSAGE):
            raise RemoteProtocolError("decode", f"frame {kind} between the parts of a message")
        if self._reader.finished != (kind == Frame.END):
            raise RemoteProtocolError("decode", "the final record and only that one is END")
        match kind:
            case Frame.HELLO:
                return self._take_hello(plain)
            case Frame.MESSAGE | Frame.PART:
                return self._take_message(plain, last=kind == Frame.MESSAGE)
            case Frame.BULK:
                self._take_bulk(plain)
            case Frame.CHUNK:
                return self._take_chunk(plain)
            case Frame.CREDIT:
                self._take_credit(plain)
            case Frame.END:
                if plain:
                    raise RemoteProtocolError("size", "an END that is not empty")
                return PeerClosed()
            case _:
                raise RemoteProtocolError("decode", f"frame of the unknown kind {kind}")
        return None

    def _take_hello(self, plain: bytes) -> PeerReady:
        if len(plain) != 2 + _COUNT_BYTES:
            raise RemoteProtocolError("size", f"a HELLO of {len(plain)} bytes")
        window_bytes = int.from_bytes(plain[2:], "big")
        if window_bytes > _WINDOW_BYTES_MAX:
            raise RemoteProtocolError("size", f"a window of {window_bytes} bytes")
        self._peer_window_bytes = window_bytes
        self._peer_ready = True
        return PeerReady(int.from_bytes(plain[:2], "big"))

    def _take_message(self, plain: bytes, *, last: bool) -> MessageArrived | None:
        if len(self._parts) + len(plain) > MESSAGE_BYTES_MAX:
            raise RemoteProtocolError("size", "a message longer than the bound")
        if not last:
            if len(plain) != RECORD_BYTES_MAX:
                raise RemoteProtocolError("size", "a part that does not fill its record")
            self._parts += plain
            return None
        encoded = bytes(self._parts) + plain if self._parts else plain
        self._parts.clear()
        message = self._decode(encoded)
        if tensors_of(message):
            raise RemoteProtocolError("decode", f"{type(message).__name__} with tensors, without their bytes")
        self._count("rx", "control", len(encoded), 1)
        return MessageArrived(message, (), 0)

    def _decode(self, encoded: bytes) -> Message:
        message = decode(encoded)
        check_allowed(type(message), self._peer_role, self._role)
        return message

    def _take_bulk(self, plain: bytes) -> None:
        if len(plain) < _NUMBER_BYTES or len(plain) > HEADER_BYTES_MAX + _NUMBER_BYTES:
            raise RemoteProtocolError("size", f"a BULK of {len(plain)} bytes")
        number = int.from_bytes(plain[:_NUMBER_BYTES], "big")
        if number != self._next_in:
            raise RemoteProtocolError("replay", f"BULK {number} where {self._next_in} is due")
        self._next_in = (number + 1) % 2**32
        if len(self._open_in) >= OPEN_BULK_MAX:
            raise RemoteProtocolError("size", f"more than {OPEN_BULK_MAX} messages with tensors under way")
        encoded = plain[_NUMBER_BYTES:]
        message = self._decode(encoded)
        tensors = tensors_of(message)
        if not tensors:
            raise RemoteProtocolError("decode", f"BULK {type(message).__name__} without tensors")
        byte_count = check_tensors(tensors, self._limits.tensor_bytes_max)
        if self._held_bytes + byte_count > self._limits.window_bytes:
            raise RemoteProtocolError("size", f"{byte_count} tensor bytes beyond the window")
        self._held_bytes += byte_count
        self._open_in[number] = _Incoming(message, len(encoded), byte_count, deque(tensors))

    def _take_chunk(self, plain: bytes) -> MessageArrived | None:
        number = int.from_bytes(plain[:_NUMBER_BYTES], "big")
        incoming = self._open_in.get(number)
        if len(plain) <= _NUMBER_BYTES or incoming is None:
            raise RemoteProtocolError("decode", f"an empty chunk, or one of no open message ({number})")
        tensor, chunk = incoming.wanted[0], memoryview(plain)[_NUMBER_BYTES:]
        if not incoming.offset:
            # Memory that is neither zeroed at once (a long hold of the loop) nor grown and copied (1.4 s/GB).
            incoming.buffers.append(np.empty(tensor.byte_count, np.uint8).data)
        end = incoming.offset + len(chunk)
        if end > tensor.byte_count or (end < tensor.byte_count and len(plain) != RECORD_BYTES_MAX):
            raise RemoteProtocolError("size", "a chunk that neither fills its record nor ends its tensor")
        incoming.buffers[-1][incoming.offset : end] = chunk
        incoming.offset = end
        if end < tensor.byte_count:
            return None
        incoming.wanted.popleft()
        incoming.offset = 0
        if incoming.wanted:
            return None
        del self._open_in[number]
        self._count("rx", traffic_kind(incoming.message), incoming.header_bytes + incoming.byte_count, 1)
        return MessageArrived(incoming.message, tuple(incoming.buffers), incoming.byte_count)

    def _take_credit(self, plain: bytes) -> None:
        if len(plain) != _COUNT_BYTES:
            raise RemoteProtocolError("size", f"a CREDIT of {len(plain)} bytes")
        byte_count = int.from_bytes(plain, "big")
        if not 0 < byte_count <= self._unacknowledged_bytes:
            raise RemoteProtocolError("size", f"credit of {byte_count} bytes for what was not sent")
        self._unacknowledged_bytes -= byte_count
