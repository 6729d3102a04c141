"""The event heap that every simulation here runs on: times ascend, ties keep the order of insertion."""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

E = TypeVar("E")

#: Times that differ by less than this share of themselves are one instant: sums of floats in different
# order must not decide what a node sees first.
SAME_INSTANT = 1e-9


class EventHeap(Generic[E]):
    """Events by time. Popping yields all events of an instant at once, so that nobody decides on half of
    them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, E]] = []
        self._pushed = 0

    def push(self, at_s: float, event: E) -> None:
        """Adds an event; `at_s` is finite."""
        heapq.heappush(self._heap, (at_s, self._pushed, event))
        self._pushed += 1

    def next_s(self) -> float:
        """The time of the first event, infinity when there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def pop_instant(self) -> tuple[float, list[E]]:
        """The time of the next instant (its latest event's) and its events in order of insertion per time.

        Raises:
            IndexError: when no event is left.
        """
        heap = self._heap
        at_s, _, event = heapq.heappop(heap)
        events = [event]
        if heap and heap[0][0] <= at_s:  # the common case, without a multiplication: exact ties
            while heap and heap[0][0] <= at_s:
                events.append(heapq.heappop(heap)[2])
        until_s = at_s + at_s * SAME_INSTANT
        while heap and heap[0][0] <= until_s:
            at_s, _, event = heapq.heappop(heap)
            events.append(event)
        return at_s, events

    def __bool__(self) -> bool:
        return bool(self._heap)
