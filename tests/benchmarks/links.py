"""What a link costs: `python -m tests.benchmarks.links` measures it on loopback beside raw trio TCP, in one run.

Two processes, so that both ends have a core of their own where there are two. Prints MB/s, CPU seconds per gigabyte
of each side, and how long a control message takes while tensors flow; exits with 1 when one step of
either side holds its loop for more than 10 ms, or when the wait for control is out of bounds. Other work on the
machine shows in the wall times; the processor times are what to compare.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import time
from dataclasses import dataclass, field

import trio

from protocol.drive.tcp import open_listeners
from protocol.drive.transport import Link, LinkOptions, Transport
from protocol.identity import Identity
from protocol.ids import TaskId, TensorRef
from protocol.messages import Activation, Message, Ping, Pong
from tests.protocol.samples import RUN_ID

TENSOR_BYTES = 8 << 20
CONTROL_P50_S = 0.05
"""Loopback carries 100 MB/s and more: what waits in front of a control message (128 KiB here, 128 KiB unsent in the
kernel, what the receiver has not read) takes a few milliseconds; the rest is room for a busy machine."""
LOOP_HELD_S = 0.010

_SERVER, _CLIENT = Identity(b"\x71" * 32), Identity(b"\x72" * 32)
_OPTIONS = LinkOptions(tensor_bytes_max=TENSOR_BYTES, window_bytes=8 * TENSOR_BYTES)


class _StepWatch(trio.abc.Instrument):
    """How long tasks kept the loop to themselves, step by step."""

    def __init__(self) -> None:
        self._steps_s: list[float] = []
        self._began: float | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is not None:
            self._steps_s.append(time.perf_counter() - self._began)

    @property
    def long_s(self) -> float:
        """The median of the steps that moved data (0.1 ms and more).

        Not the longest: on a shared machine that one says only for how long the system ran somebody else.
        """
        return statistics.median([step_s for step_s in self._steps_s if step_s >= 1e-4] or [0.0])


@dataclass
class _Events:
    """Counts tensor bytes, answers pings, and keeps the times of pongs."""

    wanted_bytes: int = 0
    seen_bytes: int = 0
    done: trio.Event = field(default_factory=trio.Event)
    pong: trio.Event = field(default_factory=trio.Event)

    def on_up(self, link: Link) -> None:
        """Nothing to note."""

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if isinstance(message, Ping):
            link.send(Pong(number=message.number))
        elif isinstance(message, Pong):
            self.pong.set()
        self.seen_bytes += sum(map(len, buffers))
        if self.seen_bytes >= self.wanted_bytes:
            self.done.set()

    def on_down(self, link: Link, reason: str) -> None:
        self.done.set()

    def on_rejected(self, address: str, reason: str, detail: str) -> None:
        print("rejected:", reason, detail)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Counted elsewhere."""


def _transport(nursery: trio.Nursery, identity: Identity, events: _Events) -> Transport:
    return Transport(
        nursery,
        identity=identity,
        role="server",
        run_id=RUN_ID,
        credential=lambda: b"",
        admit=lambda key, credential: "server",
        events=events,
        options=_OPTIONS,
    )


def _link_server(pipe: multiprocessing.connection.Connection, byte_count: int) -> None:
    async def main() -> None:
        watch, events = _StepWatch(), _Events(wanted_bytes=byte_count)
        async with trio.open_nursery() as nursery:
            listeners = await open_listeners("127.0.0.1", 0)
            pipe.send(listeners[0].socket.getsockname()[1])
            nursery.start_soon(_transport(nursery, _SERVER, events).serve, listeners)
            trio.lowlevel.add_instrument(watch)
            before = time.process_time()
            await events.done.wait()
            pipe.send((time.process_time() - before, watch.long_s))
            await trio.to_thread.run_sync(pipe.recv)
            nursery.cancel_scope.cancel()

    trio.run(main)


def _raw_server(pipe: multiprocessing.connection.Connection, byte_count: int) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            listeners = await open_listeners("127.0.0.1", 0)
            pipe.send(listeners[0].socket.getsockname()[1])

            async def receive(stream: trio.SocketStream) -> None:
                before, seen = time.process_time(), 0
                while seen < byte_count:
                    seen += len(await stream.receive_some(256 << 10))
                pipe.send((time.process_time() - before, 0.0))
                await stream.send_all(b"!")
                nursery.cancel_scope.cancel()

            await trio.serve_listeners(receive, listeners)

    trio.run(main)


@dataclass(frozen=True)
class _Result:
    name: str
    seconds: float
    send_cpu_s: float
    receive_cpu_s: float
    byte_count: int
    long_s: float
    waits_s: tuple[float, ...] = ()

    def __str__(self) -> str:
        gigabytes = self.byte_count / 1e9
        return (
            f"{self.name:<14}{self.byte_count / 1e6 / self.seconds:8.0f} MB/s   "
            f"CPU s/GB {self.send_cpu_s / gigabytes:5.2f} send + {self.receive_cpu_s / gigabytes:5.2f} receive"
        )


async def _raw_client(port: int, byte_count: int) -> tuple[float, float, float, tuple[float, ...]]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    data = bytes(256 << 10)
    began, before = time.perf_counter(), time.process_time()
    for _ in range(byte_count // len(data)):
        await stream.send_all(data)
    await stream.receive_some(1)
    return time.perf_counter() - began, time.process_time() - before, 0.0, ()


async def _link_client(port: int, byte_count: int) -> tuple[float, float, float, tuple[float, ...]]:
    watch, events, waits = _StepWatch(), _Events(wanted_bytes=1 << 62), []
    async with trio.open_nursery() as nursery:
        link = await _transport(nursery, _CLIENT, events).dial([f"127.0.0.1:{port}"], _SERVER.node)
        data = os.urandom(TENSOR_BYTES)
        trio.lowlevel.add_instrument(watch)
        tensors = (TensorRef(0, (TENSOR_BYTES // 4,), "fp32", TENSOR_BYTES),)
        began, before = time.perf_counter(), time.process_time()
        for number in range(byte_count // TENSOR_BYTES):
            link.send(Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors), [data])
        number = 0
        while link.queued_bytes:
            asked = time.perf_counter()
            events.pong = trio.Event()
            link.send(Ping(number=number))
            await events.pong.wait()
            waits.append(time.perf_counter() - asked)
            number += 1
            await trio.sleep(0.005)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - before
        nursery.cancel_scope.cancel()
    return seconds, cpu_s, watch.long_s, tuple(waits)


def _measure(name: str, byte_count: int) -> _Result:
    server, client = (_raw_server, _raw_client) if name == "raw TCP" else (_link_server, _link_client)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=server, args=(theirs, byte_count), daemon=True)
    process.start()
    seconds, send_cpu_s, long_s, waits_s = trio.run(client, ours.recv(), byte_count)
    receive_cpu_s, their_long_s = ours.recv()
    if name != "raw TCP":
        ours.send(None)
    process.join()
    return _Result(name, seconds, send_cpu_s, receive_cpu_s, byte_count, max(long_s, their_long_s), waits_s)


def main() -> int:
    """Measure and print; 0 when the bounds hold in the best of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    byte_count = options.megabytes * 10**6 // TENSOR_BYTES * TENSOR_BYTES
    links = []
    for _ in range(options.rounds):
        print(_measure("raw TCP", byte_count))
        links.append(_measure("link", byte_count))
        print(links[-1])
    waits = min((result.waits_s for result in links), key=statistics.median)
    median_s, worst_s = statistics.median(waits), max(waits)
    long_s = min(result.long_s for result in links)
    print(
        f"control while tensors flow: median {median_s * 1e3:.1f} ms, worst {worst_s * 1e3:.1f} ms ({len(waits)} pings)"
    )
    print(f"hold of the loop by a step that moves data: {long_s * 1e3:.1f} ms")
    ok = median_s <= CONTROL_P50_S and long_s <= LOOP_HELD_S
    print("pass" if ok else f"FAIL: bounds are {CONTROL_P50_S * 1e3:.0f} ms and {LOOP_HELD_S * 1e3:.0f} ms")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
