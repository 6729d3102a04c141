"""The driver: what comes from outside is looked at once, and one bad peer costs only its own link."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import trio
import trio.testing

from node.compute.forms import packed
from node.compute.lane import Lane, Outcome
from node.compute.wire import encode
from node.machine.jobs import DropGraphs, Forward
from node.measure.meter import piece
from node.process import screening
from node.process.device_start import DeviceOptions
from node.process.driver import Driver
from node.process.metrics import NodeMetrics
from node.process.screening import all_finite
from node.process.store import StoreFullError, TensorStore
from protocol.base.forms import BLOCK_FORMS, NOT_FINITE
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.base.machine import (
    Compute,
    Computed,
    DeviceLost,
    DropTensors,
    HangUp,
    LinkDown,
    LinkMoved,
    LinkUp,
    Received,
    Send,
)
from protocol.messages import (
    Activation,
    Contribute,
    MeasureAsk,
    MeasureData,
    MeasureGot,
    Message,
    NodeReport,
    Output,
    Parameters,
    Ping,
    PlanChanged,
    Ready,
    Welcome,
)
from tests.node.setting import TICKET

PEER = NodeId("p" * 52)
TASK = TaskId(0, 0, 0, "F")
BACKWARD = TaskId(0, 0, 0, "B")


class FakeLink:
    """What the driver uses of a link; remembers."""

    def __init__(self, role: str, peer: NodeId = PEER) -> None:
        self.peer, self.role, self.address = peer, role, "192.0.2.1:1"
        self.path, self.dialled = "tcp", False
        self.public_key = self.credential = b""
        self.sent: list[tuple[Message, list[bytes]]] = []
        self.closed: list[str] = []
        self.faults: list[str] = []
        self.was_silent_s = 0.0
        self.heard_at, self.has_much_under_way = float("-inf"), False

    def send(self, message: Message, buffers: list[Any] = []) -> None:  # noqa: B006
        self.sent.append((message, [bytes(buffer) for buffer in buffers]))

    def close(self, reason: str) -> None:
        self.closed.append(reason)

    def at_fault(self, reason: str = "unexpected") -> None:
        self.faults.append(reason)


class FakePump:
    """An inbox that is looked at."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

    def put(self, fact: Any) -> None:
        self.facts.append(fact)

    async def room(self) -> None:
        await trio.lowlevel.checkpoint()


class FakeConnector:
    """Hears of links and takes nothing."""

    def on_up(self, link: Any) -> None: ...

    def on_down(self, link: Any, reason: str) -> None: ...

    def on_moved(self, link: Any) -> None: ...

    def on_message(self, message: Message) -> bool:
        return False


async def ignore(word: Welcome | PlanChanged) -> None:
    """Keeps nothing of a welcome or a plan."""


@pytest.fixture
async def driver(nursery: trio.Nursery) -> Driver:
    """A server's driver without a network."""
    metrics = NodeMetrics("server")
    metrics.set_run("tiny")
    made = Driver(TensorStore(), metrics, "server", on_welcome=ignore)
    made.pump = FakePump()  # type: ignore[assignment]
    made.nursery = nursery
    made.connector = FakeConnector()  # type: ignore[assignment]
    return made


def contribution(values: list[float], form: str = "fp32") -> tuple[Contribute, bytearray]:
    """A volunteer's contribution and its bytes."""
    array = np.array(values, dtype=np.float64 if form == "fp64" else np.float32)
    if form == "bf16":
        data = bytearray((array.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    else:
        data = bytearray(array.tobytes())
    message = Contribute(
        ledger_generation=1,
        contribution=ContributionId(PEER, 1, 1),
        step=0,
        version=0,
        tasks=(TASK,),
        losses=(),
        tickets=(TICKET,),
        shard=0,
        tensors=(TensorRef(0, (len(values),), form, len(data)),),  # type: ignore[arg-type]
    )
    return message, data


class FakeDeviceLane:
    """Begins anew unless it was told to end, once the system lets it."""

    def __init__(self, over: bool, refusals: int = 0) -> None:
        self._over, self._refusals = over, refusals

    def start_again(self) -> bool:
        if self._refusals:
            self._refusals -= 1
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return not self._over


@pytest.mark.trio
async def test_the_machine_hears_that_a_link_goes_another_way(driver: Driver) -> None:
    """What comes late over it says nothing of its sender."""
    link = FakeLink("volunteer")
    link.was_silent_s = 4.5
    driver.on_moved(link)  # type: ignore[arg-type]
    assert driver.pump.facts == [LinkMoved(PEER, 4.5)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.trio
async def test_the_machine_hears_of_a_lost_device_unless_a_pause_has_ended_it(driver: Driver, paused: bool) -> None:
    """A pause that came first has handed everything back: there is no fresh device to go on with."""
    driver.device = FakeDeviceLane(over=paused)  # type: ignore[assignment]
    driver._device_lost("it was unplugged")
    await trio.testing.wait_all_tasks_blocked()
    assert driver.pump.facts == ([] if paused else [DeviceLost("it was unplugged")])  # type: ignore[attr-defined]


@pytest.mark.trio
async def test_a_device_whose_process_cannot_be_started_at_once_is_tried_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has just killed one for want of memory; trio ended with an internal error of its own."""
    monkeypatch.setattr("node.process.driver.AGAIN_S", (0.0,) * 4)
    driver.device = FakeDeviceLane(over=False, refusals=3)  # type: ignore[assignment]
    driver._device_lost("it was killed")
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert driver.pump.facts == [DeviceLost("it was killed")]  # type: ignore[attr-defined]


@pytest.mark.trio
async def test_a_device_whose_process_can_never_be_started_ends_the_daemon_with_a_sentence(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unit begins it again."""
    monkeypatch.setattr("node.process.driver.AGAIN_S", (0.0,) * 4)
    driver.device = FakeDeviceLane(over=False, refusals=9)  # type: ignore[assignment]
    with pytest.raises(StoreFullError, match=r"it was killed.*no other can be started"):
        await driver._start_device_again("it was killed")


@pytest.mark.trio
async def test_a_device_whose_process_the_system_has_no_room_for_is_a_sentence_at_the_first_start_too(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes is reached: it was a traceback."""

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("subprocess.Popen", refuses)
    with pytest.raises(StoreFullError, match=r"device's process cannot be started: Resource temporarily"):
        driver.add_device(DeviceOptions())
    assert driver.device is None


@pytest.mark.parametrize("form", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.trio
async def test_parameters_that_are_not_finite_are_refused_and_nobody_else(
    driver: Driver, form: str, bad: float
) -> None:
    """Its link is closed with a named reason, a counter grows, nothing reaches the machine or stays in the store."""
    honest, liar = FakeLink("volunteer"), FakeLink("volunteer", NodeId("q" * 52))
    driver.on_up(honest)  # type: ignore[arg-type]
    driver.on_up(liar)  # type: ignore[arg-type]
    gradient, data = contribution([1.0, bad, 2.0], form)
    message = Parameters(ledger_generation=1, shard=0, version=0, tensors=gradient.tensors)
    await driver.on_message(liar, message, (data,))  # type: ignore[arg-type]
    fine, data = contribution([1.0, 3.0, 2.0], form)
    await driver.on_message(honest, fine, (data,))  # type: ignore[arg-type]
    assert liar.closed == liar.faults == ["not_finite"] and honest.closed == honest.faults == []
    received = [fact for fact in driver.pump.facts if isinstance(fact, Received)]  # type: ignore[attr-defined]
    assert [fact.peer for fact in received] == [PEER]
    assert len(driver._store) == 1
    name, labels = "barnraise_transport_rejected_messages_total", {"reason": "not_finite"}
    assert driver._metrics.registry.get_sample_value(name, labels) == 1.0


@pytest.mark.parametrize("form", ["fp32", "bf16", "q8", "d4"])
@pytest.mark.trio
async def test_results_of_a_run_that_diverges_pass_and_what_nobody_can_decode_does_not(
    driver: Driver, form: str
) -> None:
    """An honest volunteer's activations may overflow: its result goes on, so that the step is skipped. Broken bytes
    would stop whoever decodes them."""
    honest, liar = FakeLink("volunteer"), FakeLink("volunteer", NodeId("q" * 52))
    for link, broken in ((honest, False), (liar, True)):
        driver.on_up(link)  # type: ignore[arg-type]
        data = bytearray(encode(torch.tensor([1.0, torch.inf, 2.0]), form))
        if broken and form in BLOCK_FORMS:
            data[4] = 1  # an outlier that is not there
        ref = TensorRef(0, (3,), form, len(data))  # type: ignore[arg-type]
        message = Output(ledger_generation=1, task=TASK, ticket=TICKET, tensors=(ref,))
        await driver.on_message(link, message, (data,))  # type: ignore[arg-type]
    assert honest.closed == []
    assert liar.closed == (["decode"] if form in BLOCK_FORMS else [])
    received = [fact.peer for fact in driver.pump.facts if isinstance(fact, Received)]  # type: ignore[attr-defined]
    assert received == [PEER] + [link.peer for link in (liar,) if not link.closed]


@pytest.mark.trio
async def test_gradients_in_whole_numbers_are_looked_at_too(driver: Driver) -> None:
    """One that stands for a gradient that was not finite is of infinite size, so that somebody does it again; one that
    cannot be unpacked would stop the shard that keeps it."""
    honest, liar = FakeLink("volunteer"), FakeLink("volunteer", NodeId("q" * 52))
    for link, first, broken in ((honest, 7, False), (honest, NOT_FINITE, False), (liar, 7, True)):
        driver.on_up(link)  # type: ignore[arg-type]
        data = packed.pack(np.array([first, *[0] * 99], dtype=np.int32))[: -1 if broken else None]
        message, _ = contribution([0.0])
        ref = TensorRef(0, (100,), "gi", len(data))
        message = msgspec.structs.replace(message, tasks=(BACKWARD,), tensors=(ref,))
        await driver.on_message(link, message, (data,))  # type: ignore[arg-type]
    messages = [fact.message for fact in driver.pump.facts if isinstance(fact, Received)]  # type: ignore[attr-defined]
    assert [message.square_norm if isinstance(message, Contribute) else None for message in messages] == [
        0.0,
        float("inf"),
    ]
    assert honest.closed == [] and liar.closed == ["decode"]


@pytest.mark.trio
async def test_no_value_of_a_contribution_can_wrap_the_sum_of_all(driver: Driver) -> None:
    """Each of a step's eight tasks may add an eighth of what 32 bits hold; two tasks a quarter. A value more, and its
    sender is refused before anything is written: two of them would have turned the sign of a sum."""
    driver.step_tasks = 8
    most = (2**31 - 1) // 8
    for tasks, value, closed in ((1, most, []), (2, -2 * most, []), (1, most + 1, ["size"]), (2, 2**31 - 1, ["size"])):
        link = FakeLink("volunteer")
        driver.on_up(link)  # type: ignore[arg-type]
        data = packed.pack(np.array([*[3] * 90, value, *[-3] * 90], dtype=np.int32))
        message, _ = contribution([0.0])
        backwards = tuple(TaskId(0, microbatch, 0, "B") for microbatch in range(tasks))
        ref = TensorRef(0, (181,), "gi", len(data))
        message = msgspec.structs.replace(message, tasks=backwards, tickets=(TICKET,) * tasks, tensors=(ref,))
        await driver.on_message(link, message, (data,))  # type: ignore[arg-type]
        assert link.closed == closed, (tasks, value)
    received = [fact for fact in driver.pump.facts if isinstance(fact, Received)]  # type: ignore[attr-defined]
    assert len(received) == 2


@pytest.mark.trio
async def test_the_size_of_a_gradient_is_measured_and_not_believed(driver: Driver) -> None:
    """A contribution that is not finite is the ledger's affair, since honest runs diverge: its sender is not cut off,
    and what it says of its size itself is replaced."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    for values, expected in (([3.0, 4.0], 25.0), ([1.0, float("nan")], float("inf"))):
        message, data = contribution(values)
        claimed = msgspec.structs.replace(message, square_norm=1e-9)
        await driver.on_message(link, claimed, (data,))  # type: ignore[arg-type]
        fact = driver.pump.facts[-1]  # type: ignore[attr-defined]
        assert isinstance(fact, Received) and isinstance(fact.message, Contribute)
        assert fact.message.square_norm == expected
    assert link.closed == []


@pytest.mark.trio
async def test_tensors_get_keys_on_the_way_in_and_lose_them_on_the_way_out(driver: Driver) -> None:
    """On the wire a reference is an index; in here it is a key of the store with the same bytes."""
    link = FakeLink("server")
    driver.on_up(link)  # type: ignore[arg-type]
    ref = TensorRef(0, (2,), "fp32", 8)
    message = Activation(ledger_generation=1, task=TASK, tensors=(ref,))
    await driver.on_message(link, message, (bytearray(b"12345678"),))  # type: ignore[arg-type]
    up, received = driver.pump.facts  # type: ignore[attr-defined]
    assert isinstance(up, LinkUp) and isinstance(received, Received)
    stored = received.message.tensors[0]  # type: ignore[attr-defined]
    assert driver._store.get(stored.key) == b"12345678"
    driver.send(Send(PEER, msgspec.structs.replace(message, tensors=(stored,))))
    driver.drop_tensors(DropTensors((stored.key,)))
    assert link.sent == [(message, [b"12345678"])]
    assert len(driver._store) == 0


@pytest.mark.trio
async def test_the_machine_says_whose_fault_a_hang_up_is(driver: Driver) -> None:
    """Only a peer whose fault it is has to wait before it may come again."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    driver.hang_up(HangUp(PEER, "not needed any more"))
    assert link.closed == ["not needed any more"] and link.faults == []
    driver.hang_up(HangUp(PEER, "role: no", fault=True))
    assert link.faults == ["unexpected"]


@pytest.mark.trio
async def test_a_peer_is_not_silent_while_a_tensor_comes_slowly(driver: Driver) -> None:
    """On a line of 0.2 Mbit/s a word waits for longer than a machine waits for one; a peer that has nothing large under
    way, or of which nothing comes, is hung up on."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    now = trio.current_time()
    for link.has_much_under_way, link.heard_at, hung_up in (
        (True, now - 3.0, 0),
        (True, now - 6.5, 1),
        (False, now, 2),
    ):
        driver.hang_up(HangUp(PEER, "silent for 6 s", silent_s=6.0))
        assert len(link.closed) == hung_up
    link.has_much_under_way, link.heard_at = True, now
    driver.hang_up(HangUp(PEER, "not needed any more"))
    assert len(link.closed) == 3


@pytest.mark.trio
async def test_what_arrives_after_a_link_went_down_is_forgotten(driver: Driver) -> None:
    """The machine never hears of a peer that it was told is gone, and nothing is sent to one."""
    link = FakeLink("server")
    driver.on_up(link)  # type: ignore[arg-type]
    driver.on_down(link, "lost")  # type: ignore[arg-type]
    await driver.on_message(link, Ping(number=1), ())  # type: ignore[arg-type]
    driver.send(Send(PEER, Ping(number=2)))
    driver.hang_up(HangUp(PEER, "why"))
    assert [type(fact) for fact in driver.pump.facts] == [LinkUp, LinkDown]  # type: ignore[attr-defined]
    assert link.sent == [] and link.closed == []


@pytest.mark.trio
async def test_who_only_measures_is_no_worker(driver: Driver) -> None:
    """The machine hears of a volunteer with its first word about work; measuring is answered, and leaves nothing."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    await driver.on_message(link, MeasureAsk(number=1, byte_count=0), ())  # type: ignore[arg-type]
    await driver.on_message(link, MeasureAsk(number=2, byte_count=4096), ())  # type: ignore[arg-type]
    data = piece(3, 4096, answers=False)
    await driver.on_message(link, data, (bytearray(4096),))  # type: ignore[arg-type]
    assert [type(message) for message, _ in link.sent] == [MeasureGot, MeasureData, MeasureGot]
    assert [len(buffers[0]) for _, buffers in link.sent if buffers] == [4096]
    assert driver.pump.facts == [] and len(driver._store) == 0  # type: ignore[attr-defined]
    ready = Ready(ledger_generation=1, hello=True, slots=0)
    await driver.on_message(link, ready, ())  # type: ignore[arg-type]
    assert [type(fact) for fact in driver.pump.facts] == [LinkUp, Received]  # type: ignore[attr-defined]
    driver.on_down(link, "lost")  # type: ignore[arg-type]
    assert isinstance(driver.pump.facts[-1], LinkDown)  # type: ignore[attr-defined]


@pytest.mark.trio
async def test_a_visit_ends_without_a_word_to_the_machine(driver: Driver) -> None:
    """Neither up nor down: nobody was there."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    driver.on_down(link, "lost")  # type: ignore[arg-type]
    assert driver.pump.facts == []  # type: ignore[attr-defined]


@pytest.mark.trio
async def test_a_peer_that_measures_without_bound_is_cut_off(driver: Driver) -> None:
    """With a reason that is counted."""
    link = FakeLink("volunteer")
    driver.on_up(link)  # type: ignore[arg-type]
    await driver.on_message(link, MeasureAsk(number=1, byte_count=1 << 30), ())  # type: ignore[arg-type]
    assert link.closed == ["unexpected"] and link.sent == []


@pytest.mark.trio
async def test_a_report_takes_along_what_only_the_driver_counts(driver: Driver) -> None:
    """Bytes by kind join the machine's counters; names that the protocol does not know are left out."""
    link = FakeLink("coordinator")
    driver.on_up(link)  # type: ignore[arg-type]
    driver.on_bytes("tx", "gradient", 100, 1)
    driver.on_bytes("tx", "gradient", 20, 1)
    driver.send(Send(PEER, NodeReport(state="training", waiting_for="", counters={"leases": 2.0, "secret": 1.0})))
    (report, _) = link.sent[0]
    assert isinstance(report, NodeReport)
    assert report.counters == {"leases": 2.0, "bytes_tx_gradient": 120.0}


@pytest.mark.trio
async def test_results_are_in_the_store_before_the_machine_hears_of_them(driver: Driver) -> None:
    """A job's bytes are handed over when it is ordered, so its input may be dropped at once."""
    seen: list[dict[int, bytes]] = []

    class Performer:
        def perform(self, job: Any, buffers: Any) -> Outcome:
            seen.append({key: bytes(buffer) for key, buffer in buffers.items()})
            if isinstance(job, DropGraphs):
                return Outcome(Computed(job, None))
            return Outcome(Computed(job, TensorRef(9, (1,), "fp32", 4)), [(TensorRef(9, (1,), "fp32", 4), b"done")])

    driver.add_lane("device", lambda deliver: Lane("device", Performer, deliver))  # type: ignore[arg-type]
    ref = driver._store.add(b"1234", (1,), "fp32")
    driver.compute(Compute(Forward(TASK, 0, ref, 9)))
    driver.drop_tensors(DropTensors((ref.key,)))
    driver.compute(Compute(DropGraphs((TASK,))))
    with trio.fail_after(10):
        while len(driver.pump.facts) < 2:  # type: ignore[attr-defined]
            await trio.sleep(0.001)
    assert seen == [{ref.key: b"1234"}, {}]
    assert driver._store.get(9) == b"done" and len(driver._store) == 1
    await trio.to_thread.run_sync(driver.close_lanes)


def test_labels_and_messages_without_tensors_are_always_finite(tmp_path: Path) -> None:
    """Whole numbers have no NaN: every bit pattern is a value."""
    refs = (TensorRef(0, (1,), "int32", 4),)
    assert all_finite(Activation(ledger_generation=1, task=TASK, tensors=refs), (b"\xff\xff\xff\x7f",))
    assert all_finite(Ping(number=1), ())


async def test_measuring_with_nothing_to_measure_rests(driver: Driver, nursery: trio.Nursery) -> None:
    """A loop that takes its own deeds for news would burn a core of a lent computer, and nobody would notice."""
    nursery.start_soon(driver.measuring.run)
    await trio.testing.wait_all_tasks_blocked()
    link: Any = FakeLink("server")
    driver.on_up(link)
    driver.on_down(link, "gone")
    with trio.fail_after(20):
        await trio.testing.wait_all_tasks_blocked(0.001)
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("form", ["fp32", "bf16", "q8", "d4"])
@pytest.mark.trio
async def test_the_machine_hears_how_large_a_volunteers_activation_is(driver: Driver, form: str) -> None:
    """In every form, without decoding the small one: never less than it is, and not three times as much; infinite for
    what is not finite. What a server sends is not measured."""
    values = torch.randn(8, 256, generator=torch.Generator().manual_seed(3))
    spoilt = values.clone()
    spoilt[3, 7] = torch.nan
    outlier = values.clone()
    outlier[5, 6] = 1e30
    for role, tensor, least in (("volunteer", values, 1.0), ("volunteer", spoilt, float("inf")),
                                ("volunteer", outlier, 1e28), ("server", values, 0.0)):  # fmt: skip
        link = FakeLink(role)
        driver.on_up(link)  # type: ignore[arg-type]
        data = bytearray(encode(tensor, form))
        ref = TensorRef(0, (8, 256), form, len(data))  # type: ignore[arg-type]
        message = Output(ledger_generation=1, task=TASK, ticket=TICKET, tensors=(ref,))
        await driver.on_message(link, message, (data,))  # type: ignore[arg-type]
        size = driver.pump.facts[-1].size  # type: ignore[attr-defined]
        assert 0.95 * least <= size <= 3.0 * least, (role, least)


@pytest.mark.trio
async def test_a_large_contribution_is_looked_at_beside_the_loop(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one member's packed integers are looked at, others' messages pass; what of it is then no longer wanted,
    since its link has gone, reaches nobody. A small one is looked at in place."""
    go, threads = threading.Event(), []

    def whole(buffer: Any, count: int) -> bool:
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            assert go.wait(20)
        return packed.is_whole(buffer, count)

    monkeypatch.setattr(screening, "is_whole", whole)
    links = {name: FakeLink("volunteer", NodeId(name * 52)) for name in "abc"}
    for link in links.values():
        driver.on_up(link)  # type: ignore[arg-type]

    async def bring(name: str, count: int) -> None:
        data = packed.pack(np.full(count, 3, dtype=np.int32))
        message, _ = contribution([0.0])
        ref = TensorRef(0, (count,), "gi", len(data))
        message = msgspec.structs.replace(message, tasks=(BACKWARD,), tensors=(ref,))
        await driver.on_message(links[name], message, (data,))  # type: ignore[arg-type]

    def came() -> list[str]:
        return [fact.peer[0] for fact in driver.pump.facts if isinstance(fact, Received)]  # type: ignore[attr-defined]

    async with trio.open_nursery() as bringing:
        bringing.start_soon(bring, "a", 2 << 20)
        bringing.start_soon(bring, "b", 2 << 20)
        with trio.fail_after(20):
            while len(threads) < 2:
                await trio.sleep(0.001)
        await bring("c", 100)
        assert came() == ["c"] and threads[2] is threading.main_thread()
        driver.on_down(links["b"], "gone")  # type: ignore[arg-type]
        go.set()
    assert came() == ["c", "a"] and len(driver._store) == 2
    assert not any(link.closed for link in links.values())
