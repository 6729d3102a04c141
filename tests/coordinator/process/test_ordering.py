"""Whoever orders something hears that it is done when no crash can undo it, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from coordinator.live.orders import Adopt, Ban, CloseInvite, NameNode, Order, Unban
from coordinator.live.records import PlanRow
from coordinator.process.ordering import ORDER_S, order_durably
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.machine import Effect, Input, Ordered, Persist, Persisted
from protocol.drive.pump import Pump
from tests.coordinator.live.desk import Desk
from tests.coordinator.live.test_adoption import SERVERS, shows, trained

NODE = NodeId("v0")


class OnADesk:
    """A desk's machine, which has started, as a pump drives it."""

    def __init__(self, desk: Desk) -> None:
        self._machine = desk.machine
        self.begun_at = desk.now

    def start(self, now: float) -> Sequence[Effect]:
        return ()

    def handle(self, fact: Input, now: float) -> Sequence[Effect]:
        return self._machine.handle(fact, self.begun_at + now)

    def wake_at(self) -> float | None:
        return None

    def wake(self, now: float) -> Sequence[Effect]:
        raise AssertionError("never asked for")

    def check(self) -> None:
        self._machine.check()


class Disk:
    """Keeps what is to be written until a test writes it; nothing else is done."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.unwritten: list[int] = []

    def persist(self, effect: Persist) -> None:
        self.records.append(effect.record)
        self.unwritten.append(effect.record_number)

    def _nothing(self, effect: Effect) -> None:
        pass

    send = dial = hang_up = compute = prune = drop_tensors = share_tensor = log = count = start_planning = _nothing


def with_a_ban() -> Desk:
    desk = Desk()
    desk.feed(Ordered(Ban(NODE, "garbage")))
    return desk


def with_a_plan_to_adopt() -> Desk:
    plan, desk = trained(), Desk()
    for node in SERVERS[:3]:
        shows(desk, node, plan)
    return desk


@pytest.mark.parametrize(
    ("make", "order"),
    [
        (Desk, Ban(NODE, "garbage")),
        (with_a_ban, Unban(NODE)),
        (Desk, CloseInvite(b"n" * 16)),
        (Desk, NameNode(NODE, "rack 7")),
        (with_a_plan_to_adopt, Adopt()),
    ],
    ids=lambda given: getattr(given, "__name__", type(given).__name__),
)
async def test_an_order_is_done_when_all_that_it_changes_is_on_the_disk(
    make: Callable[[], Desk], order: Order, autojump_clock: trio.testing.MockClock
) -> None:
    """Not while a record of it is still to be written. Where that takes too long whoever asks is told so."""
    desk, disk = make(), Disk()
    pump = Pump(OnADesk(desk), disk)
    done = trio.Event()

    async def ask() -> None:
        await order_durably(desk.machine, pump, order)
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        with pytest.raises(BadInputError, match=f"not on the coordinator's disk within {ORDER_S:.0f} s"):
            await order_durably(desk.machine, pump, order)
        assert disk.records and (order != Adopt() or isinstance(disk.records[0], PlanRow))
        nursery.start_soon(ask)  # the same again changes nothing, and waits for what is on its way
        await trio.sleep(ORDER_S / 2)
        assert not done.is_set()
        for number in disk.unwritten:
            pump.put(Persisted(number))
        disk.unwritten.clear()
        with trio.fail_after(ORDER_S):
            while not done.is_set():
                await trio.sleep(0.1)
                for number in disk.unwritten:  # a name is written anew, and a durable record may lead to others
                    pump.put(Persisted(number))
                disk.unwritten.clear()
        nursery.cancel_scope.cancel()


async def test_an_order_that_changes_nothing_is_done_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """There is nothing to write."""
    desk = Desk()
    pump = Pump(OnADesk(desk), Disk())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        await order_durably(desk.machine, pump, Unban(NODE))
        assert trio.current_time() < ORDER_S
        nursery.cancel_scope.cancel()
