"""What a node did and when: spans in a ring of fixed size, and the two messages by which an operator sees them.

    FetchSpans(after=-1) ─▶ Spans(clock_s, first)        the node's clock, and where the seconds asked for begin
    FetchSpans(after=N)  ─▶ Spans(first, left, spans)    a piece from there on; until nothing is left

A span is a record of `RECORD_BYTES`, written when it ends, so ends grow and the oldest are overwritten. Nothing is sent
unless the run's operator asks. Pure: the clock is the caller's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from protocol.base.bounded import Items, Number, Text
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TaskId
from protocol.base.limits import SPANS_PIECE, TEXT_MAX
from protocol.base.message import Message
from protocol.base.printable import printable

KINDS = (
    "forward", "backward", "loss", "validation", "gradient", "load", "set up",
    "fold", "sum", "optimizer", "checkpoint", "data", "serve", "other",
    "receive", "send", "wait", "task", "plan", "decision", "database",
)  # fmt: skip
"""What a span may be; a record holds the place in this list. `loss` is a route's end: forward, loss and backward.
`task`: from a lease's arrival to its result's departure. `wait`: a device without work, and its name says for what."""
CONTENTS = (
    "", "Lease", "InputAnswer", "Output", "InputGradient", "Activation", "Gradient", "Labels", "Contribute",
    "Parameters", "Audited", "MeasureData", "Evaluated", "ShardCopy", "CopyGiven",
)  # fmt: skip
"""What was moved by a span of the kinds `receive` and `send`: kinds of messages that have tensors."""
JOBS = {
    "Forward": "forward", "Backward": "backward", "RouteEnd": "loss", "Evaluate": "validation",
    "TakeGradient": "gradient", "LoadParameters": "load", "SetUpDevice": "set up", "Fold": "fold", "Reduce": "sum",
    "Apply": "optimizer",
    "WriteCheckpoint": "checkpoint", "WriteManifest": "checkpoint", "WriteSnapshot": "checkpoint",
    "CopyState": "checkpoint", "BringPart": "checkpoint", "BringManifest": "checkpoint", "TryStore": "checkpoint",
    "LoadBatch": "data", "PrepareData": "data", "ServeParameters": "serve",
}  # fmt: skip
"""Kinds of the jobs of `node.machine.jobs`, by their name; the others are `other`."""
CAPACITY = 16_384
"""Spans that a node keeps: 32 bytes each are 512 KiB, a hundredth of what a node's process takes. A task leaves a
volunteer six (received, waited, computed, sent, held, and one more for parameters or the gradient): 2,700 tasks, hours
of a home GPU with tasks of seconds, half a minute of a demo with tasks of ten milliseconds. A front server with 200
volunteers and 50 messages with tensors a second keeps five minutes."""
NAMES_MAX = 4096
"""Different names that a ring knows; further ones are shown as "others". 200 peers and 20 reasons."""
OTHERS = "others"
RECORD = struct.Struct("<BBhHhiidff")
RECORD_BYTES = RECORD.size
DTYPE = np.dtype(
    [
        ("kind", "u1"), ("content", "u1"), ("segment", "<i2"), ("name", "<u2"), ("position", "<i2"), ("step", "<i4"),
        ("microbatch", "<i4"), ("start", "<f8"), ("seconds", "<f4"), ("bytes", "<f4"),
    ]
)  # fmt: skip
"""A record. `start`: seconds of the node's own clock; `step`, `microbatch`, `position`: -1
where there is none."""
Records = NDArray[np.void]
"""(count,) of `DTYPE`, ends ascending but for the jitter of threads."""
_KIND = {name: number for number, name in enumerate(KINDS)}
_CONTENT = {name: number for number, name in enumerate(CONTENTS)}
assert RECORD_BYTES == DTYPE.itemsize == 32


class FetchSpans(Message, frozen=True, kw_only=True):
    """The coordinator, for its operator, asks a node what it did."""

    number: Number
    """Of the question; the answer has it too."""
    after: Number
    """The first span wanted, by its number since the node's process began; -1: none yet, only where they begin."""
    seconds: float
    """With `after` -1: spans that ended so long ago or later are wanted."""


class Spans(Message, frozen=True, kw_only=True):
    """A piece of what `FetchSpans` asked for."""

    number: Number
    clock_s: float
    """The sender's clock when it answered."""
    first: Number
    """Number of the first span here: later than asked for where the ring has lost some."""
    left: Number
    """How many there are beyond these."""
    names: Items[Text] = ()
    """What `name` of a record stands for."""
    spans: Annotated[bytes, Meta(max_length=SPANS_PIECE * RECORD_BYTES)] = b""
    """`DTYPE` records, at most `SPANS_PIECE`."""


def task_of(thing: Any) -> TaskId | None:
    """The task that a message or a job is about, or the first of them."""
    if isinstance(thing, TaskId):
        return thing
    task = getattr(thing, "task", None)
    if task is None:
        tasks = getattr(thing, "tasks", None)
        task = tasks[0] if tasks else None
    return task if isinstance(task, TaskId) else None


class SpanRing:
    """The newest `CAPACITY` spans of a process."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._records = bytearray(capacity * RECORD_BYTES)
        self.count = 0
        """Ever written."""
        self._names: dict[str, int] = {"": 0}
        self._numbered: list[str] = [""]

    def add(
        self, kind: str, start: float, end: float, *, about: Any = None, name: str = "", content: str = "",
        byte_count: float = 0.0,
    ) -> None:  # fmt: skip
        """Notes a span that has ended. `about`: a message or job with a task. Microseconds, whatever it is given."""
        task = task_of(about)
        step, microbatch, position, segment = -1, -1, -1, 0
        if task is not None:
            step, microbatch, position, segment = task.step, task.microbatch, task.position, task.segment
        elif about is not None:
            step = getattr(about, "step", -1)
        RECORD.pack_into(
            self._records, self.count % self._capacity * RECORD_BYTES, _KIND[kind], _CONTENT.get(content, 0),
            min(segment, 2**15 - 1), self._number(name), min(position, 2**15 - 1), min(step, 2**31 - 1),
            min(microbatch, 2**31 - 1), start, max(0.0, end - start), byte_count,
        )  # fmt: skip
        self.count += 1

    @property
    def names(self) -> tuple[str, ...]:
        """What `name` of a record of this ring stands for."""
        return tuple(self._numbered)

    def _number(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            if len(self._numbered) >= NAMES_MAX and name != OTHERS:
                return self._number(OTHERS)
            number = self._names[name] = len(self._numbered)
            self._numbered.append(printable(" ".join(name.split()))[:TEXT_MAX])
        return number

    def newest(self, first: int, count: int) -> tuple[int, Records]:
        """(number of the first, records) of at most so many spans from number `first` on that are still here."""
        first = min(self.count, max(first, self.count - self._capacity))
        wanted = np.arange(first, min(self.count, first + count)) % self._capacity
        return first, np.frombuffer(self._records, DTYPE)[wanted]

    def since(self, time: float) -> int:
        """The number of the first span here that ended at that time or later."""
        first, found = self.newest(0, self._capacity)
        ended = (found["start"] + found["seconds"] >= time).nonzero()[0]
        return first + int(ended[0]) if len(ended) else self.count

    def answer(self, question: FetchSpans, now: float) -> Spans:
        """What to say to a question, at most `SPANS_PIECE` spans."""
        if question.after < 0:
            first = self.since(now - question.seconds)
            return Spans(number=question.number, clock_s=now, first=first, left=self.count - first)
        first, found = self.newest(question.after, SPANS_PIECE)
        used, places = np.unique(found["name"], return_inverse=True)
        found["name"] = places
        names = tuple(self._numbered[number] for number in used)
        left = self.count - first - len(found)
        return Spans(
            number=question.number, clock_s=now, first=first, left=left, names=names, spans=found.tobytes()
        )  # fmt: skip


def read_spans(message: Spans) -> Records:
    """The records of an answer, (count,). Raises `RemoteProtocolError` for what no honest node sends."""
    if len(message.spans) % RECORD_BYTES:
        raise RemoteProtocolError("size", f"spans of {len(message.spans)} bytes")
    found = np.frombuffer(message.spans, DTYPE)
    numbers = (found["start"], found["seconds"], found["bytes"])
    if not all(bool(np.isfinite(each).all()) for each in numbers):
        raise RemoteProtocolError("not_finite", "a span's time or size")
    if (
        (found["kind"] >= len(KINDS)).any()
        or (found["content"] >= len(CONTENTS)).any()
        or (found["name"] >= max(1, len(message.names))).any()
        or (found["seconds"] < 0).any()
        or (found["bytes"] < 0).any()
    ):
        raise RemoteProtocolError("unexpected", "a span of a kind or name that nobody knows, or below nothing")
    return found


def joined(pieces: Sequence[tuple[Records, Sequence[str]]]) -> tuple[Records, tuple[str, ...]]:
    """Pieces with their names as one, names told once."""
    known: dict[str, int] = {}
    parts = []
    for records, names in pieces:
        places = np.array([known.setdefault(name, len(known)) for name in names or ("",)], dtype=np.uint16)
        part = records.copy()
        part["name"] = places[records["name"]]
        parts.append(part)
    return (np.concatenate(parts) if parts else np.empty(0, DTYPE)), tuple(known)
