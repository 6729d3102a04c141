"""One way of a link: the two record streams of one handshake, until the link moves to another way."""

from __future__ import annotations

from collections.abc import Iterator

from protocol.base.errors import RemoteProtocolError
from protocol.link.frames import Frame, Hello, OutFrame
from protocol.trust.handshake import Session
from protocol.trust.records import RecordReader, RecordWriter


class Path:
    """Seals and opens frames. Sans-I/O; `header` is 24 random bytes for the sending stream."""

    def __init__(self, session: Session, header: bytes) -> None:
        self._writer = RecordWriter(session.send_key, header)
        self._reader = RecordReader(session.receive_key)
        self._header = header
        self.next_out = 0
        """Number of the numbered frame that this path sends next."""
        self.next_in = 0
        """Number of the numbered frame that comes next on this path."""
        self.received_bytes = 0

    def hello(self, hello: Hello) -> bytes:
        """The first bytes of our direction."""
        return self._header + self._writer.seal(Frame.HELLO, hello.encode())

    def seal(self, frame: OutFrame, *, final: bool = False) -> bytes:
        """The record of one frame."""
        plain = b"".join((frame.head, frame.body)) if frame.body else frame.head
        return self._writer.seal(frame.kind, plain, final=final)

    def rekey(self) -> None:
        """Change the key of our direction with the next record."""
        self._writer.rekey()

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[tuple[int, bytes]]:
        """(kind, content) of every frame that `data` completes; take all of them before the next call.

        Raises `RemoteProtocolError`; the path is dead after that.
        """
        self.received_bytes += len(data)
        for kind, plain in self._reader.feed(data):
            if self._reader.finished != (kind == Frame.END):
                raise RemoteProtocolError("decode", "the final record and only that one is END")
            yield kind, plain

    @property
    def mid_record(self) -> bool:
        """Whether a record has begun and not ended."""
        return self._reader.mid_record

    @property
    def missing_bytes(self) -> int:
        """How many bytes must still come before anything can come of them."""
        return self._reader.missing_bytes


def take_hello(kind: int, plain: bytes) -> Hello:
    """The first frame of a path. Raises `RemoteProtocolError`."""
    if kind != Frame.HELLO:
        raise RemoteProtocolError("decode", f"frame {kind} at a place where it cannot be")
    return Hello.decode(plain)
