"""A lane: a thread that performs jobs one after the other. What performs them may load torch; this does not.

A volunteer's daemon has only the process of its device (`node.process.device_lane`) and never needs torch itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from node.process.store import Buffer
from protocol.base.ids import TensorRef
from protocol.base.machine import Computed, ComputeFailed, WorkGoesOn

CLOSE_S = 10.0
"""How long a lane may take to end its last job before the process ends without it."""

Buffers = Mapping[int, Buffer]
"""The bytes of a job's references, by key."""


@dataclass(slots=True)
class Outcome:
    """What a job came to, or that it goes on. `tensors` go into the store before the machine hears of `fact`."""

    fact: Computed | ComputeFailed | WorkGoesOn
    tensors: list[tuple[TensorRef, Buffer]] = field(default_factory=list)
    kind: str = "other"
    """compute, optimizer, data or disk: which phase of the metrics the time belongs to."""
    seconds: float = 0.0
    codec_s: float = 0.0
    """Part of `seconds` that went into wire forms."""


def input_refs(job: Any) -> Iterator[TensorRef]:
    """The references that a job reads: what the driver must hand over with it."""
    for name in job.__slots__:
        value = getattr(job, name)
        if isinstance(value, TensorRef):
            yield value
        elif isinstance(value, tuple) and value and isinstance(value[0], TensorRef):
            yield from value


class Performs(Protocol):
    """What does the jobs of a lane: `node.compute.performer.Performer`."""

    deliver: Callable[[Outcome], None]

    def perform(self, job: Any, buffers: Buffers) -> Outcome: ...


class Lane:
    """A thread with its jobs in order. `deliver` is called in that thread with each outcome.

    Args:
        make: makes the performer, in the thread: torch's setting of threads belongs to it.
    """

    def __init__(self, name: str, make: Callable[[], Performs], deliver: Callable[[Outcome], None]) -> None:
        self._queue: queue.SimpleQueue[tuple[Any, Buffers] | None] = queue.SimpleQueue()
        self._make = make
        self._deliver = deliver
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Any, buffers: Buffers) -> None:
        """Queues a job with the bytes of its references, which must not change."""
        self._queue.put((job, buffers))

    @property
    def waiting(self) -> int:
        """Jobs that have not begun."""
        return self._queue.qsize()

    def close(self) -> None:
        """Waits (a while) until the thread has ended the job it is at; what else waits is forgotten."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        performer = self._make()
        performer.deliver = self._deliver
        while (item := self._queue.get()) is not None and not self._closing:
            self._deliver(performer.perform(*item))
