"""The simulated world: the production machines under a seeded event heap, a network, disks and devices.

It knows nothing of any role: it delivers inputs, performs effects, draws delays and loses what a crash would lose.
Faults come from `weather.py`, judgement from `checkers.py`. Everything random comes from one generator, so a seed
replays; `digest` hashes every input of every machine, in order.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, Union

import msgspec

from coordinator.planning.simulator.kernel import EventHeap
from node.machine import jobs
from node.machine.records import ContributionStored, SnapshotWritten, StepCommitted
from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import TEXT_MAX
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
    Persist,
    Persisted,
    PlanReady,
    Prune,
    Received,
    Send,
    ShareTensor,
    StartPlanning,
)
from protocol.kinds import MAY_SEND, MESSAGES
from protocol.link.fields import sentences
from protocol.messages import Message
from tests.simulation.host import LATENCY_TIMES, Link, Way
from tests.simulation.host import Host as Host
from tests.simulation.lanes import FileLostError, Lanes, SharedFolder

_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Union[MESSAGES])  # noqa: UP007
ALWAYS_CHECKED = 100
"""With so many hosts or fewer a machine is asked after each input whether its invariants hold. …"""
CHECKED_BY = 10
"""… With more, once in as many inputs as there are hosts, divided by this: a coordinator's look at its members would
cost more than all else, and costs each input the same, however many there are."""
DIAL_TIMEOUT_S = 5.0
"""After this a driver gives an attempt up."""
MAY_FAIL = (
    jobs.SetUpDevice, jobs.LoadParameters, jobs.Forward, jobs.Backward, jobs.RouteEnd, jobs.WeightGradient,
    jobs.SegmentEnd, jobs.Evaluate, jobs.TakeGradient,
)  # fmt: skip
"""Jobs of a device that take memory or arithmetic; the others only let go of something, or belong to audits."""
PRUNABLE = (ContributionStored, StepCommitted, SnapshotWritten)
"""What a journal forgets when it is told to prune; the small records of a ledger stay for 10,000 steps more."""


class Watcher:
    """Sees everything that happens; the checkers override what they judge."""

    def stepped(self, world: World, host: Host, effects: list[Effect]) -> None:
        """A machine has handled an input; its effects are about to be performed."""

    def performed(self, world: World, host: Host) -> None:
        """The effects of an input are performed."""

    def durable(self, world: World, host: Host, record: Any, tensors: dict[int, Any]) -> None:
        """A record is on the disk of `host`, with the values of its tensors by key."""

    def record_lost(self, world: World, host: Host, record: Any) -> None:
        """A record that the disk of `host` had acknowledged is not there any more."""

    def disk_lost(self, world: World, host: Host) -> None:
        """The disk of `host` is empty again."""

    def disk_moved(self, world: World, host: Host, other: Host) -> None:
        """What was on the disk of `host` is on that of `other`."""

    def restored(self, world: World, host: Host, records: list[Any]) -> None:
        """The disk of `host` has only these records any more: it is an older copy."""


class World:
    """Hosts, links and time."""

    def __init__(self, seed: int, watcher: Watcher) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.hosts: dict[NodeId, Host] = {}
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self.shared = SharedFolder()
        self.latency_s = 0.02
        self.bytes_per_s = 2e7
        self.disk_s = 0.004
        self.steps = 0
        self.checked_every = 1
        """Inputs between two looks at invariants."""
        self.counts: dict[str, float] = {}
        self.log: deque[str] = deque(maxlen=400)
        self.linked: Callable[[Link], None] = lambda link: None
        """A link is up: whoever measures links in a real node begins now."""
        self.on_exit: Callable[[Host], None] = lambda host: None
        """A process has ended by itself: whoever looks after it may start it again."""
        self.kill_at: Callable[[Host, str, Effect], bool] = lambda host, moment, effect: False
        """Asked `before` and `after` every send and durable write: whether the process dies at this very point."""
        self.plan: Callable[[Any], Any] = lambda problem: None
        """What a planner answers."""
        self.blocked: dict[frozenset[NodeId], None] = {}
        """Pairs between which no link comes about."""
        self.before_received: Callable[[Host, Received], None] = lambda host, fact: None
        """What a driver keeps on the disk of a message before its machine hears of it."""
        self._untold: dict[tuple[NodeId, NodeId], tuple[str, int, Link]] = {}
        """(host, peer) whose link is gone without the host having noticed: why, and in which life of the host."""
        self._heap: EventHeap[Callable[[], object]] = EventHeap()
        self._watcher = watcher
        self._hash = hashlib.blake2b(digest_size=16)

    # ---- time ----------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, event: Callable[[], object]) -> None:
        self._heap.push(self.now + delay_s, event)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Runs events until the time is over, nothing is left, or `stop` says so."""
        while self._heap and self._heap.next_s() <= until_s and not stop():
            self.now, events = self._heap.pop_instant()
            for event in events:
                event()
        if not stop():
            self.now = max(self.now, until_s)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def add(self, host: Host) -> Host:
        self.hosts[host.node] = host
        if len(self.hosts) > ALWAYS_CHECKED:
            self.checked_every = len(self.hosts) // CHECKED_BY
        return host

    def start(self, host: Host) -> None:
        """A process starts; its disk is as it was."""
        assert host.machine is None
        if host.gone:
            return
        host.life += 1
        host.started_at = self.now
        host.exited = ""
        host.hung, host.held_up, host.hangs_for_good = {}, {}, False
        host.store = {}
        host.keys = count(1)
        host.lanes = Lanes(host.store, host.files, self.shared, 1e9 * host.speed, mounted=host.mounted)
        host.lane_free_at = {}
        host.jobs = deque()
        host.machine = host.build(host, self.rng)
        self._perform(host, list(host.machine.start(host.clock(self.now))))

    def crash(self, host: Host, lose_disk: bool = False, last_words: bool | None = None) -> None:
        """kill -9. Of the records on their way to the disk, some first ones may have arrived.

        Args:
            last_words: whether what it had sent still arrives; None leaves it to chance, link by link.
        """
        if host.machine is None:
            return
        for _ in range(self.rng.randint(0, len(host.writing))):
            self._write(host)
        host.writing.clear()
        host.inbox.clear()
        host.machine = None
        host.paused = False
        host.life += 1
        host.wake_at = None
        if lose_disk:
            host.records.clear()
            host.files.clear()
            host.emptied = host.emptied or not host.harmed
            host.harmed = True
            self._watcher.disk_lost(self, host)
        for link in [link for link in self.links.values() if host.node in (link.a, link.b)]:
            heard = self.rng.random() < 0.5 if last_words is None else last_words
            self._close(
                link, "connection reset", told=link.other(host.node), last_words_of=host.node if heard else None
            )

    def forget(self, host: Host, index: int) -> None:
        """The disk has lied about a sync: this record was never written."""
        assert host.machine is None, "a disk lies about what it has when its computer goes down"
        record, _ = host.records.pop(index)
        host.harmed, host.emptied = True, False
        self._watcher.record_lost(self, host, record)

    def restore(self, host: Host, count: int) -> None:
        """Somebody puts a copy of its disk back that was made when it had so many records."""
        assert host.machine is None, "nobody changes a disk under a running process"
        del host.records[count:]
        host.files.clear()
        self._watcher.restored(self, host, [record for record, _ in host.records])

    def put_back(self, host: Host, records: list[tuple[Any, dict[int, Any]]], files: dict[str, Any]) -> None:
        """Its disk is again as it was when `records` and `files` were taken from it."""
        assert host.machine is None, "nobody changes a disk under a running process"
        host.records, host.files = records, {**files, "generation": host.files.get("generation", 0)}
        self._watcher.restored(self, host, [record for record, _ in host.records])

    def move_disk(self, host: Host, other: Host) -> None:
        """What is on one computer's disk is on another's from now on."""
        assert host.machine is None and other.machine is None, "nobody takes a disk out of a running computer"
        other.records, host.records = host.records, []
        other.files, host.files = host.files, {}
        other.harmed, other.emptied = host.harmed, host.emptied
        self._watcher.disk_moved(self, host, other)

    def pause(self, host: Host, seconds: float, clock_stands: bool) -> None:
        """The computer stands still: a suspended virtual machine, or a stopped process (whose clock goes on)."""
        if host.machine is None or host.paused:
            return
        host.paused = True
        host.clock_stands = clock_stands
        start, life = self.now, host.life
        self.at(seconds, lambda: self.resume(host) if host.life == life and host.paused_at == start else None)
        host.paused_at = start

    def resume(self, host: Host) -> None:
        """It goes on, and finds all at once what came meanwhile."""
        if not host.paused:
            return
        host.paused = False
        if host.clock_stands:
            host.lag_s += self.now - host.paused_at
        host.wake_at = None
        life = host.life
        if self.rng.random() < 0.5:
            self._arm(host)
        while host.inbox and host.life == life and not host.paused:
            self.feed(host, host.inbox.popleft())
        self._arm(host)

    def hang(self, host: Host, lane: str) -> None:
        """From now on nothing ends in a lane, or on the disk; the process is as lively as before."""
        host.hung.setdefault(lane, self.now)

    def go_on(self, host: Host, lane: str) -> None:
        """What was held up there ends."""
        since, held_up = host.hung.pop(lane, None), host.held_up.pop(lane, ())
        if since is not None:
            host.hung_spans[lane] = (since, self.now)
            if held_up:
                host.hung_before = (since, self.now)
        for end in held_up:
            end()

    def hung_s(self, host: Host) -> float:
        """For how long something hangs there, or hung until a moment ago: what others know of it is a little older."""
        begun, ended = host.hung_before
        before_s = self.now - begun if self.now - ended < 5.0 else 0.0
        return max([before_s, *(self.now - since for lane, since in host.hung.items() if lane in host.held_up)])

    def _ends(self, host: Host, lane: str, life: int, end: Callable[[], None]) -> None:
        if host.life == life:
            if lane in host.hung:
                host.held_up.setdefault(lane, deque()).append(end)
            else:
                end()

    def cut(self, link: Link) -> None:
        """A link breaks; each side notices in its own time."""
        self._close(link, "broken", told=None)

    # ---- inputs --------------------------------------------------------------------------------------------------

    def feed(self, host: Host, fact: Input) -> None:
        """Gives a machine an input now."""
        if host.machine is None:
            return
        if host.paused:
            host.inbox.append(fact)
            return
        if isinstance(fact, Received):
            self.before_received(host, fact)
        self._hash.update(f"{self.now:.9f} {host.node} {fact!r}\n".encode())
        self._perform(host, list(host.machine.handle(fact, host.clock(self.now))))

    def _perform(self, host: Host, effects: list[Effect]) -> None:
        self.steps += 1
        machine = host.machine
        assert machine is not None
        self._watcher.stepped(self, host, effects)
        for effect in effects:
            if self._dies(host, "before", effect):
                return
            self._do(host, effect)
            if isinstance(effect, Send) and self._dies(host, "after", effect):
                return
        if not self.steps % self.checked_every:
            machine.check()
        self._watcher.performed(self, host)
        self._arm(host)

    def _dies(self, host: Host, moment: str, effect: Effect) -> bool:
        if not isinstance(effect, (Send, Persist)) or not self.kill_at(host, moment, effect):
            return False
        self.crash(host, last_words=moment == "after")
        return True

    def _arm(self, host: Host) -> None:
        if host.machine is None or host.paused:
            return
        clock_s = host.machine.wake_at()
        if clock_s is None:
            return
        wanted = max(host.world_time(clock_s), self.now)
        if host.wake_at is not None and self.now < host.wake_at <= wanted:
            return
        host.wake_at = wanted
        life = host.life

        def ring() -> None:
            if host.life != life or host.machine is None or host.paused or host.wake_at != wanted:
                return
            host.wake_at = None
            due = host.machine.wake_at()
            if due is not None and due <= host.clock(self.now):
                self._perform(host, list(host.machine.wake(host.clock(self.now))))
            else:
                self._arm(host)

        self.at(wanted - self.now, ring)

    # ---- effects -------------------------------------------------------------------------------------------------

    def _do(self, host: Host, effect: Effect) -> None:
        match effect:
            case Send():
                self.say(host, effect.peer, effect.message)
            case Dial():
                self.dial(host, effect.peer, effect.addresses)
            case HangUp():
                link = self._link(host.node, effect.peer)
                if link is not None:
                    self._close(link, effect.reason, told=None)
            case Compute():
                self._compute(host, effect.job)
            case Persist():
                self._persist(host, effect)
            case Prune():
                self._to_disk(host, -1, effect, {})
            case DropTensors():
                for key in effect.keys:
                    assert key in host.store, f"{host.node} drops tensor {key} twice"
                    del host.store[key]
            case ShareTensor():
                host.store[effect.copy] = host.store[effect.key]
            case Log():
                self.log.append(f"{self.now:9.3f} {host.node:<4} {effect.event} {effect.fields}")
            case Count():
                self.counts[effect.metric] = self.counts.get(effect.metric, 0.0) + effect.value
            case StartPlanning():
                life = host.life
                answer = self.plan(effect.problem)
                fact = PlanReady(effect.number, answer.proposal, answer.sentence)
                # Now and then longer than the coordinator's patience.
                delay_s = self.rng.choice([0.5, 2.0, 2.0, 5.0, 60.0])
                self.at(delay_s, lambda: self.feed(host, fact) if host.life == life else None)
            case Exit():
                host.exited = effect.reason
                self.log.append(f"{self.now:9.3f} {host.node:<4} exits: {effect.reason}")
                self.at(0.0, lambda: self.crash(host))
                self.on_exit(host)

    def _link(self, a: NodeId, b: NodeId) -> Link | None:
        return self.links.get((min(a, b), max(a, b)))

    def dial(self, host: Host, peer: NodeId, addresses: tuple[str, ...]) -> None:
        """Tries to open a link where somebody thinks that the peer is; one that is open already is replaced."""
        life = host.life
        target = self.hosts.get(peer)

        def arrive() -> None:
            if host.life != life or host.machine is None:
                return
            here = target is not None and target.machine is not None and target.address in addresses
            if target is None or not here or frozenset((host.node, peer)) in self.blocked:
                self.feed(host, LinkDown(peer, "refused"))
                return
            if target.paused or host.paused:
                self.at(DIAL_TIMEOUT_S, time_out)
                return
            old = self._link(host.node, peer)
            if old is not None:
                self._close(old, "replaced", told=None)
            # A driver says that a link is gone before it says that the next one is here.
            self._tell_down(host.node, peer)
            self._tell_down(peer, host.node)
            link = Link(
                min(host.node, peer),
                max(host.node, peer),
                self.latency_s * self.rng.uniform(*LATENCY_TIMES),
                self.bytes_per_s,
                opened_at=self.now,
            )
            self.links[link.a, link.b] = link
            self.feed(target, LinkUp(host.node, host.role))
            self.feed(host, LinkUp(peer, target.role))
            self.linked(link)

        def time_out() -> None:
            # An attempt that another one has overtaken has no outcome.
            if host.life == life and self._link(host.node, peer) is None:
                self.feed(host, LinkDown(peer, "timeout"))

        self.at(self.latency_s * self.rng.uniform(1.0, 3.0), arrive)

    def steady(self, a: NodeId, b: NodeId) -> bool:
        """Whether a link between the two has carried everything for a while."""
        link = self._link(a, b)
        well = link is not None and link.alive and not link.silent and not link.slow_s
        return well and link is not None and self.now - link.opened_at >= 12.0

    def _close(self, link: Link, reason: str, told: NodeId | None, last_words_of: NodeId | None = None) -> None:
        if not link.alive:
            return
        link.alive = False
        link.last_words_of = last_words_of
        if self.links.get((link.a, link.b)) is link:
            del self.links[link.a, link.b]
        last = max((lane.arrived_at for (node, _), lane in link.lanes.items() if node == last_words_of), default=0.0)
        for node in (link.a, link.b) if told is None else (told,):
            self._untold[node, link.other(node)] = (reason, self.hosts[node].life, link)
            delay_s = max(0.0, last - self.now) + self.rng.uniform(0.0, self.latency_s)
            self.at(delay_s, partial(self._tell_down, node, link.other(node), link))

    def _tell_down(self, node: NodeId, peer: NodeId, link: Link | None = None) -> None:
        """Says that a link is gone, once; `link` None means whichever it was."""
        untold = self._untold.get((node, peer))
        if untold is None or (link is not None and untold[2] is not link):
            return
        reason, life, gone = self._untold.pop((node, peer))
        gone.last_words_of = None
        if self.hosts[node].life == life:
            self.feed(self.hosts[node], LinkDown(peer, reason))

    def say(self, host: Host, peer: NodeId, message: Message) -> None:
        """A message of a host's machine, or of the driver beside it, goes on its way."""
        assert host.lies or self._may_send(host, peer, message), f"{host.node} may not say {message} to {peer}"
        link = self._link(host.node, peer)
        if link is None or link.silent:
            return
        tensors: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        values = [host.store[ref.key] for ref in tensors]
        for name in sentences(type(message)):  # as the codec does it
            message = msgspec.structs.replace(message, **{name: getattr(message, name)[:TEXT_MAX]})
        packed = msgspec.msgpack.encode(message)
        byte_count = len(packed) + sum(ref.byte_count for ref in tensors)
        lane = link.lanes.setdefault((host.node, bool(tensors)), Way())
        lane.free_at = max(self.now, lane.free_at) + byte_count / link.bytes_per_s
        way_s = link.latency_s * self.rng.uniform(0.9, 1.1) + link.slow_s.get(host.node, 0.0)
        lane.arrived_at = max(lane.arrived_at, lane.free_at + way_s)
        target = self.hosts[peer]
        life = target.life

        def deliver() -> None:
            here = link.alive or link.last_words_of == host.node
            if not here or link.silent or target.life != life or target.machine is None:
                return
            if not self._may_send(host, peer, message):
                self._close(link, "role", told=None)
                return
            received = _DECODER.decode(packed)
            if tensors:
                own = []
                for ref, value in zip(tensors, values, strict=True):
                    key = next(target.keys)
                    target.store[key] = value
                    own.append(TensorRef(key, ref.shape, ref.form, ref.byte_count))
                received = msgspec.structs.replace(received, tensors=tuple(own))
            self.feed(target, Received(host.node, received))

        self.at(lane.arrived_at - self.now, deliver)

    def _compute(self, host: Host, job: jobs.Job) -> None:
        own = "sums" if isinstance(job, jobs.SUM_JOBS) else "server"
        lane = "device" if isinstance(job, jobs.DEVICE_JOBS) else own
        start = max(self.now, host.lane_free_at.get(lane, 0.0))
        end = start + _duration_s(job) * host.slowness / host.speed * self.rng.uniform(0.8, 1.2)
        host.lane_free_at[lane] = end
        host.jobs.append(job)
        inputs = {ref.key: host.store[ref.key] for ref in _input_refs(job)}
        life = host.life

        def finish() -> None:
            if host.life != life or host.lanes is None:
                return
            host.jobs.remove(job)
            try:
                if host.failures_due and isinstance(job, MAY_FAIL):
                    host.failures_due -= 1
                    host.lanes.fail(job, inputs)
                    raise FileLostError(host.fails_for)
                result = host.lanes.perform(job, inputs)
            except FileLostError as error:
                self.feed(host, ComputeFailed(job, str(error)))
            else:
                self.feed(host, Computed(job, result))

        self.at(end - self.now, lambda: self._ends(host, lane, life, finish))

    def _may_send(self, host: Host, peer: NodeId, message: Message) -> bool:
        return (host.role, self.hosts[peer].role) in MAY_SEND[type(message)]

    def _persist(self, host: Host, effect: Persist) -> None:
        tensors = {ref.key: host.store[ref.key] for ref in getattr(effect.record, "tensors", ())}
        self._to_disk(host, effect.record_number, effect.record, tensors)

    def _to_disk(self, host: Host, number: int, item: Any, tensors: dict[int, Any]) -> None:
        host.writing.append((number, item, tensors))
        life = host.life

        def durable() -> None:
            if host.life != life:
                return
            number, record = self._write(host)
            if number >= 0 and not self._dies(host, "after", Persist(number, record)):
                self.feed(host, Persisted(number))

        delay_s = self.disk_s * host.disk_slowness * self.rng.uniform(1.0, 1.05)
        self.at(delay_s, lambda: self._ends(host, "disk", life, durable))

    def _write(self, host: Host) -> tuple[int, Any]:
        """The first of what waits is on the disk."""
        number, item, tensors = host.writing.popleft()
        if isinstance(item, Prune):
            self._prune(host, item.step)
        else:
            host.records.append((item, tensors))
            self._watcher.durable(self, host, item, tensors)
        return number, item

    @staticmethod
    def _prune(host: Host, step: int) -> None:
        gone = [record for record, _ in host.records if record.step < step and isinstance(record, PRUNABLE)]
        host.records = [
            (record, tensors)
            for record, tensors in host.records
            if record.step >= step or not isinstance(record, PRUNABLE)
        ]
        for record in gone:
            if isinstance(record, SnapshotWritten):
                host.files.pop(record.file, None)


def _input_refs(job: jobs.Job) -> list[TensorRef]:
    """The tensors that a job reads: a driver takes them when the job is ordered."""
    refs: list[TensorRef] = []
    for name in job.__slots__:
        value = getattr(job, name)
        if isinstance(value, TensorRef):
            refs.append(value)
        elif isinstance(value, tuple):
            refs += [item for item in value if isinstance(item, TensorRef)]
    return refs


def _duration_s(job: jobs.Job) -> float:
    """Modelled time of a job: only the order of events depends on it."""
    match job:
        case jobs.Forward():
            return 0.05
        case jobs.Backward() | jobs.RouteEnd():
            return 0.06 if job.weights_later else 0.12
        case jobs.WeightGradient():
            return 0.06
        case jobs.SegmentEnd():
            return 0.12
        case jobs.Fold() | jobs.Reduce() | jobs.Apply() | jobs.LoadParameters() | jobs.TakeGradient():
            return 0.01
        case jobs.SetUpServer():
            return 0.05
        case jobs.Benchmark() | jobs.PrepareData() | jobs.WriteCheckpoint() | jobs.WriteSnapshot():
            return 0.1
        case _:
            return 0.001
