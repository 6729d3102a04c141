"""The simulated world that measures: production machines, each with its line, its lanes and its disk, on one heap.

It knows no role and judges nothing (`tests/simulation` does, with faults of every kind and whole-number arithmetic;
that world encodes, stores and hashes everything, which a world of ten thousand computers cannot). Tensors are not
there: a message's references say their form and byte count, and that is what the lines carry. Time passes on lines
(`lines.py`), in lanes (what a `Lanes` says), on disks, and nowhere else: a machine's own work is instant. All clocks
show the same. Equal arguments and seeds give equal runs.

What it leaves out: the transport's windows and its cutting of messages, and loss and reordering of packets. A link to a
computer that is gone is silent for `SILENT_S`, as a path is (`protocol.drive.link` looks every second).
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

import msgspec

from protocol.base.ids import NodeId, TensorRef
from protocol.base.machine import (
    Compute,
    Computed,
    ComputeFailed,
    Count,
    Dial,
    DropTensors,
    Effect,
    Exit,
    HangUp,
    Input,
    LinkDown,
    LinkUp,
    Log,
    Machine,
    Persist,
    Persisted,
    Prune,
    Received,
    Send,
    ShareTensor,
)
from protocol.link.codec import is_long
from protocol.link.line import goes_after, result_step
from protocol.world.lines import Downlink, Uplink

SILENT_S = 4.0
"""A computer that is gone says nothing; so long until its peers' drivers have found that out."""
REFUSED_S = 9.0
"""A driver gives up an attempt to reach somebody who does not answer after this."""
HANDSHAKE_WAYS = 5
"""Ways that packets go before both sides have a link: two for TCP, three for the handshake."""
FRAME_BYTES = 64
"""Of a message beside its own bytes: frame, record and packet heads."""
SYNC_S = 0.004
"""A small record is on a disk after this."""
DISK_BYTES_PER_S = 5e8
CHECK_EVERY = 1009
"""Every so many inputs the machine that had one is asked whether its invariants hold. To ask after each would cost more
than everything else: a coordinator's look at 10,000 members takes milliseconds."""
_encode = msgspec.msgpack.Encoder().encode


class Lanes(Protocol):
    """What does a machine's jobs, in no time of its own."""

    def takes(self, job: Any) -> tuple[str, float]:
        """The lane that does it, and the seconds that it takes there."""
        ...

    def result(self, job: Any) -> Any:
        """What it came to. Raises `CannotComputeError`."""
        ...


class Watch(Protocol):
    """Who wants to know what everybody does, and when."""

    def computed(self, host: Host, lane: str, job: Any, start: float, end: float) -> None:
        """A job was given to a lane, which will do it then."""
        ...

    def moved(
        self, source: Host, target: Host, message: Any, byte_count: float, began: float, sent: float, arrives: float
    ) -> None:
        """A message with tensors has left; its last byte arrives then."""
        ...


@contextmanager
def collecting_seldom(collect_after: int) -> Iterator[None]:
    """The garbage collector looks once in so many new objects meanwhile."""
    before = gc.get_threshold()
    gc.set_threshold(collect_after, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class CannotComputeError(Exception):
    """The job failed; the sentence says why."""


@dataclass(slots=True, eq=False)
class Host:
    """One computer. `make` starts a machine anew, with numbers for its tensors and the lanes that do its jobs."""

    node: NodeId
    role: str
    place: int
    """Where it stands in the network: a number that `World.way_s` knows."""
    make: Callable[[Host], tuple[Machine, Lanes]]
    uplink: Uplink
    downlink: Downlink
    machine: Machine | None = None
    lanes: Lanes | None = None
    life: int = 0
    """Counts starts and ends: what was ordered before is void."""
    keys: count[int] = field(default_factory=lambda: count(1))
    links: dict[NodeId, Link] = field(default_factory=dict)
    wake_at: float | None = None
    lane_free_at: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds of work that each lane has been given."""
    disk_free_at: float = 0.0
    started_at: float = 0.0
    present_s: float = 0.0
    """Of lives that have ended."""
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of message."""
    received: Counter[str] = field(default_factory=Counter)
    jobs: Counter[str] = field(default_factory=Counter)
    """Jobs ended, by kind."""
    exited: str = ""


@dataclass(slots=True, eq=False)
class Link:
    """An open link. Messages without tensors keep their order each way, and overtake those with."""

    a: Host
    b: Host
    alive: bool = True
    arrived_at: dict[NodeId, float] = field(default_factory=dict)
    """When the newest word of each side arrives."""

    def other(self, host: Host) -> Host:
        return self.b if host is self.a else self.a


class World:
    """Hosts, links and time.

    Args:
        seed: of all delays that are drawn.
        way_s: seconds that a packet takes from one place to another, and what a pair's line carries in bytes per
            second; infinite seconds: no way leads there.
        on_persist: told of every durable record.
        on_log: told of every line that a machine logs.
    """

    def __init__(
        self,
        seed: int,
        way: Callable[[int, int], tuple[float, float]],
        on_persist: Callable[[Host, Any], None] = lambda host, record: None,
        on_log: Callable[[Host, Log], None] = lambda host, line: None,
        watch: Watch | None = None,
    ) -> None:
        self.now = 0.0
        self.inputs = 0
        self.hosts: dict[NodeId, Host] = {}
        self.counts: Counter[str] = Counter()
        """What machines count, by metric."""
        self._random = random.Random(seed).random
        self._way = way
        self._on_persist = on_persist
        self._watched = watch
        self._on_log = on_log
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._untold: dict[tuple[NodeId, NodeId], Link] = {}
        """(host, peer) whose link is gone without the host having noticed."""
        self._perform: dict[type, Callable[[Host, Any], None]] = {
            Send: self._send,
            Dial: self._dial,
            HangUp: self._hang_up,
            Compute: self._compute,
            Persist: self._persist,
            Prune: _nothing,
            DropTensors: _nothing,
            ShareTensor: _nothing,
            Log: self._on_log,
            Count: self._count,
            Exit: self._exit,
        }

    # ---- time ----------------------------------------------------------------------------------------------------

    def at(self, when: float, event: Callable[..., None], *arguments: Any) -> None:
        """Calls `event` at a time that is not over."""
        self._number += 1
        heappush(self._heap, (when, self._number, event, arguments))

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Goes on until the time is over, nothing is left, or `stop` says so; asked before each event."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not stop():
            self.now, _, event, arguments = heappop(heap)
            event(*arguments)
        if not stop():
            self.now = max(self.now, until_s)

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def add(self, host: Host) -> None:
        self.hosts[host.node] = host

    def start(self, host: Host) -> None:
        """Its process starts, with nothing on its disk."""
        if host.machine is not None:
            return
        host.life += 1
        host.started_at = self.now
        host.exited = ""
        host.lane_free_at, host.disk_free_at = {}, self.now
        host.machine, host.lanes = host.make(host)
        self._take(host, host.machine.start(self.now))

    def end(self, host: Host, after_s: float = SILENT_S) -> None:
        """It is gone from one moment to the next; its peers notice `after_s` later."""
        if host.machine is None:
            return
        host.machine = host.lanes = host.wake_at = None
        host.life += 1
        host.present_s += self.now - host.started_at
        host.uplink.clear()
        for link in list(host.links.values()):
            self._close(link, "silent", (link.other(host),), after_s)

    # ---- inputs --------------------------------------------------------------------------------------------------

    def feed(self, host: Host, fact: Input) -> None:
        """Gives a machine an input now."""
        machine = host.machine
        if machine is not None:
            self._take(host, machine.handle(fact, self.now))

    def _take(self, host: Host, effects: Any) -> None:
        self.inputs += 1
        perform = self._perform
        effect: Effect
        for effect in effects:
            perform[type(effect)](host, effect)
        machine = host.machine
        if machine is None:
            return
        if not self.inputs % CHECK_EVERY:
            machine.check()
        due = machine.wake_at()
        if due is None:
            return
        wanted = due if due > self.now else self.now
        before = host.wake_at
        if before is None or before > wanted:
            host.wake_at = wanted
            self.at(wanted, self._ring, host, host.life, wanted)

    def _ring(self, host: Host, life: int, wanted: float) -> None:
        machine = host.machine
        if machine is None or host.life != life or host.wake_at != wanted:
            return
        host.wake_at = None
        due = machine.wake_at()
        if due is None:
            return
        if due <= self.now:
            self._take(host, machine.wake(self.now))
        else:  # what it was set for has been put off
            host.wake_at = due
            self.at(due, self._ring, host, life, due)

    # ---- links ---------------------------------------------------------------------------------------------------

    def _dial(self, host: Host, effect: Dial) -> None:
        target = self.hosts.get(effect.peer)
        way_s = float("inf") if target is None else self._way(host.place, target.place)[0]
        if target is None or target.machine is None or way_s == float("inf"):
            self.at(self.now + REFUSED_S, self._fail, host, host.life, effect.peer)
            return
        took_s = way_s * HANDSHAKE_WAYS * (1.0 + 0.1 * self._random())
        self.at(self.now + took_s, self._open, host, host.life, target, target.life)

    def _fail(self, host: Host, life: int, peer: NodeId) -> None:
        if host.life == life and peer not in host.links:  # an attempt that another one has overtaken has no outcome
            self.feed(host, LinkDown(peer, "timeout"))

    def _open(self, host: Host, life: int, target: Host, target_life: int) -> None:
        if host.life != life:
            return
        if target.life != target_life:
            self._fail(host, life, target.node)
            return
        old = host.links.get(target.node)
        if old is not None:
            self._close(old, "replaced", (), 0.0)
            self._untold[host.node, target.node] = self._untold[target.node, host.node] = old
        # A driver says that a link is gone before it says that the next one is here.
        self._tell_down(host, target, "replaced", None)
        self._tell_down(target, host, "replaced", None)
        link = Link(host, target)
        host.links[target.node] = target.links[host.node] = link
        self.feed(target, LinkUp(host.node, host.role))
        if link.alive:
            self.feed(host, LinkUp(target.node, target.role))

    def _hang_up(self, host: Host, effect: HangUp) -> None:
        link = host.links.get(effect.peer)
        if link is not None:
            self._close(link, effect.reason, (link.a, link.b), self._way(host.place, link.other(host).place)[0])

    def _close(self, link: Link, reason: str, told: tuple[Host, ...], after_s: float) -> None:
        link.alive = False
        for host in (link.a, link.b):
            host.links.pop(link.other(host).node, None)
        for host in told:
            self._untold[host.node, link.other(host).node] = link
            self.at(self.now + after_s, self._tell_down, host, link.other(host), reason, link)

    def _tell_down(self, host: Host, peer: Host, reason: str, link: Link | None) -> None:
        """Says that a link is gone, once; `link` None means whichever it was."""
        gone = self._untold.get((host.node, peer.node))
        if gone is None or (link is not None and gone is not link):
            return
        del self._untold[host.node, peer.node]
        self.feed(host, LinkDown(peer.node, reason))

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, host: Host, peer: NodeId, message: Any) -> None:
        """What a node's driver says by itself, without its machine; lost where there is no link."""
        self._send(host, Send(peer, message))

    def _send(self, host: Host, effect: Send) -> None:
        link = host.links.get(effect.peer)
        if link is None:
            return
        message = effect.message
        target = link.b if host is link.a else link.a
        kind = type(message).__name__
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        byte_count = len(_encode(message)) + FRAME_BYTES
        if tensors:
            byte_count += sum(ref.byte_count for ref in tensors)
            host.sent[kind] += byte_count
            step, after = (result_step(message), goes_after(message)) if host.role == "volunteer" else (-1, -1)
            queue = target.node, is_long(message), step
            item = link, target, message, byte_count, self.now
            host.uplink.add(byte_count, queue, item, self.now, step, after)
            self._watch(host)
            return
        host.sent[kind] += byte_count
        target.received[kind] += byte_count
        way_s, rate = self._way(host.place, target.place)
        arrives = self.now + way_s * (1.0 + 0.05 * self._random()) + byte_count / rate
        before = link.arrived_at.get(host.node, 0.0)
        if arrives < before:
            arrives = before
        link.arrived_at[host.node] = arrives
        self.at(arrives, self._deliver, link, target, Received(host.node, message))

    def _deliver(self, link: Link, target: Host, fact: Received) -> None:
        if link.alive:
            self.feed(target, fact)

    def _watch(self, host: Host) -> None:
        next_s = host.uplink.next_s(self.now)
        if next_s is not None:
            self.at(next_s, self._sent, host, host.uplink.turn)

    def _sent(self, host: Host, turn: int) -> None:
        """The last byte of some transfers has left."""
        if host.uplink.turn != turn:
            return
        for link, target, message, byte_count, began in host.uplink.through(self.now):
            if not link.alive:
                continue
            way_s, rate = self._way(host.place, target.place)
            through = max(target.downlink.arrives(byte_count, self.now), began + byte_count / rate)
            target.received[type(message).__name__] += byte_count
            arrives = through + way_s * (1.0 + 0.05 * self._random())
            if self._watched is not None:
                self._watched.moved(host, target, message, byte_count, began, self.now, arrives)
            self.at(arrives, self._deliver_tensors, link, target, host.node, message)
        self._watch(host)

    def _deliver_tensors(self, link: Link, target: Host, sender: NodeId, message: Any) -> None:
        if not link.alive:
            return
        keys = target.keys
        refs = tuple(TensorRef(next(keys), ref.shape, ref.form, ref.byte_count) for ref in message.tensors)
        self.feed(target, Received(sender, msgspec.structs.replace(message, tensors=refs)))

    # ---- jobs and records ----------------------------------------------------------------------------------------

    def _compute(self, host: Host, effect: Compute) -> None:
        assert host.lanes is not None
        lane, took_s = host.lanes.takes(effect.job)
        end = max(self.now, host.lane_free_at.get(lane, 0.0)) + took_s
        host.lane_free_at[lane] = end
        host.busy_s[lane] = host.busy_s.get(lane, 0.0) + took_s
        if self._watched is not None:
            self._watched.computed(host, lane, effect.job, end - took_s, end)
        self.at(end, self._computed, host, host.life, effect.job)

    def _computed(self, host: Host, life: int, job: Any) -> None:
        if host.life != life or host.lanes is None:
            return
        host.jobs[type(job).__name__] += 1
        try:
            fact: Computed | ComputeFailed = Computed(job, host.lanes.result(job))
        except CannotComputeError as error:
            fact = ComputeFailed(job, str(error))
        self.feed(host, fact)

    def _persist(self, host: Host, effect: Persist) -> None:
        byte_count = sum(ref.byte_count for ref in getattr(effect.record, "tensors", ()))
        begins = max(self.now + SYNC_S, host.disk_free_at)  # small ones are written together
        host.disk_free_at = begins + byte_count / DISK_BYTES_PER_S
        self.at(host.disk_free_at, self._persisted, host, host.life, effect)

    def _persisted(self, host: Host, life: int, effect: Persist) -> None:
        if host.life != life:
            return
        self._on_persist(host, effect.record)
        self.feed(host, Persisted(effect.record_number))

    # ---- the rest ------------------------------------------------------------------------------------------------

    def _count(self, host: Host, effect: Count) -> None:
        self.counts[effect.metric] += effect.value  # type: ignore[assignment]

    def _exit(self, host: Host, effect: Exit) -> None:
        host.exited = effect.reason
        self.at(self.now, self._ended, host, host.life)

    def _ended(self, host: Host, life: int) -> None:
        """A process that ends by itself says so: its links are closed, not silent."""
        if host.life == life:
            self.end(host, after_s=0.0)


def _nothing(host: Host, effect: Any) -> None:
    """Tensors and old records are not there, so there is nothing to forget."""
