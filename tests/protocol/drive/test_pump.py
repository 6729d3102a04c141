"""The pump: order, wake-ups, back-pressure, threads, and the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import trio
import trio.testing

from protocol.base.ids import NodeId
from protocol.base.limits import INBOX_MAX
from protocol.base.machine import (
    Compute,
    Count,
    Dial,
    DropTensors,
    Effect,
    Exit,
    HangUp,
    Input,
    LinkDown,
    Log,
    Persist,
    Persisted,
    Prune,
    Send,
    ShareTensor,
    Told,
)  # fmt: skip
from protocol.drive.pump import Pump
from protocol.messages import Ping

_PEER = NodeId("p")
_ALL = (
    Send(_PEER, Ping(number=1)), Dial(_PEER, ()), HangUp(_PEER, "x"), Compute(1), Persist(1, None), Prune(1),
    DropTensors((1,)), ShareTensor(1, 2), Log("info", "x", {}), Count("x"),
)  # fmt: skip


class _Machine:
    """Writes down what it is given, answers `Told` with all effects, and wakes when told to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object, float]] = []
        self.wake_times: list[float] = []
        self.checks = 0

    def last(self) -> object:
        return self.seen[-1][1]

    def start(self, now: float) -> Sequence[Effect]:
        self.seen.append(("start", None, now))
        return [Persist(0, "first")]

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        self.seen.append(("fact", fact, now))
        match fact:
            case Told(what="all"):
                return _ALL
            case Told(what="stop"):
                return [Send(_PEER, Ping(number=9)), Exit("told to"), Send(_PEER, Ping(number=10))]
            case Told(what="sleep"):
                self.wake_times.append(now + 5.0)
        return []

    def wake_at(self) -> float | None:
        return self.wake_times[0] if self.wake_times else None

    def wake(self, now: float) -> Sequence[Effect]:
        self.seen.append(("wake", self.wake_times.pop(0), now))
        return []

    def check(self) -> None:
        self.checks += 1


class _Handlers:
    """Performs effects by writing them down; what was persisted is answered at once."""

    def __init__(self) -> None:
        self.performed: list[Effect] = []
        self.pump: Pump | None = None

    def note(self, effect: Effect) -> None:
        self.performed.append(effect)

    send = dial = hang_up = compute = prune = drop_tensors = share_tensor = log = count = start_planning = note

    def persist(self, effect: Persist) -> None:
        self.note(effect)
        assert self.pump is not None
        self.pump.put(Persisted(effect.record_number))


def _pump(machine: _Machine, *, check: bool = False) -> tuple[Pump, _Handlers]:
    handlers = _Handlers()
    handlers.pump = Pump(machine, handlers, check=check)
    return handlers.pump, handlers


async def test_effects_in_their_order() -> None:
    """Every effect reaches its handler, in order, those behind `Exit` too; facts come in order; then it ends."""
    machine = _Machine()
    pump, handlers = _pump(machine, check=True)
    for what in ("all", "stop", "late"):
        pump.put(Told(what))
    assert await pump.run() == "told to"
    assert handlers.performed == [Persist(0, "first"), *_ALL, Send(_PEER, Ping(number=9)), Send(_PEER, Ping(number=10))]
    assert [fact for kind, fact, _ in machine.seen if kind == "fact"] == [Told("all"), Told("stop")]
    assert machine.checks == 3


async def test_facts_while_it_sleeps() -> None:
    """A fact from a handler and one from another task each wake the pump."""
    machine = _Machine()
    pump, _ = _pump(machine)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            await trio.testing.wait_all_tasks_blocked()
            assert machine.last() == Persisted(0)
            pump.put(LinkDown(_PEER, "x"))
            await trio.testing.wait_all_tasks_blocked()
            assert machine.last() == LinkDown(_PEER, "x")
            pump.put(Told("stop"))
    assert machine.last() == Told("stop")


async def test_wakes_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """`wake` is called when `wake_at` says, not before, even when facts arrive meanwhile."""
    machine = _Machine()
    pump, _ = _pump(machine)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        pump.put(Told("sleep"))
        await trio.sleep(3)
        pump.put(Told("nothing"))
        await trio.sleep(4)
        pump.put(Told("stop"))
    (woken,) = [now for kind, _, now in machine.seen if kind == "wake"]
    assert woken == pytest.approx(began + 5.0, abs=0.01)


async def test_room() -> None:
    """Who feeds from the network waits while the inbox is full, and goes on when it has emptied."""
    pump, _ = _pump(_Machine())
    for _ in range(INBOX_MAX):
        pump.put(Told("nothing"))
    with trio.move_on_after(0.01) as scope:
        await pump.room()
    assert scope.cancelled_caught
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            await pump.room()
            pump.put(Told("stop"))


async def test_other_tasks_get_their_turn() -> None:
    """A machine that is always due does not keep the loop to itself."""

    class Busy(_Machine):
        def wake_at(self) -> float | None:
            return 0.0

        def wake(self, now: float) -> Sequence[Effect]:
            return []

    pump, _ = _pump(Busy())
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            for _ in range(5):
                await trio.sleep(0)
            nursery.cancel_scope.cancel()


async def test_a_thousand_messages_are_not_one_turn() -> None:
    """Other tasks of the loop, such as the links that write and readers of an API, get turns among them."""

    class Loud(_Machine):
        def start(self, now: float) -> Sequence[Effect]:
            return [Send(_PEER, Ping(number=number)) for number in range(1000)]

    pump, handlers = _pump(Loud())
    between = [0]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            while len(handlers.performed) < 1000:
                await trio.sleep(0)
                between.append(len(handlers.performed))
            nursery.cancel_scope.cancel()
    assert handlers.performed == [Send(_PEER, Ping(number=number)) for number in range(1000)]
    assert max(later - before for before, later in pairwise(between)) < 100
