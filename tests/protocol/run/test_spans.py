"""Spans: a ring of fixed size that keeps the newest, and answers that a coordinator can put together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TaskId
from protocol.base.limits import MESSAGE_BYTES_MAX, SPANS_PIECE
from protocol.link.codec import decode, encode
from protocol.run.spans import (
    CONTENTS,
    DTYPE,
    JOBS,
    KINDS,
    RECORD_BYTES,
    FetchSpans,
    SpanRing,
    Spans,
    joined,
    read_spans,
)


def filled(count: int, capacity: int = 8) -> SpanRing:
    """One span a second, each half a second long, of tasks 0, 1, …"""
    ring = SpanRing(capacity)
    for number in range(count):
        task = TaskId(number, number % 3, 0, "F")
        ring.add("forward", number, number + 0.5, about=task, name=f"peer {number % 2}", byte_count=10 * number)
    return ring


def all_of(ring: SpanRing, now: float, seconds: float = math.inf) -> tuple[list[int], tuple[str, ...]]:
    """Steps and names that an operator gets, piece by piece over the real codec."""
    asked = FetchSpans(number=1, after=-1, seconds=min(seconds, 1e9))
    answer = decode(encode(ring.answer(asked, now)))
    assert isinstance(answer, Spans) and not answer.spans and answer.clock_s == now
    pieces, left, after = [], answer.left, answer.first
    while left:
        answer = decode(encode(ring.answer(FetchSpans(number=2, after=after, seconds=0.0), now)))
        assert isinstance(answer, Spans)
        records = read_spans(answer)
        pieces.append((records, answer.names))
        after, left = answer.first + len(records), answer.left
    records, names = joined(pieces)
    return records["step"].tolist(), tuple(names[number] for number in records["name"])


def test_the_newest_spans_are_kept_and_nothing_grows() -> None:
    """Of a hundred spans a ring of eight has the last eight, in their order, with their names."""
    steps, names = all_of(filled(100), 100.0)
    assert steps == list(range(92, 100))
    assert names == tuple(f"peer {number % 2}" for number in range(92, 100))


def test_only_what_ended_in_the_seconds_asked_for_is_told() -> None:
    """Spans end at 0.5, 1.5, …; of the last three seconds before 10.0 there are three."""
    assert all_of(filled(10, 64), 10.0, 3.0)[0] == [7, 8, 9]
    assert all_of(filled(0), 10.0)[0] == []


def test_a_long_ring_comes_in_pieces_that_a_line_can_carry() -> None:
    """No answer holds more than `SPANS_PIECE` spans, and none is lost or doubled between two."""
    ring = filled(3 * SPANS_PIECE + 5, 4 * SPANS_PIECE)
    steps, _ = all_of(ring, 1e6)
    assert steps == list(range(3 * SPANS_PIECE + 5))
    piece = ring.answer(FetchSpans(number=1, after=0, seconds=0.0), 0.0)
    assert len(encode(piece)) <= 40 * SPANS_PIECE < MESSAGE_BYTES_MAX


def test_names_are_bounded_and_fit_for_the_wire() -> None:
    """However many words a peer makes up, a ring knows so many; what cannot be printed is told in what can."""
    ring = SpanRing(8)
    for number in range(10_000):
        ring.add("wait", 0.0, 1.0, name=f"word {number} \x1b[2J")
    answer = ring.answer(FetchSpans(number=1, after=0, seconds=0.0), 1.0)
    assert answer.names == ("others",)
    assert decode(encode(answer)) == answer
    ring = SpanRing(8)
    ring.add("wait", 0.0, 1.0, name="a\x1b[2Jb" + "x" * 1000)
    assert decode(encode(ring.answer(FetchSpans(number=1, after=0, seconds=0.0), 1.0)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", len(KINDS)),
        ("content", len(CONTENTS)),
        ("name", 1),
        ("seconds", -1.0),
        ("start", math.nan),
        ("bytes", -1),
    ],
)
def test_absurd_spans_are_refused(field: str, value: float) -> None:
    """What a peer says is looked at before anybody counts with it."""
    record = np.zeros(1, DTYPE)
    record[field] = value
    with pytest.raises(RemoteProtocolError):
        read_spans(Spans(number=1, clock_s=0.0, first=0, left=0, names=("",), spans=record.tobytes()))


def test_half_a_record_is_refused() -> None:
    """Bytes that are no whole records."""
    with pytest.raises(RemoteProtocolError):
        read_spans(Spans(number=1, clock_s=0.0, first=0, left=0, names=("",), spans=b"x" * (RECORD_BYTES - 1)))


def test_every_kind_of_job_has_a_kind_of_span() -> None:
    """The table names no kind that a record cannot hold."""
    assert set(JOBS.values()) <= set(KINDS)
    assert len(KINDS) < 256 and len(CONTENTS) < 256
