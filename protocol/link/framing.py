"""Messages and tensors as frames; control never waits behind bulk, and a link may change its way without losing any.

A frame is one record; the record's kind says what it holds (integers big endian):

    HELLO   minor version (2 bytes), window (8), then, for a link that may change its way: token (16), link to resume
            (16), epoch (4), attempt (4), numbered frames received (8); the first frame of each direction of a path
    MESSAGE an encoded message without tensors, or its last part
    PART    a part of such a message, when it is longer than a record
    BULK    number (4), an encoded message that has tensors
    CHUNK   number (4), the next bytes of that message's tensors; a chunk never holds bytes of two tensors
    CREDIT  byte count (8) that the receiver is done with
    END     nothing; the record is the stream's final one
    PING    number (8): the peer answers with the same number at once
    PONG    number (8); only as an answer, one to a question
    ACK     numbered frames received (8); always more than the last one, and the HELLO, said

Control messages leave before anything that waits, in their order. Up to OPEN_BULK_MAX messages with tensors are under
way at once; whole shards take turns with everything else, chunk by chunk, so an activation overtakes a contribution,
and of each of the two the oldest goes first (a volunteer's links have `line.py` beside that). The receiver announces a
window; a sender opens a message with tensors only while the bytes of all its open and undigested ones fit, and the
receiver gives bytes back when it is done with the message. So what a peer can make us hold is bounded by the window,
and nothing is allocated before header, role, shapes and window have been checked.

MESSAGE, PART, BULK, CHUNK and CREDIT are numbered from 0, by counting, in each direction of the link. The sender keeps
them until an ACK covers them (chunks are not copied: they are parts of the caller's buffers). When the link moves to
another path, each HELLO says how many its sender has received; the other continues there, so every frame counts once,
in its order, and a tensor that was half over goes on in its middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.base.errors import RemoteProtocolError
from protocol.base.limits import (
    ACK_BYTES,
    ACK_FRAMES,
    KEPT_BYTES_MAX,
    KEPT_FRAMES_MAX,
    QUESTIONS_BURST,
    QUESTIONS_PER_S,
)
from protocol.link.budget import Account
from protocol.link.codec import PROTOCOL_MINOR
from protocol.link.frames import (
    COUNT_BYTES,
    OF_THE_PATH,
    Buffer,
    CountBytes,
    Departed,
    Event,
    Frame,
    FramingLimits,
    Hello,
    MessageArrived,
    OutFrame,
    PeerClosed,
    PeerReady,
    PongArrived,
)
from protocol.link.incoming import Incoming
from protocol.link.line import Line
from protocol.link.outgoing import Outgoing
from protocol.link.paths import Path, take_hello
from protocol.messages import Message
from protocol.trust.handshake import Session

__all__ = [
    "Buffer",
    "CountBytes",
    "Event",
    "Frame",
    "Framing",
    "FramingLimits",
    "Hello",
    "MessageArrived",
    "PeerClosed",
    "PeerReady",
    "PongArrived",
    "Progress",
]


@dataclass(frozen=True, slots=True)
class Progress:
    """Two of these, some time apart, show whether a peer brings what it began."""

    receiving: bool
    """It has begun something that it must go on bringing: a record, a message, or tensors."""
    messages: int
    """Messages completed so far."""
    byte_count: int
    """Bytes received so far."""
    kept: int
    """The oldest frame that the peer has not acknowledged."""
    withholding: bool
    """It acknowledges so little that nothing more may be sent."""


class Framing:
    """One link's frames, both ways, over one path after the other. Sans-I/O: no clock, no socket, no randomness."""

    def __init__(
        self,
        session: Session,
        *,
        role: str,
        header: bytes = b"",
        path: Path | None = None,
        token: bytes = b"",
        limits: FramingLimits | None = None,
        count: CountBytes | None = None,
        account: Account | None = None,
        line: Line | None = None,
    ) -> None:
        """`role` is our own. Either `header` (24 random bytes for the sending stream), and the link says HELLO itself,
        or a `path` on which our HELLO was said. `token`: what that HELLO says; without one nothing is kept for another
        path. `account`: what is received counts against it. `line`: what a volunteer's links share.
        """
        self._limits = limits or FramingLimits()
        count = count or (lambda direction, kind, byte_count, message_count: None)
        self._out = Outgoing(role, session.role, self._limits, count, line)
        self._in = Incoming(role, session.role, self._limits, count, account)
        self._token = token
        self._path = path or Path(session, header)
        self._urgent: list[bytes] = []
        if path is None:
            self._urgent.append(self._path.hello(self.hello()))
        self._peer_ready = False
        self._ended = False
        self._keeping = bool(token)
        self._holding = False
        # What was sent and is not acknowledged: numbers _kept_first … of this list, in order.
        self._kept: list[OutFrame] = []
        self._kept_first = 0
        self._kept_bytes = 0
        self._confirmed = 0
        """Frames that the peer has said it received."""
        self._asked = 0
        """Our questions on the present path that may still be answered."""
        self._may_ask = QUESTIONS_BURST
        """Questions that the peer may ask at once, by `_may_ask_at`."""
        self._may_ask_at = 0.0
        # What was received.
        self._received = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0
        self._received_bytes = 0
        self._received_messages = 0

    # ---- the link -----------------------------------------------------------------------------------------------

    def hello(self, *, resume: bytes = b"", epoch: int = 0, attempt: int = 0, token: bytes = b"") -> Hello:
        """Our first frame of a path: for a new link, or to `resume` this one there."""
        window_bytes = self._limits.window_bytes
        if not resume:
            return Hello(PROTOCOL_MINOR, window_bytes, self._token)
        return Hello(PROTOCOL_MINOR, window_bytes, token or self._token, resume, epoch, attempt, self._received)

    def greet(self, hello: Hello) -> None:
        """The peer's first frame on the first path, when somebody else has read it."""
        self._peer_ready = True
        self._keeping = bool(self._token and hello.token)
        self._out.open_window(hello.window_bytes)

    @property
    def resumable(self) -> bool:
        """Whether both sides keep what they would need on another path."""
        return self._keeping and not self._out.closing

    def check_resume(self, hello: Hello) -> None:
        """Raises `RemoteProtocolError` when the peer claims to have received what it was not sent or has confirmed."""
        if not self._confirmed <= hello.received <= self._kept_first + len(self._kept):
            detail = f"{hello.received} frames received, of {self._kept_first} to {self._kept_first + len(self._kept)}"
            raise RemoteProtocolError("size", detail)

    @property
    def keeping(self) -> bool:
        """Whether both sides number and keep frames, and answer questions."""
        return self._keeping and self._peer_ready

    def hold_acknowledgements(self, hold: bool) -> None:
        """While a HELLO of ours says how many frames came, nothing must say more: the peer has to keep what follows."""
        self._holding = hold

    def move(self, path: Path, hello: Hello, our_received: int, say: Hello | None = None) -> None:
        """Go on over `path`, where the peer said `hello` and we have said, or `say`, that `our_received` frames came.

        Raises `RemoteProtocolError`: then nothing has changed.
        """
        self.check_resume(hello)
        self._path = path
        self._urgent.clear()
        self._asked = 0
        if say is not None:
            self._urgent.append(path.hello(say))
        self._confirmed = max(self._confirmed, hello.received)
        self._forget(hello.received)
        path.next_out = hello.received
        path.next_in = our_received
        self._acknowledged = max(self._acknowledged, our_received)

    def tell_time(self, now: float) -> None:
        """What time it is by the owner's clock: messages that come and go are stamped with it. None is read here."""
        self._in.now = self._out.now = now

    def departed(self) -> list[Departed]:
        """Messages with tensors that were handed out to their last frame since the last call."""
        gone, self._out.departed = self._out.departed, []
        return gone

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message. `buffers[i]` is the wire form of `message.tensors[i]`; it is not copied: leave it as it is.

        Does nothing after `close`. Raises `LocalProtocolError` for a message that the peer would refuse.
        """
        self._out.send(message, buffers)

    def release(self, byte_count: int) -> None:
        """We are done with that many tensor bytes of delivered messages: the peer may send as many again."""
        self._in.release(byte_count)
        self._out.give_back(byte_count)

    def ping(self, number: int) -> None:
        """Ask the peer for a PONG of this number; with it goes what we have received. Only for a resumable link.

        Does nothing once the final record was handed out: nothing comes after it.
        """
        if self._ended:
            return
        self._urgent.append(self._path.seal(OutFrame(Frame.PING, number.to_bytes(COUNT_BYTES, "big"))))
        self._asked += 1
        self._say_received()

    def rekey(self) -> None:
        """Change the key of our direction with the next record."""
        self._path.rekey()

    def close(self) -> None:
        """Send the control messages that wait, then the final record; tensors under way are given up."""
        self._out.close()

    @property
    def queued_bytes(self) -> int:
        """Bytes of messages and tensors that wait here to be sent."""
        return self._out.queued_bytes

    @property
    def under_way_bytes(self) -> int:
        """Bytes that would have to be sent again over another link: here, kept for the peer, and begun by it."""
        return self._out.queued_bytes + self._kept_bytes + self._in.begun_bytes

    @property
    def close_sent(self) -> bool:
        """Whether the final record was handed out."""
        return self._ended

    def data_to_send(self, budget: int) -> list[bytes]:
        """Records to write now: about `budget` bytes, at most one record more. Empty: nothing to send at present.

        Ask for little at a time: what was handed out can no longer be overtaken by a control message. Raises
        `RemoteProtocolError` when the peer's window can never take a message.
        """
        pieces: list[bytes] = []
        left = budget
        while left > 0:
            piece = self._next_record()
            if piece is None:
                break
            pieces.append(piece)
            left -= len(piece)
        return pieces

    def _next_record(self) -> bytes | None:
        if self._urgent:
            return self._urgent.pop(0)
        if self._ended:
            return None
        path, kept_end = self._path, self._kept_first + len(self._kept)
        if path.next_out < kept_end:  # what the peer has not received on the path before
            frame = self._kept[path.next_out - self._kept_first]
            path.next_out += 1
            self._forget(min(self._confirmed, path.next_out))
            return path.seal(frame)
        if self._full:
            return None
        new = self._out.next_frame()
        if new is None:
            if not self._out.closing:
                return None
            self._ended = True
            return path.seal(OutFrame(Frame.END, b""), final=True)
        if self._keeping:
            self._kept.append(new)
            self._kept_bytes += len(new.head) + len(new.body)
        else:
            self._kept_first += 1
        path.next_out += 1
        return path.seal(new)

    @property
    def _full(self) -> bool:
        return self._kept_bytes >= KEPT_BYTES_MAX or len(self._kept) >= KEPT_FRAMES_MAX

    def _say_received(self) -> None:
        if self._received > self._acknowledged and not self._holding and not self._ended:
            self._urgent.append(self._path.seal(OutFrame(Frame.ACK, self._received.to_bytes(COUNT_BYTES, "big"))))
            self._acknowledged = self._received
            self._unacknowledged_bytes = 0

    # ---- receiving ----------------------------------------------------------------------------------------------

    def receive(self, data: Buffer) -> list[Event]:
        """Feed bytes of the stream; what they complete. Raises `RemoteProtocolError`: the link is dead after that."""
        self._received_bytes += len(data)
        return self.take(self._path.feed(data))

    def take(self, frames: Iterable[tuple[int, bytes]]) -> list[Event]:
        """As `receive`, for frames of the present path that somebody else has read from it."""
        events: list[Event] = []
        for kind, plain in frames:
            event = self._take_frame(kind, plain)
            if event is not None:
                events.append(event)
                self._received_messages += isinstance(event, MessageArrived)
        behind = self._received - self._acknowledged
        if self._keeping and (behind >= ACK_FRAMES or self._unacknowledged_bytes >= ACK_BYTES):
            self._say_received()
        return events

    @property
    def missing_bytes(self) -> int:
        """How many bytes must still come before `receive` can do anything with them; whoever waits may wait for all."""
        return self._path.missing_bytes

    @property
    def progress(self) -> Progress:
        """How far receiving has come."""
        receiving = self._path.mid_record or self._in.begun or not self._peer_ready
        return Progress(receiving, self._received_messages, self._received_bytes, self._kept_first, self._full)

    def _take_frame(self, kind: int, plain: bytes) -> Event | None:
        if not self._peer_ready:
            hello = take_hello(kind, plain)
            self.greet(hello)
            return PeerReady(hello)
        if kind not in OF_THE_PATH:
            return self._take_numbered(kind, plain)
        if kind == Frame.END:
            if plain:
                raise RemoteProtocolError("size", "an END that is not empty")
            if self._in.mid_message:
                raise RemoteProtocolError("decode", "an end between the parts of a message")
            return PeerClosed()
        if kind == Frame.HELLO or not self._keeping:
            raise RemoteProtocolError("decode", f"frame {kind} at a place where it cannot be")
        if len(plain) != COUNT_BYTES:
            raise RemoteProtocolError("size", f"frame {kind} of {len(plain)} bytes")
        number = int.from_bytes(plain, "big")
        if kind == Frame.PONG:
            if not self._asked:
                raise RemoteProtocolError("unexpected", "an answer to no question")
            self._asked -= 1
            return PongArrived(number)
        if kind == Frame.ACK:
            self._take_ack(number)
        else:
            self._take_question(plain)
        return None

    def _take_ack(self, number: int) -> None:
        if number > self._kept_first + len(self._kept):
            raise RemoteProtocolError("size", f"{number} frames confirmed that were not sent")
        if number <= self._confirmed:  # so there are no more of them than frames of ours
            raise RemoteProtocolError("unexpected", f"{number} frames confirmed, after {self._confirmed}")
        # What came on the path before, after its HELLO here, comes again all the same: frames are counted.
        self._confirmed = number
        self._forget(min(number, self._path.next_out))

    def _take_question(self, plain: bytes) -> None:
        gained = QUESTIONS_PER_S * max(0.0, self._in.now - self._may_ask_at)
        self._may_ask, self._may_ask_at = min(QUESTIONS_BURST, self._may_ask + gained) - 1.0, self._in.now
        if self._may_ask < 0.0:
            raise RemoteProtocolError("unexpected", f"more than {QUESTIONS_PER_S:.0f} questions a second")
        if len(self._urgent) < ACK_FRAMES and not self._ended:  # an honest peer needs no answer to more at once
            self._urgent.append(self._path.seal(OutFrame(Frame.PONG, plain)))
            self._say_received()

    def _take_numbered(self, kind: int, plain: bytes) -> Event | None:
        path = self._path
        path.next_in += 1
        if path.next_in <= self._received:
            return None  # it had come on the path before
        self._received += 1
        self._unacknowledged_bytes += len(plain)
        if self._in.mid_message and kind not in (Frame.PART, Frame.MESSAGE):
            raise RemoteProtocolError("decode", f"frame {kind} between the parts of a message")
        if kind == Frame.CREDIT:
            self._out.take_credit(plain)
            return None
        return self._in.take(kind, plain)

    def _forget(self, number: int) -> None:
        """Keep the frames before this number no longer."""
        gone = number - self._kept_first
        self._kept_bytes -= sum(len(frame.head) + len(frame.body) for frame in self._kept[:gone])
        del self._kept[:gone]
        self._kept_first = number
