"""A machine's line: one uplink that its transfers share, one downlink that carries what arrives.

On the way up transfers of different queues go on at once, each with an equal share, and those of one queue go one after
the other: that is how links send (`protocol.link.outgoing`), which do not wait for each other, but on a volunteer's
line, where results of older steps go first (`protocol.link.line`). On the way down a line takes in no more than its
rate; what comes faster waits. So no line ever carries more than it can, and a transfer costs the heap two events
however many are under way (shares that look at both ends would cost an event for each of them).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import ulp
from typing import Any

ALMOST_BYTES = 1e-3
"""A transfer with less than this to go is through: sums of shares are rounded. So is one that has less to go than its
line carries while the clock does not move, or than the line's count can tell apart, which is more on fast lines that
have been there for hours: after 8,192 s a clock moves by 1.8e-12 s, in which 10 Gbit/s carry 2.3e-3 bytes."""


@dataclass(slots=True)
class _Flow:
    """A transfer that has begun."""

    queue: Hashable
    item: Any
    byte_count: float
    left: float
    """Bytes, when it began, or was last held back."""
    step: int
    after: int


class Uplink:
    """Transfers that share a rate, by the bytes that each has been given since the line began ("processor sharing" by
    virtual time: Kleinrock 1967; Parekh and Gallager 1993)."""

    __slots__ = (
        "_at", "_flows", "_given", "_held", "_number", "_queues", "_results", "most_bytes", "rate", "turn",
        "waiting_bytes",
    )  # fmt: skip

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self.turn = 0
        """Counts the changes of `next_s`: a moment that was found before is void."""
        self.waiting_bytes = 0.0
        """Of transfers that are not through, as they were announced."""
        self.most_bytes = 0.0
        """The most that ever waited."""
        self._flows: list[tuple[float, int, _Flow]] = []
        """Those that have a share, by what all were given when they are through."""
        self._held: list[_Flow] = []
        """Those that wait for results."""
        self._results: dict[int, int] = {}
        """Results that are not through, by step."""
        self._queues: dict[Hashable, deque[_Flow]] = {}
        """What waits behind a transfer that is under way, by queue; a queue without one is not here."""
        self._given = 0.0
        self._at = 0.0
        self._number = 0

    def _advance(self, now: float) -> None:
        if self._flows:
            self._given += (now - self._at) * self.rate / len(self._flows)
        self._at = now

    def add(self, byte_count: float, queue: Hashable, item: Any, now: float, step: int = -1, after: int = -1) -> None:
        """One more transfer, behind those of its queue; `item` comes back when it is through. `step`: of a result, one
        for all of a queue; `after`: results of steps up to this one go before it."""
        self._advance(now)
        self.waiting_bytes += byte_count
        self.most_bytes = max(self.most_bytes, self.waiting_bytes)
        flow = _Flow(queue, item, byte_count, byte_count, step, after)
        if step >= 0:
            self._results[step] = self._results.get(step, 0) + 1
            if self._results[step] == 1:
                self._hold(step)
        if queue in self._queues:
            self._queues[queue].append(flow)
            return
        self._queues[queue] = deque()
        self._begin(flow)
        self.turn += 1

    def _begin(self, flow: _Flow) -> None:
        if flow.after >= 0 and self._results and min(self._results) <= flow.after:
            self._held.append(flow)
            return
        self._number += 1
        heapq.heappush(self._flows, (self._given + flow.left, self._number, flow))

    def _hold(self, step: int) -> None:
        """What goes after results of this step waits from now on."""
        held = [(end, flow) for end, _, flow in self._flows if flow.after >= step]
        if held:
            self._flows = [each for each in self._flows if each[2].after < step]
            heapq.heapify(self._flows)
            for end, flow in held:
                flow.left = end - self._given
                self._held.append(flow)
            self.turn += 1

    def _release(self) -> None:
        """What waited goes on where the results before it are through."""
        held, self._held = self._held, []
        for flow in held:
            self._begin(flow)

    def next_s(self, now: float) -> float | None:
        """When the next transfer is through, unless another one begins before; None: nothing is under way."""
        if not self._flows:
            return None
        self._advance(now)
        return now + max(0.0, self._flows[0][0] - self._given) * len(self._flows) / self.rate

    def through(self, now: float) -> list[Any]:
        """The transfers that are through by now."""
        self._advance(now)
        done = []
        almost = max(ALMOST_BYTES, self.rate * ulp(now), 2 * ulp(self._given))
        while self._flows and self._flows[0][0] <= self._given + almost:
            flow = heapq.heappop(self._flows)[2]
            self.waiting_bytes -= flow.byte_count
            done.append(flow.item)
            if (step := flow.step) >= 0:
                self._results[step] -= 1
                if not self._results[step]:
                    del self._results[step]
            if self._queues[flow.queue]:
                self._begin(self._queues[flow.queue].popleft())
            else:
                del self._queues[flow.queue]
        if self._held:
            self._release()
        self.turn += 1
        return done

    def clear(self) -> None:
        """The machine is gone: nothing of it goes on."""
        self._flows.clear()
        self._held.clear()
        self._results.clear()
        self._queues.clear()
        self.waiting_bytes = 0.0
        self.turn += 1


class Downlink:
    """What arrives, in the order in which its last bytes were sent."""

    __slots__ = ("free_at", "rate")

    def __init__(self, bytes_per_s: float) -> None:
        self.rate = bytes_per_s
        self.free_at = 0.0

    def arrives(self, byte_count: float, sent_at: float) -> float:
        """When a transfer whose last byte left at `sent_at` has come through."""
        took_s = byte_count / self.rate
        self.free_at = max(self.free_at, sent_at - took_s) + took_s
        return self.free_at
