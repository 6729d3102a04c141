"""Punched links beside TCP on one long line: `python -m tests.benchmarks.punched [--wan deploy/wan]` (root).

For every line and way: two processes in two network namespaces that a delay line joins, each with a whole link
(handshake, records, frames) on top. The caller sends tensors of 8 MB for some seconds and pings meanwhile. Prints the
share of the line that arrived as tensors, processor seconds per gigabyte of both sides (the punching helper's
included), how long a control message took between them, and for how long one step held the loop; ends with 1 when a
bound of BOUNDS does not hold. Processor time of a step is counted, not its wall time: others may use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import trio

from node.links.punched import IceServers, Puncher, PunchOptions
from protocol.drive.tcp import open_listeners, tune
from protocol.drive.transport import Link, LinkOptions, Transport
from protocol.identity import Identity
from protocol.ids import TaskId, TensorRef
from protocol.messages import Activation, Message, Ping, Pong
from tests.protocol.samples import RUN_ID

TENSOR_BYTES = 8 << 20
WAYS = ("raw", "tcp", "quic", "channel")
"""A TCP stream with nothing on it; a link over TCP; links over a punched socket."""
PING_EVERY_S = 0.05
SETTLE_S = 2.0
"""Not counted: the handshake, and the controller's look for the rate."""
CONTROL_P95_S = 0.150
LOOP_HELD_S = 0.010


@dataclass(frozen=True)
class Setting:
    """One line: Mbit/s, one-way delay, loss each way, the queue before the bottleneck."""

    mbit_s: int
    delay_ms: int
    loss_percent: float
    queue_kb: int


SETTINGS = (
    Setting(20, 25, 0.0, 256),
    Setting(100, 25, 0.0, 1024),
    Setting(50, 25, 1.0, 512),
)
BOUNDS = {SETTINGS[0]: 0.85, SETTINGS[1]: 0.75, SETTINGS[2]: 0.75}
"""What a link over QUIC must bring of each line."""

_HOSTS = {"serve": "10.77.0.1", "call": "10.77.0.2"}
_LETTERS_PORT, _LINK_PORT = 7000, 7001
_IDENTITIES = {"serve": Identity(b"\x71" * 32), "call": Identity(b"\x72" * 32)}


class _StepWatch(trio.abc.Instrument):
    """The processor time of the longest step of any task."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.long_steps = 0
        self._began: float | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is None:
            return  # the step in which we came
        step_s = time.thread_time() - self._began
        self.longest_s = max(self.longest_s, step_s)
        self.long_steps += step_s > LOOP_HELD_S


@dataclass
class _Events:
    """Counts tensor bytes, answers pings, and notes when pongs came."""

    tensor_bytes: int = 0
    waits_s: list[float] = field(default_factory=list)
    """From a ping to its pong."""
    ways_s: list[float] = field(default_factory=list)
    """From a ping's sending to its arrival: both processes look at one clock."""
    up: trio.Event = field(default_factory=trio.Event)
    down: trio.Event = field(default_factory=trio.Event)
    link: Link | None = None

    def on_up(self, link: Link) -> None:
        self.link = link
        self.up.set()

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if isinstance(message, Ping):
            link.send(Pong(number=message.number))
            self.ways_s.append((time.monotonic_ns() - message.number) * 1e-9)
        elif isinstance(message, Pong):
            self.waits_s.append((time.monotonic_ns() - message.number) * 1e-9)
        self.tensor_bytes += sum(map(len, buffers))

    def on_down(self, link: Link, reason: str) -> None:
        print("down:", reason, file=sys.stderr)
        self.down.set()

    def on_rejected(self, address: str, reason: str, detail: str) -> None:
        print("rejected:", reason, detail, file=sys.stderr)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Counted elsewhere."""


class _Side:
    """One process: a transport, a puncher, and what the measuring noted."""

    def __init__(self, nursery: trio.Nursery, part: str, way: str) -> None:
        self.part = part
        self.peer = _IDENTITIES["call" if part == "serve" else "serve"].node
        self.events = _Events()
        self.watch = _StepWatch()
        self.transport = Transport(
            nursery,
            identity=_IDENTITIES[part],
            role="server",
            run_id=RUN_ID,
            credential=lambda: b"",
            admit=lambda key, credential: "server",
            events=self.events,
            options=LinkOptions(tensor_bytes_max=TENSOR_BYTES, window_bytes=8 * TENSOR_BYTES),
        )
        self.puncher = Puncher(
            nursery,
            identity=_IDENTITIES[part],
            run_id=RUN_ID,
            generation=lambda: 0,
            servers=IceServers,
            options=PunchOptions(lan=True, ways=("channel",) if way == "channel" else ("quic",)),
        )
        trio.lowlevel.add_instrument(self.watch)

    def cpu_s(self) -> float:
        """Of this process and its helper."""
        total = time.process_time()
        if self.puncher.helper_pid is not None:
            times = psutil.Process(self.puncher.helper_pid).cpu_times()
            total += times.user + times.system
        return total


def _spread(name: str, times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s) or [0.0]
    return {f"{name}_p50_s": statistics.median(ordered), f"{name}_p95_s": ordered[int(0.95 * len(ordered))]}


async def _say(stream: trio.SocketStream, letter: bytes) -> None:
    await stream.send_all(len(letter).to_bytes(4, "big") + letter)


async def _hear(stream: trio.SocketStream) -> bytes:
    async def exactly(byte_count: int) -> bytes:
        data = b""
        while len(data) < byte_count:
            piece = await stream.receive_some(byte_count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    return await exactly(int.from_bytes(await exactly(4), "big"))


async def _serve(way: str, seconds: float) -> dict[str, float]:
    """Wait for the caller, take what it sends until it says so, and report."""
    async with trio.open_nursery() as nursery:
        side = _Side(nursery, "serve", way)
        letters = (await open_listeners(_HOSTS["serve"], _LETTERS_PORT))[0]
        listeners = await open_listeners(_HOSTS["serve"], _LINK_PORT)
        raw: list[int] = [0]

        async def take(stream: trio.SocketStream) -> None:
            while data := await stream.receive_some(256 << 10):
                raw[0] += len(data)

        if way == "raw":
            nursery.start_soon(trio.serve_listeners, take, listeners)
        else:
            nursery.start_soon(side.transport.serve, listeners)
        print("ready", flush=True)
        stream = await letters.accept()
        if way in ("quic", "channel"):
            answer, wait = await side.puncher.answer(side.peer, await _hear(stream))
            await _say(stream, answer)
            punched = await wait()
            await side.transport.adopt(
                punched.stream,
                side.peer,
                initiator=punched.initiator,
                path=punched.path,
                address=punched.address,
                prologue=punched.prologue,
            )
        await _hear(stream)  # settled
        side.events.ways_s.clear()

        def received_bytes() -> int:
            return raw[0] if side.events.link is None else side.events.link.received_bytes

        before, cpu_s, began = received_bytes(), side.cpu_s(), time.perf_counter()
        await trio.sleep(seconds)
        byte_count, took_s = received_bytes() - before, time.perf_counter() - began
        result = {
            "mbit_s": byte_count * 8e-6 / took_s,
            "cpu_s_per_gb": (side.cpu_s() - cpu_s) / max(byte_count, 1) * 1e9,
            "held_s": side.watch.longest_s,
            "long_steps": side.watch.long_steps,
            **_spread("control", side.events.ways_s),
        }
        await _say(stream, b"enough")
        nursery.cancel_scope.cancel()
    return result


async def _call(way: str, seconds: float) -> dict[str, float]:
    """Open the link, send tensors and pings until the other side has enough, and report."""
    async with trio.open_nursery() as nursery:
        side = _Side(nursery, "call", way)
        stream = await trio.open_tcp_stream(_HOSTS["serve"], _LETTERS_PORT)
        began = time.perf_counter()
        send = await _opened(nursery, side, way, stream)
        opened_s = time.perf_counter() - began
        enough = trio.Event()
        nursery.start_soon(send, enough)
        if side.events.link is not None:
            nursery.start_soon(_ping, side.events.link)
        await trio.sleep(SETTLE_S)
        side.events.waits_s.clear()
        await _say(stream, b"settled")
        began, cpu_s = time.perf_counter(), side.cpu_s()
        await _hear(stream)
        took_s = time.perf_counter() - began
        enough.set()
        result = {
            "opened_s": opened_s,
            "cpu_s": (side.cpu_s() - cpu_s) / took_s,
            "held_s": side.watch.longest_s,
            "long_steps": side.watch.long_steps,
            **_spread("ping", side.events.waits_s),
        }
        nursery.cancel_scope.cancel()
    return result


async def _opened(
    nursery: trio.Nursery, side: _Side, way: str, stream: trio.SocketStream
) -> Callable[[trio.Event], Awaitable[None]]:
    """What sends bulk over the way, once it is open, until the event is set."""
    if way == "raw":
        bulk = await trio.open_tcp_stream(_HOSTS["serve"], _LINK_PORT)
        tune(bulk.socket)

        async def send_raw(enough: trio.Event) -> None:
            data = os.urandom(256 << 10)
            with suppress(trio.BrokenResourceError):  # the other side has enough
                while not enough.is_set():
                    await bulk.send_all(data)

        return send_raw
    if way == "tcp":
        link = await side.transport.dial([f"{_HOSTS['serve']}:{_LINK_PORT}"], side.peer)
    else:

        async def exchange(offer: bytes) -> bytes:
            await _say(stream, offer)
            return await _hear(stream)

        punched = await side.puncher.call(side.peer, exchange)
        link = await side.transport.adopt(
            punched.stream,
            side.peer,
            initiator=punched.initiator,
            path=punched.path,
            address=punched.address,
            prologue=punched.prologue,
        )

    data = await trio.to_thread.run_sync(os.urandom, TENSOR_BYTES)

    async def send_tensors(enough: trio.Event) -> None:
        tensors = (TensorRef(0, (TENSOR_BYTES // 4,), "fp32", TENSOR_BYTES),)
        number = 0
        while not enough.is_set():
            if link.queued_bytes < TENSOR_BYTES:
                link.send(Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors), [data])
                number += 1
            await trio.sleep(0.01)

    return send_tensors


async def _ping(link: Link) -> None:
    while True:
        link.send(Ping(number=time.monotonic_ns()))
        await trio.sleep(PING_EVERY_S)


def _measure(wan: str, setting: Setting, way: str, seconds: float) -> dict[str, float] | None:
    """One way on one line that is up; None when it did not open."""

    def start(side: str, part: str) -> subprocess.Popen[str]:
        command = [wan, "exec", side, sys.executable, "-m", __spec__.name, "--part", part]
        command += ["--ways", way, "--seconds", str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None, text=True)

    server = start("a", "serve")
    assert server.stdout is not None
    server.stdout.readline()
    caller = start("b", "call")
    outputs = [process.communicate(timeout=seconds + 60)[0] for process in (caller, server)]
    if caller.returncode or server.returncode:
        return None
    called, served = (json.loads(output.splitlines()[-1]) for output in outputs)
    share = served["mbit_s"] / setting.mbit_s
    return {
        **served,
        **called,
        "mbit_s": served["mbit_s"],
        "share": share,
        "send_cpu_s_per_gb": called["cpu_s"] / (max(served["mbit_s"], 1e-3) / 8000),
        "receive_cpu_s_per_gb": served["cpu_s_per_gb"],
        "held_s": max(called["held_s"], served["held_s"]),
        "long_steps": called["long_steps"] + served["long_steps"],
    }


def _report(setting: Setting, way: str, result: dict[str, float]) -> None:
    print(
        f"{setting.mbit_s:4} Mbit/s {2 * setting.delay_ms:3} ms {setting.loss_percent:3} % lost  {way:8}"
        f"{result['mbit_s']:7.1f} Mbit/s = {result['share']:4.0%}   "
        f"CPU s/GB {result['send_cpu_s_per_gb']:5.1f} + {result['receive_cpu_s_per_gb']:5.1f}   "
        f"control p50 {result['control_p50_s'] * 1e3:4.0f} p95 {result['control_p95_s'] * 1e3:4.0f} ms, "
        f"there and back p95 {result['ping_p95_s'] * 1e3:4.0f}   "
        f"longest step {result['held_s'] * 1e3:4.1f} ms, {result['long_steps']} over {LOOP_HELD_S * 1e3:.0f}   "
        f"opened in {result['opened_s']:4.2f} s",
        flush=True,
    )


def main() -> int:
    """Measure and print; 0 when the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wan", default="deploy/wan", help="the script that makes the namespaces and the delay line")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--lines", nargs="+", type=int, default=list(range(len(SETTINGS))), help="indices of SETTINGS")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--part", choices=("serve", "call"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        work = _serve if options.part == "serve" else _call
        print(json.dumps(trio.run(work, options.ways[0], options.seconds)))
        return 0
    failures = []
    for setting in (SETTINGS[index] for index in options.lines):
        up = [setting.delay_ms, setting.loss_percent, setting.mbit_s, setting.queue_kb]
        subprocess.run([options.wan, "up", *map(str, up)], check=True)
        try:
            for way in options.ways:
                result = _measure(options.wan, setting, way, options.seconds)
                if result is None:
                    failures.append(f"{setting}: no link by {way}")
                    continue
                _report(setting, way, result)
                if way == "quic" and result["share"] < BOUNDS[setting]:
                    failures.append(f"{setting}: {result['share']:.0%} of the line, wanted {BOUNDS[setting]:.0%}")
                if way == "quic" and setting.mbit_s == 20 and result["control_p95_s"] > CONTROL_P95_S:
                    failures.append(f"{setting}: control took {result['control_p95_s'] * 1e3:.0f} ms")
        finally:
            subprocess.run([options.wan, "down"], check=True)
    print("\n".join(failures) or "every bound holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
