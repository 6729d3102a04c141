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
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import psutil
import trio

from protocol.base.loading import keep_what_is_loaded
from protocol.drive.tcp import open_listeners, tune
from tests.benchmarks.pair import (
    HOSTS,
    LETTERS_PORT,
    LINK_PORT,
    LOOP_HELD_S,
    NAMESPACES,
    Side,
    hear,
    held,
    pause_s,
    ping,
    relay,
    say,
    start,
)

WAYS = ("raw", "tcp", "relay", "quic", "channel")
"""A TCP stream with nothing on it; links over TCP, over a relay at the receiver's end, and over a punched socket."""
SETTLE_S = 2.0
"""Not counted: the handshake, and the controller's look for the rate."""
CONTROL_P95_S = 0.150


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


def _spread(name: str, times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s) or [0.0]
    return {f"{name}_p50_s": statistics.median(ordered), f"{name}_p95_s": ordered[int(0.95 * len(ordered))]}


async def _serve(way: str, seconds: float) -> dict[str, Any]:
    """Wait for the caller, take what it sends until it says so, and report."""
    async with trio.open_nursery() as nursery:
        side = Side(nursery, "serve", way)
        letters = (await open_listeners(HOSTS["serve"], LETTERS_PORT))[0]
        listeners = await open_listeners(HOSTS["serve"], LINK_PORT)
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
        if way != "raw":
            await side.answer(stream, HOSTS["serve"])
        await hear(stream)  # settled
        side.events.ways_s.clear()

        def received_bytes() -> int:
            return raw[0] if side.events.link is None else side.events.link.received_bytes

        before, cpu_s, began = received_bytes(), side.cpu_s(), time.perf_counter()
        await trio.sleep(seconds)
        byte_count, took_s = received_bytes() - before, time.perf_counter() - began
        if side.events.reason:
            print("down:", side.events.reason, file=sys.stderr)
        result = {
            "mbit_s": byte_count * 8e-6 / took_s,
            "cpu_s_per_gb": (side.cpu_s() - cpu_s) / max(byte_count, 1) * 1e9,
            **side.watch.told(),
            **_spread("control", side.events.ways_s),
        }
        await say(stream, b"enough")
        nursery.cancel_scope.cancel()
    return result


async def _call(way: str, seconds: float) -> dict[str, Any]:
    """Open the link, send tensors and pings until the other side has enough, and report."""
    async with trio.open_nursery() as nursery:
        side = Side(nursery, "call", way)
        stream = await trio.open_tcp_stream(HOSTS["serve"], LETTERS_PORT)
        began = time.perf_counter()
        send = await _opened(side, way, stream)
        opened_s = time.perf_counter() - began
        enough = trio.Event()
        nursery.start_soon(send, enough)
        if side.events.link is not None:
            nursery.start_soon(ping, side.events.link)
        await trio.sleep(SETTLE_S)
        side.events.waits_s.clear()
        await say(stream, b"settled")
        began, cpu_s = time.perf_counter(), side.cpu_s()
        await hear(stream)
        took_s = time.perf_counter() - began
        enough.set()
        result = {
            "opened_s": opened_s,
            "cpu_s": (side.cpu_s() - cpu_s) / took_s,
            **side.watch.told(),
            **_spread("ping", side.events.waits_s),
        }
        nursery.cancel_scope.cancel()
    return result


async def _opened(side: Side, way: str, stream: trio.SocketStream) -> Callable[[trio.Event], Awaitable[None]]:
    """What sends bulk over the way, once it is open, until the event is set."""
    if way == "raw":
        bulk = await trio.open_tcp_stream(HOSTS["serve"], LINK_PORT)
        tune(bulk.socket)

        async def send_raw(enough: trio.Event) -> None:
            data = os.urandom(256 << 10)
            with suppress(trio.BrokenResourceError):  # the other side has enough
                while not enough.is_set():
                    await bulk.send_all(data)

        return send_raw
    return partial(side.send_tensors, await side.open(stream, HOSTS["serve"]))


def _measure(wan: str, setting: Setting, way: str, seconds: float) -> dict[str, Any] | None:
    """One way on one line that is up; None when it did not open."""

    def begin(part: str) -> subprocess.Popen[str]:
        arguments = ("--part", part, "--ways", way, "--seconds", str(seconds))
        return start(wan, NAMESPACES["call" if part == "call" else "serve"], __spec__.name, *arguments)

    def ready(part: str) -> subprocess.Popen[str]:
        process = begin(part)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    relaying = ready("relay") if way == "relay" else None
    relay_cpu_s = -_cpu_s(relaying)
    try:
        server = ready("serve")
        caller = begin("call")
        outputs = [process.communicate(timeout=seconds + 60)[0] for process in (caller, server)]
        relay_cpu_s += _cpu_s(relaying)
    finally:
        if relaying is not None:
            relaying.kill()
            relaying.communicate()
    if caller.returncode or server.returncode:
        return None
    called, served = (json.loads(output.splitlines()[-1]) for output in outputs)
    share = served["mbit_s"] / setting.mbit_s
    longest = max(called, served, key=itemgetter("held_s"))
    return {
        **served,
        **called,
        "mbit_s": served["mbit_s"],
        "share": share,
        "send_cpu_s_per_gb": called["cpu_s"] / (max(served["mbit_s"], 1e-3) / 8000),
        "receive_cpu_s_per_gb": served["cpu_s_per_gb"],
        "relay_cpu_s_per_gb": relay_cpu_s / max(served["mbit_s"] * (seconds + SETTLE_S) / 8000, 1e-9),
        **{name: value for name, value in longest.items() if name.startswith("held_")},
    }


def _cpu_s(process: subprocess.Popen[str] | None) -> float:
    if process is None:
        return 0.0
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def _report(setting: Setting, way: str, result: dict[str, Any]) -> None:
    relayed = f" + relay {result['relay_cpu_s_per_gb']:5.1f}" if way == "relay" else ""
    print(
        f"{setting.mbit_s:4} Mbit/s {2 * setting.delay_ms:3} ms {setting.loss_percent:3} % lost  {way:8}"
        f"{result['mbit_s']:7.1f} Mbit/s = {result['share']:4.0%}   "
        f"CPU s/GB {result['send_cpu_s_per_gb']:5.1f} + {result['receive_cpu_s_per_gb']:5.1f}"
        f"{relayed}   "
        f"control p50 {result['control_p50_s'] * 1e3:4.0f} p95 {result['control_p95_s'] * 1e3:4.0f} ms, "
        f"there and back p95 {result['ping_p95_s'] * 1e3:4.0f}   "
        f"longest step {held(result)}   "
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
    parser.add_argument("--part", choices=("serve", "call", "relay"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        keep_what_is_loaded()  # as the daemons do
    if options.part == "relay":
        trio.run(relay, HOSTS["serve"])
        return 0
    if options.part:
        work = _serve if options.part == "serve" else _call
        print(json.dumps(trio.run(work, options.ways[0], options.seconds)))
        return 0
    print(f"a loop that does nothing: longest step {pause_s(options.seconds) * 1e3:.1f} ms")
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
                if result["held_s"] > LOOP_HELD_S:
                    failures.append(f"{setting}: {way} held the loop for {result['held_s'] * 1e3:.1f} ms")
                if way == "quic" and setting.mbit_s == 20 and result["control_p95_s"] > CONTROL_P95_S:
                    failures.append(f"{setting}: control took {result['control_p95_s'] * 1e3:.0f} ms")
        finally:
            subprocess.run([options.wan, "down"], check=True)
    print("\n".join(failures) or "every bound holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
