"""The receiving half of a link: frames become messages with their tensors, each checked before it costs anything."""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TensorRef
from protocol.base.limits import HEADER_BYTES_MAX, MESSAGE_BYTES_MAX, OPEN_BULK_MAX, RECORD_BYTES_MAX
from protocol.link.budget import Account, Budget
from protocol.link.codec import check_allowed, check_tensors, decode, tensors_of, traffic_kind
from protocol.link.frames import NUMBER_BYTES, CountBytes, Frame, FramingLimits, MessageArrived
from protocol.messages import Message

LARGE_BYTES = 4 << 20
"""From here on numpy asks the kernel for huge pages. One takes up to 6 ms of our loop's time at its first byte where
the kernel has to make it first (`transparent_hugepage/defrag` is `madvise` on most machines), and a read may touch
two; pages of 4 KiB take 0.1 ms in each read."""


def _fresh(byte_count: int) -> memoryview:
    """Memory that is neither zeroed at once (a long hold of the loop) nor grown and copied (1.4 s/GB)."""
    if byte_count < LARGE_BYTES:
        return np.empty(byte_count, np.uint8).data
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where such memory is the process's own anyway
        return memoryview(mmap.mmap(-1, byte_count))
    return memoryview(mmap.mmap(-1, byte_count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@dataclass(slots=True)
class _Bulk:
    """A message with tensors on its way in."""

    message: Message
    header_bytes: int
    byte_count: int
    wanted: deque[TensorRef]
    """Tensors that are not complete; the last buffer, if any, belongs to the first of them once a chunk came."""
    buffers: list[memoryview] = field(default_factory=list)
    offset: int = 0
    """Bytes of the last buffer that are there."""
    began_s: float = 0.0


class Incoming:
    """Messages and tensors of one peer that have begun to come."""

    def __init__(
        self, role: str, peer_role: str, limits: FramingLimits, count: CountBytes, account: Account | None = None
    ) -> None:
        self._role = role
        self._peer_role = peer_role
        self._limits = limits
        self._count = count
        self._parts = bytearray()
        self._open: dict[int, _Bulk] = {}
        self._next_number = 0
        self._held_bytes = 0
        self.now = 0.0
        self._account = account or Budget(limits.window_bytes).open(stranger=True)

    @property
    def begun(self) -> bool:
        """Whether something has begun that the peer must go on bringing."""
        return bool(self._parts or self._open)

    @property
    def begun_bytes(self) -> int:
        """Of tensors that have begun to come, whole."""
        return sum(bulk.byte_count for bulk in self._open.values())

    def release(self, byte_count: int) -> None:
        """So many bytes of delivered tensors no longer count against the window."""
        self._held_bytes -= byte_count
        assert self._held_bytes >= 0, "more released than delivered"
        if not self._account.closed:  # the link had to give way
            self._account.release(byte_count)

    def take(self, kind: int, plain: bytes) -> MessageArrived | None:
        """One numbered frame other than CREDIT. Raises `RemoteProtocolError`."""
        match kind:
            case Frame.MESSAGE | Frame.PART:
                return self._take_message(plain, last=kind == Frame.MESSAGE)
            case Frame.BULK:
                self._take_bulk(plain)
                return None
            case Frame.CHUNK:
                return self._take_chunk(plain)
        raise RemoteProtocolError("decode", f"frame of the unknown kind {kind}")

    @property
    def mid_message(self) -> bool:
        """Whether parts of a message have come and not its last one."""
        return bool(self._parts)

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
        if len(plain) < NUMBER_BYTES or len(plain) > HEADER_BYTES_MAX + NUMBER_BYTES:
            raise RemoteProtocolError("size", f"a BULK of {len(plain)} bytes")
        number = int.from_bytes(plain[:NUMBER_BYTES], "big")
        if number != self._next_number:
            raise RemoteProtocolError("replay", f"BULK {number} where {self._next_number} is due")
        self._next_number = (number + 1) % 2**32
        if len(self._open) >= OPEN_BULK_MAX:
            raise RemoteProtocolError("size", f"more than {OPEN_BULK_MAX} messages with tensors under way")
        encoded = plain[NUMBER_BYTES:]
        message = self._decode(encoded)
        tensors = tensors_of(message)
        if not tensors:
            raise RemoteProtocolError("decode", f"BULK {type(message).__name__} without tensors")
        byte_count = check_tensors(tensors, self._limits.tensor_bytes_max, self._limits.elements_max)
        if self._held_bytes + byte_count > self._limits.window_bytes:
            raise RemoteProtocolError("size", f"{byte_count} tensor bytes beyond the window")
        self._account.reserve(byte_count)
        self._held_bytes += byte_count
        self._open[number] = _Bulk(message, len(encoded), byte_count, deque(tensors), began_s=self.now)

    def _take_chunk(self, plain: bytes) -> MessageArrived | None:
        number = int.from_bytes(plain[:NUMBER_BYTES], "big")
        incoming = self._open.get(number)
        if len(plain) <= NUMBER_BYTES or incoming is None:
            raise RemoteProtocolError("decode", f"an empty chunk, or one of no open message ({number})")
        tensor, chunk = incoming.wanted[0], memoryview(plain)[NUMBER_BYTES:]
        if not incoming.offset:
            incoming.buffers.append(_fresh(tensor.byte_count))
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
        del self._open[number]
        self._count("rx", traffic_kind(incoming.message), incoming.header_bytes + incoming.byte_count, 1)
        return MessageArrived(incoming.message, tuple(incoming.buffers), incoming.byte_count, incoming.began_s)
