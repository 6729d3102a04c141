"""Measures links, and lets others measure theirs: round trip and goodput both ways, bounded in bytes and time.

    begin(peer) ─▶ 3 questions of 0 bytes ─▶ pieces down, in a growing window ─▶ pieces up ─▶ Done(figures)

A piece is asked for (or sent) only while fewer are under way than the line carried in half a second so far, so a slow
line is never left with more than that to bring when the time is over. A rate is what the second half of the bytes
took: the first half goes by while the sender still feels its way up (slow start).

Pure: messages and the time in, orders out. Nothing here trusts the other side beyond what it can say about its own
link: pieces that nobody asked for cost it its budget, then its link.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median

from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import (
    MEASURE_BYTES,
    MEASURE_ENOUGH_BYTES,
    MEASURE_ENOUGH_TRIPS,
    MEASURE_PEER_BYTES,
    MEASURE_PEER_BYTES_PER_S,
    MEASURE_PIECE_BYTES,
    MEASURE_S,
    MEASURE_TOTAL_BYTES,
    MEASURE_TOTAL_BYTES_PER_S,
)
from protocol.messages import MeasureAsk, MeasureData, MeasureGot, Message

MEASURES = (MeasureAsk, MeasureData, MeasureGot)
"""Kinds of messages that belong here."""
QUESTIONS = 3
"""Of 0 bytes, one after the other: the smallest round trip of three."""
FIRST_WINDOW = 2
"""Pieces under way at first."""
AHEAD_S = 0.5
"""Never more under way than the line carried in this time (but FIRST_WINDOW pieces)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a measurement found. 0 bytes per second: not known (the other side refused, or nothing came in time)."""

    round_trip_s: float
    received_bytes_per_s: float
    sent_bytes_per_s: float
    byte_count: int
    """Moved both ways for it."""
    complete: bool
    """False when the time was over first, or the other side would not go on."""

    def shared_by(self, count: int) -> Figures:
        """What each of `count` members has of it that send and receive at the same time."""
        return replace(
            self,
            received_bytes_per_s=self.received_bytes_per_s / count,
            sent_bytes_per_s=self.sent_bytes_per_s / count,
        )


@dataclass(frozen=True, slots=True)
class Say:
    """Send this to the peer; a `MeasureData` with as many random bytes as its tensor says."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Done:
    """A measurement that we began is over; `figures` is None when the link was lost or nothing was answered."""

    peer: NodeId
    figures: Figures | None


@dataclass(frozen=True, slots=True)
class Cut:
    """The peer sends far more than it may: close its link."""

    peer: NodeId
    detail: str


Order = Say | Done | Cut


def piece(number: int, byte_count: int, answers: bool) -> MeasureData:
    """A `MeasureData` of so many bytes."""
    return MeasureData(
        number=number, answers=answers, tensors=(TensorRef(0, (byte_count // 4,), "int32", byte_count // 4 * 4),)
    )


@dataclass(slots=True)
class _Bucket:
    """Bytes that may go now; they come back at a rate, up to the size of the bucket."""

    size: float
    per_s: float
    left: float
    at: float

    def take(self, byte_count: int, now: float) -> bool:
        self.left = min(self.size, self.left + (now - self.at) * self.per_s)
        self.at = now
        if byte_count > self.left:
            return False
        self.left -= byte_count
        return True


@dataclass(slots=True)
class _Way:
    """One direction of a measurement: pieces under way, and when each was done."""

    started: float
    begun: int = 0
    """Bytes asked for or sent."""
    under_way: dict[int, int] = field(default_factory=dict)
    window: int = FIRST_WINDOW
    through: bool = False
    """What has come is enough to know the rate."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes done by then)"""

    @property
    def done_bytes(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    def arrived(self, byte_count: int, now: float) -> None:
        self.arrivals.append((now, self.done_bytes + byte_count))
        self.window += 1

    def room(self, now: float) -> bool:
        """Whether one more piece may go under way."""
        pieces = len(self.under_way)
        if pieces < FIRST_WINDOW:
            return True
        elapsed_s = max(now - self.started, 1e-6)
        return pieces < self.window and pieces * MEASURE_PIECE_BYTES < AHEAD_S * self.done_bytes / elapsed_s

    def enough(self, round_trip_s: float, now: float) -> bool:
        """Whether more pieces would say nothing new: the sender has felt its way up, or all bytes were begun."""
        filled = now - self.started >= MEASURE_ENOUGH_TRIPS * round_trip_s
        return self.begun >= MEASURE_BYTES or (filled and self.done_bytes >= MEASURE_ENOUGH_BYTES)

    def rate(self, round_trip_s: float) -> float:
        """Bytes per second: over the later half of the bytes where there are enough, else over all.

        A line that is busy with work answers late, and may do so less later: what is taken off for the way there and
        back is at most half, and what came between the first and the last piece is no slower.
        """
        if not self.arrivals:
            return 0.0
        last, total = self.arrivals[-1]
        middle = next(index for index, (_, count) in enumerate(self.arrivals) if 2 * count >= total)
        since, before = self.arrivals[middle]
        if total - before >= 4 * MEASURE_PIECE_BYTES and last > since:
            return (total - before) / (last - since)
        spent = last - self.started
        rate = total / max(spent - round_trip_s, spent / 2, 1e-4)
        first_at, first = self.arrivals[0]
        return min(rate, (total - first) / (last - first_at)) if last > first_at else rate


@dataclass(slots=True)
class _Run:
    """A measurement of ours that goes on."""

    peer: NodeId
    started: float
    ends: float
    """The time bound of the whole."""
    asked: dict[int, float] = field(default_factory=dict)
    """Questions of 0 bytes that are under way: when they went."""
    trips: list[float] = field(default_factory=list)
    down: _Way | None = None
    up: _Way | None = None
    refused: bool = False

    @property
    def round_trip_s(self) -> float:
        return min(self.trips)


class Meter:
    """All measurements of one node. At most one of ours runs at a time: two would share the line they measure."""

    def __init__(self, numbers: Iterator[int] | None = None, duration_s: float = MEASURE_S) -> None:
        self._numbers = numbers or itertools.count(1)
        self._duration_s = duration_s
        self._run: _Run | None = None
        self._queue: dict[NodeId, float] = {}
        """Who is measured next, and for how long at most."""
        self._peers: dict[NodeId, _Bucket] = {}
        self._total = _Bucket(MEASURE_TOTAL_BYTES, MEASURE_TOTAL_BYTES_PER_S, MEASURE_TOTAL_BYTES, 0.0)
        self.moved_bytes = 0
        """Payload of all measurements so far, ours and others', both ways."""

    # ---- ours --------------------------------------------------------------------------------------------------------

    def begin(self, peer: NodeId, now: float, duration_s: float | None = None) -> list[Order]:
        """Measures the link to `peer`, after those that were asked for before; `Done` follows in any case.

        `duration_s`: the bound in time, if shorter than usual.
        """
        if peer not in self._queue and (self._run is None or self._run.peer != peer):
            self._queue[peer] = self._duration_s if duration_s is None else min(duration_s, self._duration_s)
        return self._next(now)

    @property
    def busy(self) -> bool:
        """Whether a measurement of ours runs or waits."""
        return self._run is not None

    def _next(self, now: float) -> list[Order]:
        if self._run is not None or not self._queue:
            return []
        peer = next(iter(self._queue))
        self._run = _Run(peer, now, now + self._queue.pop(peer))
        return [self._question(self._run, now)]

    def _question(self, run: _Run, now: float) -> Order:
        number = next(self._numbers)
        run.asked[number] = now
        return Say(run.peer, MeasureAsk(number=number, byte_count=0))

    def _fill(self, run: _Run, now: float) -> list[Order]:
        """Sends what may go now; moves on to the next direction when one is through."""
        orders: list[Order] = []
        if run.down is None:
            run.down = _Way(now)
        if run.up is None:
            # Half of the time for each way: what was spent on questions is nobody's.
            half_time = now >= (run.started + run.ends) / 2
            orders += self._go_on(run, run.down, now, over=half_time or run.refused, down=True)
            if run.down.under_way:
                return orders
            run.up = _Way(now)
        over = now >= run.ends - AHEAD_S / 2 or run.refused
        orders += self._go_on(run, run.up, now, over=over, down=False)
        if not run.up.under_way:
            orders += self._finish(complete=True, now=now)
        return orders

    def _go_on(self, run: _Run, way: _Way, now: float, *, over: bool, down: bool) -> list[Order]:
        orders: list[Order] = []
        way.through = way.through or way.enough(run.round_trip_s, now)
        while not over and not way.through and way.begun + MEASURE_PIECE_BYTES <= MEASURE_BYTES and way.room(now):
            number = next(self._numbers)
            way.under_way[number] = MEASURE_PIECE_BYTES
            way.begun += MEASURE_PIECE_BYTES
            message: Message = piece(number, MEASURE_PIECE_BYTES, answers=False)
            if down:
                message = MeasureAsk(number=number, byte_count=MEASURE_PIECE_BYTES)
            orders.append(Say(run.peer, message))
        return orders

    def _finish(self, *, complete: bool, now: float) -> list[Order]:
        run, self._run = self._run, None
        assert run is not None
        figures = None
        if run.trips:
            down, up = run.down or _Way(now), run.up or _Way(now)
            figures = Figures(
                round_trip_s=run.round_trip_s,
                received_bytes_per_s=down.rate(run.round_trip_s),
                sent_bytes_per_s=up.rate(run.round_trip_s),
                byte_count=down.done_bytes + up.done_bytes,
                complete=complete and not run.refused and down.through and up.through,
            )
        return [Done(run.peer, figures), *self._next(now)]

    # ---- what comes --------------------------------------------------------------------------------------------------

    def received(self, peer: NodeId, message: Message, now: float) -> list[Order]:
        """A message of `MEASURES` has come."""
        match message:
            case MeasureAsk():
                return self._asked(peer, message, now)
            case MeasureData() if not message.answers:
                return self._sent_to_us(peer, message, now)
            case MeasureData() | MeasureGot():
                return self._answered(peer, message, now)
            case _:
                raise AssertionError(f"{type(message).__name__} measures nothing")

    def _asked(self, peer: NodeId, ask: MeasureAsk, now: float) -> list[Order]:
        if ask.byte_count == 0:
            return [Say(peer, MeasureGot(number=ask.number, refused=False))]
        if not 4 <= ask.byte_count <= MEASURE_PIECE_BYTES:
            return [Cut(peer, f"asks for a piece of {ask.byte_count} bytes")]
        if not self._may(peer, ask.byte_count, now):
            return [Say(peer, MeasureGot(number=ask.number, refused=True))]
        return [Say(peer, piece(ask.number, ask.byte_count, answers=True))]

    def _sent_to_us(self, peer: NodeId, data: MeasureData, now: float) -> list[Order]:
        byte_count = sum(tensor.byte_count for tensor in data.tensors)
        if byte_count > MEASURE_PIECE_BYTES:
            return [Cut(peer, f"sends a piece of {byte_count} bytes")]
        may = self._may(peer, byte_count, now)
        bucket = self._peers[peer]
        if not may:
            # It may have been under way when we said no; somebody who goes on for long means no measurement.
            bucket.left -= byte_count
            if bucket.left < -MEASURE_PEER_BYTES:
                return [Cut(peer, "sends far more than a measurement needs")]
        return [Say(peer, MeasureGot(number=data.number, refused=not may))]

    def _may(self, peer: NodeId, byte_count: int, now: float) -> bool:
        bucket = self._peers.get(peer)
        if bucket is None:
            bucket = _Bucket(MEASURE_PEER_BYTES, MEASURE_PEER_BYTES_PER_S, MEASURE_PEER_BYTES, now)
            self._peers[peer] = bucket
        if not bucket.take(byte_count, now) or not self._total.take(byte_count, now):
            return False
        self.moved_bytes += byte_count
        return True

    def _answered(self, peer: NodeId, message: MeasureData | MeasureGot, now: float) -> list[Order]:
        run = self._run
        if run is None or run.peer != peer:
            return []  # of a measurement that is over
        asked_at = run.asked.pop(message.number, None)
        if asked_at is not None:
            run.trips.append(now - asked_at)
            if len(run.trips) < QUESTIONS and now < (run.started + run.ends) / 2:
                return [self._question(run, now)]
            return self._fill(run, now)
        for way in (run.down, run.up):
            byte_count = way.under_way.pop(message.number, None) if way is not None else None
            if way is None or byte_count is None:
                continue
            if isinstance(message, MeasureGot) and message.refused:
                run.refused = True
            else:
                way.arrived(byte_count, now)
                self.moved_bytes += byte_count
            return self._fill(run, now)
        return []

    # ---- time and ends -----------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        """When `wake` is due."""
        return None if self._run is None else self._run.ends

    def wake(self, now: float) -> list[Order]:
        """The time of a measurement is over: what is known by now counts."""
        if self._run is None or now < self._run.ends:
            return []
        return self._finish(complete=False, now=now)

    def link_down(self, peer: NodeId, now: float) -> list[Order]:
        """The link is gone: a measurement over it ends without figures. Its budget stays used up."""
        if peer in self._queue:
            del self._queue[peer]
            return [Done(peer, None)]
        if self._run is not None and self._run.peer == peer:
            self._run = None
            return [Done(peer, None), *self._next(now)]
        return []

    def forget_full(self, now: float) -> None:
        """Forgets peers whose budget has grown back: called now and then, so that a long life holds few."""
        for peer, bucket in list(self._peers.items()):
            if bucket.left + (now - bucket.at) * bucket.per_s >= bucket.size:
                del self._peers[peer]

    def check(self) -> None:
        """Raises if an invariant is broken."""
        run = self._run
        assert run is not None or not self._queue, "a measurement waits for nothing"
        if run is not None:
            for way in (run.down, run.up):
                assert way is None or way.begun <= MEASURE_BYTES, "more bytes than a measurement may cost"
                assert way is None or way.begun >= way.done_bytes


@dataclass(slots=True)
class Spread:
    """The newest values of a figure: their median, and how far they lie apart."""

    values: list[float] = field(default_factory=list)
    at: float = 0.0
    KEPT = 9

    def add(self, value: float, now: float) -> None:
        self.values = [*self.values[-(self.KEPT - 1) :], value]
        self.at = now

    @property
    def value(self) -> float:
        return median(self.values) if self.values else 0.0

    @property
    def spread(self) -> float:
        """Median absolute deviation over median; 0 for a single value."""
        middle = self.value
        return median(abs(value - middle) for value in self.values) / middle if middle > 0 else 0.0
