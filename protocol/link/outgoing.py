"""The sending half of a link: messages wait here, and leave as frames, the most urgent one first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.limits import HEADER_BYTES_MAX, OPEN_BULK_MAX, RECORD_BYTES_MAX
from protocol.link.codec import check_allowed, check_tensors, encode, is_long, tensors_of, traffic_kind
from protocol.link.frames import (
    CHUNK_BYTES,
    COUNT_BYTES,
    NUMBER_BYTES,
    Buffer,
    CountBytes,
    Departed,
    Frame,
    FramingLimits,
    OutFrame,
)
from protocol.link.line import TRICKLE_S, Line, Waiting, goes_after, result_step
from protocol.messages import Message

DEPARTED_MAX = 1024
"""Kept for whoever wants to know of them: what leaves in one write, 128 KiB of the smallest there are."""


@dataclass(slots=True)
class _Bulk:
    """A message with tensors on its way out."""

    message: Message
    header: bytes
    kind: str
    is_long: bool
    byte_count: int
    buffers: deque[memoryview]
    queued_s: float
    step: int = -1
    """Of a result on a volunteer's line, as the next one."""
    after: int = -1
    number: int = 0
    offset: int = 0
    began_s: float = 0.0


class Outgoing:
    """Control messages first, then tensors, within the peer's window: activations and the like one after the other,
    long messages (whole shards) one after the other, and chunks of the two in turns. On a volunteer's `line` results
    of older steps go first, and a sum of weight gradients waits until those of its step have left.

    Turns among all of them would bring everything at its end: of sixteen activations on a home line the first one would
    arrive with the last, after half a minute, and the next stage would have stood still for as long.
    """

    def __init__(self, role: str, peer_role: str, limits: FramingLimits, count: CountBytes, line: Line | None) -> None:
        self._results = None if line is None else Waiting(line)
        self._role = role
        self._peer_role = peer_role
        self._limits = limits
        self._count = count
        # Queues of a link are lists: each is short most of the time (the front of one of a thousand goes in 0.1 us, of
        # ten thousand in 1.4), and an empty deque holds 760 bytes: 7 MB for what a coordinator of 1,000 members has.
        self._parts: list[OutFrame] = []
        """The rest of a message that has begun: parts of two messages may not mix."""
        self._control: list[bytes] = []
        self._waiting: list[_Bulk] = []
        self._open: tuple[list[_Bulk], list[_Bulk]] = [], []
        """Under way: short messages, long ones."""
        self._long_is_next = False
        self._chunk_at = 0.0
        """When a part of a tensor left last, or a tensor began."""
        self.queued_bytes = 0
        """Bytes of messages and tensors that wait here to be sent."""
        self.closing = False
        self.now = 0.0
        self.departed: list[Departed] = []
        """The last DEPARTED_MAX messages with tensors that are through, until somebody takes them."""
        self._next_number = 0
        self._window_bytes: int | None = None
        self._undigested_bytes = 0
        self._credit_due_bytes = 0

    def open_window(self, window_bytes: int) -> None:
        """What the peer takes in; before this, no tensor leaves."""
        self._window_bytes = window_bytes

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message. `buffers[i]` is the wire form of `message.tensors[i]`; it is not copied: leave it as it is.

        Does nothing after `close`. Raises `LocalProtocolError` for a message that the peer would refuse.
        """
        if self.closing:
            return
        try:
            check_allowed(type(message), self._role, self._peer_role)
            limits = self._limits
            byte_count = check_tensors(tensors_of(message), limits.tensor_bytes_max, limits.elements_max)
        except RemoteProtocolError as error:
            raise LocalProtocolError(f"{type(message).__name__} cannot be sent: {error}") from error
        encoded = encode(message)
        views = deque(memoryview(buffer).cast("B") for buffer in buffers)
        if [view.nbytes for view in views] != [tensor.byte_count for tensor in tensors_of(message)]:
            raise LocalProtocolError(f"{type(message).__name__}: the buffers are not those of its tensors")
        self.queued_bytes += len(encoded) + byte_count
        if not views:
            self._control.append(encoded)
        elif len(encoded) > HEADER_BYTES_MAX:
            raise LocalProtocolError(f"{type(message).__name__}: {len(encoded)} bytes beside its tensors")
        else:
            bulk = _Bulk(message, encoded, traffic_kind(message), is_long(message), byte_count, views, self.now)
            if self._results is not None:
                bulk.step, bulk.after = result_step(message), goes_after(message)
                if bulk.step >= 0:
                    self._results.add(bulk.step, self.now)
            _put(bulk, self._waiting)

    def give_back(self, byte_count: int) -> None:
        """Tell the peer that it may send so many tensor bytes more."""
        self._credit_due_bytes += byte_count

    def take_credit(self, plain: bytes) -> None:
        """The peer's CREDIT. Raises `RemoteProtocolError`."""
        if len(plain) != COUNT_BYTES:
            raise RemoteProtocolError("size", f"a CREDIT of {len(plain)} bytes")
        byte_count = int.from_bytes(plain, "big")
        if not 0 < byte_count <= self._undigested_bytes:
            raise RemoteProtocolError("size", f"credit of {byte_count} bytes for what was not sent")
        self._undigested_bytes -= byte_count

    def close(self) -> None:
        """Nothing new is taken; control messages that wait still leave, tensors under way are given up."""
        self.closing = True
        self._waiting.clear()
        for under_way in self._open:
            under_way.clear()
        self.queued_bytes = sum(len(encoded) for encoded in self._control)
        if self._results is not None:
            self._results.clear()

    def next_frame(self) -> OutFrame | None:
        """The most urgent frame; each is given once. None: there is nothing that may leave now.

        Raises `RemoteProtocolError` when the peer's window can never take a message.
        """
        if self._parts:
            return self._parts.pop(0)
        if self._credit_due_bytes:
            credit = OutFrame(Frame.CREDIT, self._credit_due_bytes.to_bytes(COUNT_BYTES, "big"))
            self._credit_due_bytes = 0
            return credit
        if self._control:
            return self._message(self._control.pop(0))
        if self._waiting and sum(map(len, self._open)) < OPEN_BULK_MAX and self._window_allows(self._waiting[0]):
            return self._header(self._waiting.pop(0))
        short, long = (each if self._may_go(each) else [] for each in self._open)
        under_way = (long or short) if self._long_is_next else (short or long)
        if under_way:
            self._long_is_next = not under_way[0].is_long
            return self._chunk(under_way)
        return None

    def _may_go(self, under_way: list[_Bulk]) -> bool:
        """Whether the line lets the first of these go."""
        if not under_way or self._results is None or (after := under_way[0].after) < 0:
            return True
        if self.now - self._chunk_at >= TRICKLE_S:
            return True
        if any(0 <= other.step <= after for other in self._open[0]):
            return False
        return self._results.others_let(after, self.now)

    def _message(self, encoded: bytes) -> OutFrame:
        parts = [encoded[start : start + RECORD_BYTES_MAX] for start in range(0, len(encoded), RECORD_BYTES_MAX)]
        self._parts += [OutFrame(Frame.PART, part) for part in parts[:-1]] + [OutFrame(Frame.MESSAGE, parts[-1])]
        self.queued_bytes -= len(encoded)
        self._count("tx", "control", len(encoded), 1)
        return self._parts.pop(0)

    def _window_allows(self, bulk: _Bulk) -> bool:
        if self._window_bytes is None:
            return False
        if bulk.byte_count > self._window_bytes:
            detail = f"a window of {self._window_bytes} bytes, where one message needs {bulk.byte_count}"
            raise RemoteProtocolError("size", detail)
        return self._undigested_bytes + bulk.byte_count <= self._window_bytes

    def _header(self, bulk: _Bulk) -> OutFrame:
        bulk.number, bulk.began_s = self._next_number, self.now
        self._next_number = (self._next_number + 1) % 2**32
        self._chunk_at = self.now
        self._undigested_bytes += bulk.byte_count
        self.queued_bytes -= len(bulk.header)
        _put(bulk, self._open[bulk.is_long])
        self._moves(bulk)
        return OutFrame(Frame.BULK, bulk.number.to_bytes(NUMBER_BYTES, "big"), bulk.header)

    def _chunk(self, under_way: list[_Bulk]) -> OutFrame:
        bulk = under_way[0]
        self._chunk_at = self.now
        buffer = bulk.buffers[0]
        chunk = buffer[bulk.offset : bulk.offset + CHUNK_BYTES]
        self.queued_bytes -= len(chunk)
        bulk.offset += len(chunk)
        if bulk.offset == len(buffer):
            bulk.buffers.popleft()
            bulk.offset = 0
        self._moves(bulk)
        if not bulk.buffers:
            under_way.pop(0)
            if self._results is not None and bulk.step >= 0:
                self._results.through(bulk.step)
            self._count("tx", bulk.kind, len(bulk.header) + bulk.byte_count, 1)
            del self.departed[: -DEPARTED_MAX + 1]
            self.departed.append(Departed(bulk.message, bulk.byte_count, bulk.queued_s, bulk.began_s))
        return OutFrame(Frame.CHUNK, bulk.number.to_bytes(NUMBER_BYTES, "big"), chunk)

    def _moves(self, bulk: _Bulk) -> None:
        if self._results is not None and bulk.step >= 0:
            self._results.moved_at = self.now


def _put(bulk: _Bulk, queue: list[_Bulk]) -> None:
    """A result before all at the end that go after it; what is no result, at the end."""
    place = len(queue)
    while place > 0 and 0 <= bulk.step <= queue[place - 1].after:
        place -= 1
    queue.insert(place, bulk)
