"""Asks nodes what they did, when the operator wants to know: a few small questions for the clock, then piece by piece.

A node's clock minus ours is what it says minus the middle of the question's round trip; the shortest of all round trips
counts, and half of it is how wrong that can be. What is kept is bounded, whatever nodes send.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.live.outbox import Outbox
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.messages import FetchSpans, Spans
from protocol.run.spans import CAPACITY, Records, joined, read_spans

QUESTIONS = 3
"""For the clock alone, one after the other."""
TOTAL_MAX = 200_000
"""Spans of all nodes together, 6.4 MB: ten seconds of 200 volunteers that do ten tasks a second, minutes of slower
ones."""
SECONDS_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Traced:
    """What one node did. Times in `records` are the coordinator's; names told once."""

    node: str
    role: str
    stage: int
    uncertain_s: float
    """Its times may be off by so much, all of them alike."""
    names: tuple[str, ...]
    records: Records
    lost: int = 0
    """Spans of the seconds asked for that its ring, or our bound, has left out."""


@dataclass(slots=True)
class _Asked:
    """One node's answers so far."""

    role: str
    stage: int
    asked_at: float
    questions: int = 1
    trip_s: float = float("inf")
    offset_s: float = 0.0
    after: int = -1
    lost: int = 0
    pieces: list[tuple[Records, tuple[str, ...]]] = field(default_factory=list)
    over: bool = False


class Tracing:
    """One collection at a time; another one replaces it."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._number = 0
        self._seconds = 0.0
        self._each_max = 0
        self._asked: dict[NodeId, _Asked] = {}

    @property
    def done(self) -> bool:
        """Whether everybody who is still here has told everything."""
        return all(asked.over for asked in self._asked.values())

    def begin(self, nodes: Iterable[tuple[NodeId, str, int]], seconds: float, now: float) -> None:
        """Asks (node, role, stage) each for its last seconds."""
        self._number += 1
        self._seconds = min(seconds, SECONDS_MAX)
        self._asked = {node: _Asked(role, stage, now) for node, role, stage in nodes}
        self._each_max = min(CAPACITY, TOTAL_MAX // max(1, len(self._asked)))
        for node in self._asked:
            self._ask(node, -1)

    def _ask(self, node: NodeId, after: int) -> None:
        self._outbox.send(node, FetchSpans(number=self._number, after=after, seconds=self._seconds))

    def take(self, node: NodeId, answer: Spans, now: float) -> str:
        """An answer has come. Returns what no honest node says, or nothing."""
        asked = self._asked.get(node)
        if asked is None or asked.over or answer.number != self._number:
            return ""  # of a collection that is over
        trip_s = now - asked.asked_at
        if trip_s < asked.trip_s:
            asked.trip_s, asked.offset_s = trip_s, answer.clock_s - (now + asked.asked_at) / 2
        asked.asked_at = now
        if asked.after < 0:
            return self._begun(node, asked, answer)
        try:
            records = read_spans(answer)
        except RemoteProtocolError as error:
            asked.over = True
            return f"Spans: {error.detail}"
        asked.lost += max(0, answer.first - asked.after)
        asked.pieces.append((records, answer.names))
        asked.after = answer.first + len(records)
        told = sum(len(piece) for piece, _ in asked.pieces)
        asked.over = answer.left <= 0 or not len(records) or told >= self._each_max
        if not asked.over:
            self._ask(node, asked.after)
        return ""

    def _begun(self, node: NodeId, asked: _Asked, answer: Spans) -> str:
        if asked.questions < QUESTIONS:
            asked.questions += 1
            self._ask(node, -1)
            return ""
        asked.lost = max(0, answer.left - self._each_max)
        asked.after = max(0, answer.first) + asked.lost
        asked.over = answer.left <= 0
        if not asked.over:
            self._ask(node, asked.after)
        return ""

    def left(self, node: NodeId) -> None:
        """Nothing more comes from it; what has come counts."""
        if node in self._asked:
            self._asked[node].over = True

    def take_all(self) -> list[Traced]:
        """What was collected, by our clock; nothing is kept."""
        found, self._asked = self._asked, {}
        traced = []
        for node, asked in found.items():
            records, names = joined(asked.pieces)
            records["start"] -= asked.offset_s
            traced.append(
                Traced(node, asked.role, asked.stage, min(asked.trip_s, 3600.0) / 2, names, records, asked.lost)
            )
        return traced
