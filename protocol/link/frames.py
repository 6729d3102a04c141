"""What a link's frames are, what they bring, and the bounds of a run; `protocol.link.framing` says how they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from protocol.base.errors import RemoteProtocolError
from protocol.base.limits import ELEMENTS_MAX, RECORD_BYTES_MAX, TENSOR_BYTES_MAX, WINDOW_BYTES
from protocol.messages import Message

Buffer = bytes | bytearray | memoryview
CountBytes = Callable[[str, str, int, int], None]
"""(direction, kind, bytes, messages): payload that was handed out or delivered."""

NUMBER_BYTES = 4
COUNT_BYTES = 8
TOKEN_BYTES = 16
CHUNK_BYTES = RECORD_BYTES_MAX - NUMBER_BYTES
WINDOW_BYTES_MAX = 1 << 40
NO_LINK = bytes(TOKEN_BYTES)
"""As `Hello.resume`: a new link."""


class Frame(IntEnum):
    """The kinds of frames; `protocol.link.framing` says what each holds."""

    HELLO = 1
    MESSAGE = 2
    PART = 3
    BULK = 4
    CHUNK = 5
    CREDIT = 6
    END = 7
    PING = 8
    PONG = 9
    ACK = 10


OF_THE_PATH = frozenset({Frame.HELLO, Frame.END, Frame.PING, Frame.PONG, Frame.ACK})
"""Frames that belong to one path; all others are numbered, and come again on the next path if they were lost."""


@dataclass(frozen=True, slots=True)
class OutFrame:
    """A frame to send; `body` may be a part of a caller's buffer."""

    kind: Frame
    head: bytes
    body: Buffer = b""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of each direction of a path."""

    minor: int
    window_bytes: int
    token: bytes = b""
    """The sender's random part of the name of a new link (16 bytes); empty: it keeps nothing for another path."""
    resume: bytes = NO_LINK
    """The link that goes on here; the responder repeats it when it agrees."""
    epoch: int = 0
    """Paths that the sender has left so far."""
    attempt: int = 0
    """Counts the initiator's attempts to change the path; the responder repeats it."""
    received: int = 0
    """Numbered frames that the sender of this has received on the link so far."""

    def encode(self) -> bytes:
        short = self.minor.to_bytes(2, "big") + self.window_bytes.to_bytes(COUNT_BYTES, "big")
        if not self.token:
            return short
        numbers = self.epoch.to_bytes(4, "big") + self.attempt.to_bytes(4, "big") + self.received.to_bytes(8, "big")
        return short + self.token + self.resume + numbers

    @classmethod
    def decode(cls, plain: bytes) -> Hello:
        """Raises `RemoteProtocolError`."""
        if len(plain) not in (10, 58):
            raise RemoteProtocolError("size", f"a HELLO of {len(plain)} bytes")
        minor, window_bytes = int.from_bytes(plain[:2], "big"), int.from_bytes(plain[2:10], "big")
        if window_bytes > WINDOW_BYTES_MAX:
            raise RemoteProtocolError("size", f"a window of {window_bytes} bytes")
        if len(plain) == 10:
            return cls(minor, window_bytes)
        epoch, attempt = int.from_bytes(plain[42:46], "big"), int.from_bytes(plain[46:50], "big")
        return cls(minor, window_bytes, plain[10:26], plain[26:42], epoch, attempt, int.from_bytes(plain[50:], "big"))


@dataclass(frozen=True, slots=True)
class FramingLimits:
    """Bounds that the run decides."""

    tensor_bytes_max: int = TENSOR_BYTES_MAX
    """The largest tensor that can honestly occur."""
    window_bytes: int = WINDOW_BYTES
    """Tensor bytes of one peer under way or undigested; at least the largest message."""
    elements_max: int = ELEMENTS_MAX
    """Values of the largest tensor that can honestly occur; its bytes do not bound them in every form."""


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The peer's first frame: it finished the handshake, and accepted us."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class PongArrived:
    """The answer to our PING of this number."""

    number: int


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message with all its tensors: `buffers[i]` holds the wire form of `message.tensors[i]` (whose key is i)."""

    message: Message
    buffers: tuple[memoryview, ...]
    """Writable, of bytes, and the receiver's own."""
    byte_count: int
    """Bytes to give back with `release` when the receiver is done with the message (0 without tensors)."""
    began_s: float = 0.0
    """When its first frame came, by `Framing.now`."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A message with tensors has left: when it was queued, and when its first frame was handed out."""

    message: Message
    byte_count: int
    queued_s: float
    began_s: float


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


Event = PeerReady | MessageArrived | PeerClosed | PongArrived
