"""What this process did and when, as spans: the driver tells of jobs and transfers, and the ring keeps the newest.

A device that has nothing to do waits for something, and whoever is idle can say for what: the machine is asked with the
first message that comes while the device is idle, when it has handled what the last job came to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol.base.ids import NodeId, TaskId
from protocol.messages import Evaluated, Held, InputGradient, Lease, Message, Output
from protocol.run.spans import JOBS, SpanRing

HELD_MAX = 4096
"""Leases whose end is waited for, held or given away: a volunteer holds 64, a server gives 200 volunteers a few each.
Of more the oldest is forgotten: a lease that was given back, or ran out, has no end that this file hears of."""
WAIT_S_MIN = 0.0005
"""A shorter pause between two jobs is the loop's own time."""


def without_numbers(sentence: str) -> str:
    """A sentence with each number and id as `#`, so that like ones are one name."""
    words = []
    for word in sentence.split():
        bare = word.strip(",;:()")
        numbered = any(letter.isdigit() for letter in bare)
        words.append(word.replace(bare, "#") if numbered else word)
    return " ".join(words)


class Activity:
    """Spans of one node. Times are the driver's clock (`trio.current_time`)."""

    def __init__(self) -> None:
        self.ring = SpanRing()
        self.waiting_for: Callable[[], str] = lambda: ""
        """The machine's own sentence; set by whoever has the machine."""
        self._idle_since: float | None = None
        self._idle_for = ""
        self._device_jobs = 0
        self._held: dict[_Place, tuple[float, str]] = {}
        """Since when, and of whose: leases that we hold (of ""), and that others hold of us."""

    def job_begins(self, on_device: bool, now: float) -> None:
        """The machine has ordered a job."""
        if not on_device:
            return
        self._device_jobs += 1
        if self._idle_since is not None:
            if now - self._idle_since >= WAIT_S_MIN:
                self.ring.add("wait", self._idle_since, now, name=self._idle_for)
            self._idle_since = None

    def job_ended(self, job: Any, on_device: bool, seconds: float, now: float) -> None:
        """It has come to something."""
        self.ring.add(JOBS.get(type(job).__name__, "other"), now - seconds, now, about=job)
        if on_device:
            self._device_jobs = max(0, self._device_jobs - 1)
            if not self._device_jobs:
                self._idle_since, self._idle_for = now, ""

    def device_lost(self) -> None:
        """What it was given never ends."""
        self._device_jobs, self._idle_since = 0, None

    def moved(
        self, peer: NodeId, direction: str, message: Message, byte_count: int, began_s: float, now: float
    ) -> None:
        """A message with tensors has left (`send`) or come (`receive`)."""
        content = type(message).__name__
        self.ring.add(direction, began_s, now, about=message, name=peer, content=content, byte_count=byte_count)

    def heard(self, message: Message, now: float) -> None:
        """A message has come, and the machine has not seen it yet."""
        if self._idle_since is not None and not self._idle_for:
            self._idle_for = without_numbers(self.waiting_for())
        if isinstance(message, Lease):
            self._begin(message, "", now)
        elif isinstance(message, Output | InputGradient | Evaluated):
            self._end(message.task, now)
        elif isinstance(message, Held) and self._held and message.kind in ("output", "input_gradient"):
            for task in message.tasks:
                self._end(task, now)

    def says(self, peer: NodeId, message: Message, now: float) -> None:
        """The machine sends a message: a lease begins a task, and its result ends it."""
        if isinstance(message, Lease):
            self._begin(message, peer, now)
        elif isinstance(message, Output | InputGradient | Evaluated):
            self._end(message.task, now)

    def _begin(self, lease: Lease, holder: str, now: float) -> None:
        if len(self._held) >= HELD_MAX:
            del self._held[next(iter(self._held))]
        self._held[_place(lease.tasks[0])] = now, holder

    def _end(self, task: TaskId, now: float) -> None:
        began = self._held.pop(_place(task), None)
        if began is not None:
            self.ring.add("task", began[0], now, about=task, name=began[1])


_Place = tuple[int, int, int, int]


def _place(task: TaskId) -> _Place:
    """A task and what follows from it at the same place of its route: its lease may begin with a forward and its result
    be the backward."""
    return task.step, task.microbatch, task.position, task.segment
