"""What the simulated world consists of: computers with their disks, stores and lanes, and the links between them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from node.machine import jobs
from protocol.base.ids import NodeId
from protocol.base.machine import Input, Machine
from tests.simulation.lanes import Lanes

LATENCY_TIMES = (0.3, 2.0)
"""Between these lies what a link takes, in times that the world's links take when it is opened."""


@dataclass
class Way:
    """One direction of a link, for one kind of message: in order."""

    free_at: float = 0.0
    arrived_at: float = 0.0


@dataclass
class Link:
    """An open link between two hosts. Messages with tensors and without queue apart, each kind in order."""

    a: NodeId
    b: NodeId
    latency_s: float
    bytes_per_s: float
    opened_at: float = 0.0
    alive: bool = True
    silent: bool = False
    """Half open: nothing arrives any more and nobody is told."""
    slow_s: dict[NodeId, float] = field(default_factory=dict)
    """Seconds that everything of a sender takes longer: a link can be slow one way, and others overtake it."""
    last_words_of: NodeId | None = None
    """The link is gone, but what this end had sent before it died still arrives."""
    lanes: dict[tuple[NodeId, bool], Way] = field(default_factory=dict)
    """By sender, and whether the messages have tensors: those without overtake those with."""

    def other(self, node: NodeId) -> NodeId:
        return self.b if node == self.a else self.a


@dataclass
class Host:
    """A computer: a machine (None while it is down), a disk that survives, a store and lanes that do not."""

    node: NodeId
    role: str
    build: Callable[[Host, random.Random], Machine]
    address: str
    speed: float = 1.0
    """Jobs take 1 / speed of their time."""
    slowness: float = 1.0
    """Above 1 while a fault holds the host back."""
    disk_slowness: float = 1.0
    hung: dict[str, float] = field(default_factory=dict)
    """Lanes (`device`, `server`) and `disk` in which nothing comes to an end, and since when."""
    hung_before: tuple[float, float] = (0.0, -1e9)
    """When what hung last did so."""
    hung_spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """From when to when each lane hung last that goes on."""
    hangs_for_good: bool = False
    """Until somebody starts it again: even when all is calm."""
    held_up: dict[str, deque[Callable[[], None]]] = field(default_factory=dict)
    """What would have ended there meanwhile."""
    rate: float = 1.0
    """Seconds of its clock in one of the world's: no two clocks run alike."""
    lag_s: float = 0.0
    """What its clock lost while it stood still with its host."""
    paused: bool = False
    """The whole computer stands: inputs queue up in `inbox`."""
    paused_at: float = 0.0
    clock_stands: bool = False
    """Whether its clock stands with it."""
    inbox: deque[Input] = field(default_factory=deque)
    started_at: float = 0.0
    gone: bool = False
    """Whether it has left for good, with its disk."""
    harmed: bool = False
    """Whether its disk has ever lost what was on it."""
    emptied: bool = False
    """Whether it has lost nothing but everything at once: what is on it since, is whole."""
    mounted: bool = True
    """Whether it sees the folder of checkpoints."""
    lies: bool = False
    """Whether it may break the protocol (see `liar.py`); everybody else is held to it."""
    machine: Machine | None = None
    life: int = 0
    """Counts starts: what was ordered by an earlier life is lost."""
    records: list[tuple[Any, dict[int, Any]]] = field(default_factory=list)
    """The disk: durable records with their tensors, oldest first."""
    writing: deque[tuple[int, Any, dict[int, Any]]] = field(default_factory=deque)
    """On the way to the disk, in order: (number, record, tensors), or (-1, `Prune`, {})."""
    files: dict[str, Any] = field(default_factory=dict)
    store: dict[int, Any] = field(default_factory=dict)
    keys: count[int] = field(default_factory=lambda: count(1))
    lanes: Lanes | None = None
    lane_free_at: dict[str, float] = field(default_factory=dict)
    jobs: deque[jobs.Job] = field(default_factory=deque)
    """Ordered and not ended."""
    wake_at: float | None = None
    """When its alarm rings, in the world's time."""
    exited: str = ""
    moved: int = 0
    """How often its address has changed."""
    failures: int = 0
    """Of its device so far, with those that are due."""
    failures_due: int = 0
    """So many of its device's next jobs fail, for the reason `fails_for`."""
    fails_for: str = ""

    def clock(self, now: float) -> float:
        """What the host's own clock shows."""
        return (now - self.lag_s) * self.rate

    def world_time(self, clock_s: float) -> float:
        """When the host's clock will show that; a hair later, so that no rounding wakes it too early."""
        return clock_s / self.rate + self.lag_s + 1e-9
