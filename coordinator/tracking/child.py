"""The process that one tracker lives in: rows come in frames on its standard input, answers name the step that is next.

`python -m coordinator.tracking.child KIND`. A frame is its length (4 bytes, big endian) and msgpack: first an `About`,
then tuples of `Row`.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import BinaryIO

import msgspec

from coordinator.tracking.trackers import KINDS, About, Row, open_tracker

_LENGTH = struct.Struct(">I")
OPEN = b"open"
"""The first answer: the files are open."""


def serve(kind: str, frames: BinaryIO, answers: BinaryIO) -> None:
    """Until the frames end."""
    first = _read(frames)
    if first is None:
        return
    tracker = open_tracker(kind, msgspec.msgpack.decode(first, type=About))
    _answer(answers, OPEN)
    while (frame := _read(frames)) is not None:
        rows = msgspec.msgpack.decode(frame, type=tuple[Row, ...])
        tracker.log(rows)
        _answer(answers, b"%d" % (rows[-1].step + 1))
    tracker.close()


def frame_of(content: About | tuple[Row, ...]) -> bytes:
    packed = msgspec.msgpack.encode(content)
    return _LENGTH.pack(len(packed)) + packed


def _read(frames: BinaryIO) -> bytes | None:
    head = frames.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return frames.read(_LENGTH.unpack(head)[0])


def _answer(answers: BinaryIO, words: bytes) -> None:
    answers.write(words + b"\n")
    answers.flush()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python -m coordinator.tracking.child {'|'.join(KINDS)}")
    # Libraries print what they like: it goes to the log's side, and never between the answers.
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, own)
