"""What the parts of the coordinator's machine order: effects in order, and what to do once a record is durable.

It also tells them the wall clock, which may be set at any time: no part keeps a reckoning of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from coordinator.live.problem import Problem
from coordinator.live.records import Record
from protocol.base.ids import NodeId
from protocol.base.limits import REJECT_REASONS, TEXT_MAX
from protocol.base.machine import Count, Effect, Exit, HangUp, Log, Persist, Send, StartPlanning
from protocol.messages import Message, Refused

EVENTS_KEPT = 200
"""Events that the status page shows; all of them are in the log and the database."""
EVERYDAY_EVENTS = ("step", "validation")
"""Logged, but no events: they have tables of their own, and would push everything else out of view."""


class Outbox:
    """One list of effects, shared by the parts, taken by the machine at the end of each input."""

    def __init__(self, wall_offset_s: float) -> None:
        """`wall_offset_s`: seconds since 1970 minus the machine's `now`."""
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_KEPT)
        """What was logged, oldest first, with the time of the wall clock."""
        self.wall_offset_s = wall_offset_s
        self._effects: list[Effect] = []
        self._records = 0
        self._then: dict[int, Callable[[float], None] | None] = {}
        self._now = 0.0

    def begin(self, now: float) -> None:
        """A new input: events that follow carry its time."""
        self._now = now

    def wall_s(self, now: float) -> float:
        """Seconds since 1970 at a time of the machine's."""
        return now + self.wall_offset_s

    def take(self) -> list[Effect]:
        """The effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def send(self, peer: NodeId, message: Message) -> None:
        self._effects.append(Send(peer, message))

    def hang_up(self, peer: NodeId, reason: str, *, fault: bool = False) -> None:
        self._effects.append(HangUp(peer, reason, fault))

    def refuse(self, peer: NodeId, reason: str, sentence: str) -> None:
        """Says no, and why, to a node that asks to take part."""
        self.count("barnraise_coordinator_node_joins_total", outcome="refused")
        if reason in REJECT_REASONS:
            self.count("barnraise_transport_rejected_messages_total", reason=reason)
        self.log("warning", "node refused", node=peer, reason=reason, detail=sentence)
        self.farewell(peer, reason, sentence)

    def farewell(self, peer: NodeId, reason: str, sentence: str) -> None:
        """The last word to a node that is not wanted."""
        self.send(peer, Refused(reason=sentence[:TEXT_MAX]))
        self.hang_up(peer, reason)

    def persist(self, record: Record, then: Callable[[float], None] | None = None) -> None:
        """Writes a record; `then(now)` runs when it is durable."""
        self._effects.append(Persist(self._records, record))
        self._then[self._records] = then
        self._records += 1

    @property
    def written_count(self) -> int:
        """Records ordered so far."""
        return self._records

    @property
    def durable_count(self) -> int:
        """How many of them, from the first on, survive a crash."""
        return next(iter(self._then), self._records)

    def persisted(self, record_number: int, now: float) -> None:
        """The driver says that a record is durable."""
        then = self._then.pop(record_number)
        if then is not None:
            then(now)

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self._effects.append(Count(metric, value, tuple(sorted(labels.items()))))

    def log(self, level: str, event: str, **fields: Any) -> None:
        self._effects.append(Log(level, event, fields))
        if event in EVERYDAY_EVENTS:
            return
        wall_s = round(self.wall_s(self._now), 3)
        self.events.append({"wall_s": wall_s, "level": level, "event": event, **fields})

    def start_planning(self, number: int, problem: Problem) -> None:
        """Has a planner work on a problem; `PlanReady` answers."""
        self._effects.append(StartPlanning(number, problem))

    def exit(self, reason: str) -> None:
        self._effects.append(Exit(reason))
