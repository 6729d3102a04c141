"""Whether the owner's limits hold on every way: `python -m tests.benchmarks.limits [--wan deploy/wan]` (root).

Two processes in two network namespaces with a plain cable in between; one has a limit of bytes per second, up or down.
The caller sends tensors of 8 MB without a pause, both ping, and both measure the link once in between. What passed is
read from the limited one's network interface, which knows nothing of our counters: bytes less the headers of Ethernet,
IP and UDP or TCP. Half a minute of it must be the limit within 2 %, neither more nor, as something always waits to be
sent, less. Ends with 1 where it is not.

The relay runs on the side that has no limit, so the leg of the limited one is what crosses the cable. The kernel hands
trains of datagrams and segments to the cable as one packet with one set of headers, and counts them so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

from node.measure.measuring import Measuring
from protocol.drive.limits import Limits
from protocol.drive.tcp import open_listeners
from protocol.drive.transport import Link
from tests.benchmarks.pair import HOSTS, LETTERS_PORT, LINK_PORT, NAMESPACES, Side, ping, relay, start

WAYS = ("tcp", "relay", "quic", "channel")
DIRECTIONS = ("up", "down")
LIMITED = {"up": "call", "down": "serve"}
"""Who has the limit: tensors go from the caller to the server."""
MBIT_PER_S = 8.0
SECONDS = 30.0
TOLERANCE = 0.02
SETTLE_S = 4.0
"""Not counted: handshakes, the controller's look for the rate, and what a window let through before it was full."""
MEASURE_AT = {"serve": 0.2, "call": 0.6}
"""Parts of the time after which each side measures the link, both directions, beside everything else."""
STEP_S = 5.0
PATIENCE_S = 60.0
_HEADERS_BYTES = {"udp": 14 + 20 + 8, "tcp": 14 + 20 + 32}
"""Of a packet: Ethernet, IPv4, and UDP or TCP with the timestamps that Linux always sends."""
_COLUMNS = {"down": (0, 1), "up": (8, 9)}
"""Of a line of /proc/net/dev: bytes and packets."""


@dataclass(frozen=True)
class Held:
    """What one way under one limit did."""

    way: str
    direction: str
    share: float
    """Of the limit, over the whole time, by the interface's counters."""
    steps: tuple[float, ...]
    """The same for each STEP_S."""
    ping_p95_s: float
    measured: int
    """Measurements that were made meanwhile, by both sides."""
    lost: str
    """Why the link went, or changed its path; empty when it did not."""

    @property
    def failure(self) -> str:
        """What is wrong with it; empty when nothing is."""
        if self.lost:
            return f"{self.way} {self.direction}: the link did not live: {self.lost}"
        if self.measured != 2:
            return f"{self.way} {self.direction}: {self.measured} measurements instead of 2"
        if not 1 - TOLERANCE <= self.share <= 1 + TOLERANCE:
            return f"{self.way} {self.direction}: {self.share:.2%} of the limit"
        return ""

    def __str__(self) -> str:
        steps = " ".join(f"{share:4.0%}" for share in self.steps)
        return (
            f"{self.way:8} {self.direction:5} {self.share:7.2%} of the limit   "
            f"each {STEP_S:.0f} s: {steps}   there and back p95 {self.ping_p95_s * 1e3:4.0f} ms   "
            f"{self.measured} measurements   {self.failure and 'FAIL'}"
        )


# ---- the processes -------------------------------------------------------------------------------------------------


class _Watch:
    """What `Measuring` tells; nothing of it is of interest here, refusals show in what it found."""

    def refuse(self, link: Link, detail: str) -> None:
        link.close(detail)

    def round_trip(self, path: str, seconds: float) -> None: ...


async def _orders() -> None:
    """The next line of the script that started us."""
    if not await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        raise EOFError("whoever started this process has gone")


async def _take_part(part: str, way: str, direction: str, relay_host: str, rate: float, seconds: float) -> None:
    """One side: says `ready`, opens or awaits the link, says `settled`, and is told when counting begins, when it ends
    and a result is wanted, and when both sides have given theirs, so that the first one to go is nobody's loss."""
    limits = Limits()
    if LIMITED[direction] == part:
        limits = Limits(rate if direction == "up" else None, rate if direction == "down" else None)
    measured = 0
    async with trio.open_nursery() as nursery:
        side = Side(nursery, part, way, limits)
        measuring = Measuring(_Watch())
        side.events.wanted = measuring.take
        nursery.start_soon(measuring.run)

        async def measure(link: Link) -> None:
            nonlocal measured
            await trio.sleep(MEASURE_AT[part] * seconds)
            measured += await measuring.measure(link) is not None

        if part == "serve":
            letters_listener = (await open_listeners(HOSTS[part], LETTERS_PORT))[0]
            nursery.start_soon(side.transport.serve, await open_listeners(HOSTS[part], LINK_PORT))
            print("ready", flush=True)
        with trio.fail_after(PATIENCE_S):
            if part == "serve":
                await side.answer(await letters_listener.accept(), relay_host)
            else:
                await side.open(await trio.open_tcp_stream(HOSTS["serve"], LETTERS_PORT), relay_host)
            await side.events.up.wait()
        link = side.events.link
        assert link is not None
        path = link.path
        measuring.up(link)
        nursery.start_soon(ping, link)
        if part == "call":
            nursery.start_soon(side.send_tensors, link, trio.Event())
        await trio.sleep(SETTLE_S)
        print("settled", flush=True)
        await _orders()
        side.events.waits_s.clear()
        nursery.start_soon(measure, link)
        await _orders()
        lost = side.events.reason or ("" if link.path == path else f"from {path} to {link.path}")
        print(json.dumps({"waits_s": side.events.waits_s, "measured": measured, "lost": lost}), flush=True)
        await _orders()
        nursery.cancel_scope.cancel()


# ---- the script that starts them -----------------------------------------------------------------------------------


def _payload_bytes(pid: int, direction: str, way: str) -> int:
    """What the namespace's end of the cable has carried in a direction, less headers."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("line0:"))
    numbers = [int(number) for number in line.split(":")[1].split()]
    byte_count, packets = (numbers[column] for column in _COLUMNS[direction])
    return byte_count - packets * _HEADERS_BYTES["udp" if way in ("quic", "channel") else "tcp"]


def measure(wan: str, way: str, direction: str, mbit_per_s: float = MBIT_PER_S, seconds: float = SECONDS) -> Held:
    """One way under one limit, on the cable that is there. Raises `EOFError` when a process ended too soon."""
    limited, rate = LIMITED[direction], mbit_per_s * 1e6 / 8
    free = next(part for part in HOSTS if part != limited)
    with ExitStack() as stack:

        def begin(part: str, side: str, relay_host: str = "") -> subprocess.Popen[str]:
            arguments = ["--part", part, "--ways", way, "--directions", direction, "--relay", relay_host]
            arguments += ["--mbit", str(mbit_per_s), "--seconds", str(seconds)]
            process = start(wan, side, "tests.benchmarks.limits", *arguments)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def say(process: subprocess.Popen[str]) -> None:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

        if way == "relay":
            _hear(begin("relay", NAMESPACES[free], HOSTS[free]), "ready")
        processes = {"serve": begin("serve", NAMESPACES["serve"], HOSTS[free])}
        _hear(processes["serve"], "ready")
        processes["call"] = begin("call", NAMESPACES["call"], HOSTS[free])
        for process in processes.values():
            _hear(process, "settled")
        for process in processes.values():
            say(process)
        began = time.monotonic()
        pid = processes[limited].pid
        looks = [(began, _payload_bytes(pid, direction, way))]
        while looks[-1][0] < began + seconds - STEP_S / 2:
            time.sleep(max(0.0, began + len(looks) * STEP_S - time.monotonic()))
            looks.append((time.monotonic(), _payload_bytes(pid, direction, way)))
        for process in processes.values():
            say(process)
        results: dict[str, dict[str, Any]] = {part: json.loads(_hear(process)) for part, process in processes.items()}
        for process in processes.values():
            say(process)
            process.wait(PATIENCE_S)
    waits_s = sorted(results["call"]["waits_s"]) or [PATIENCE_S]
    return Held(
        way,
        direction,
        _share(looks[0], looks[-1], rate),
        tuple(_share(one, other, rate) for one, other in pairwise(looks)),
        statistics.quantiles(waits_s, n=20)[-1] if len(waits_s) > 1 else waits_s[0],
        sum(result["measured"] for result in results.values()),
        "; ".join(result["lost"] for result in results.values() if result["lost"]),
    )


def _share(one: tuple[float, int], other: tuple[float, int], rate: float) -> float:
    return (other[1] - one[1]) / (other[0] - one[0]) / rate


def _hear(process: subprocess.Popen[str], wanted: str = "{") -> str:
    """Its next line that begins as wanted; others are its log."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(wanted):
            return line
    raise EOFError(f"a process ended before it said {wanted!r}, with {process.wait()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0 when all limits hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wan", default="deploy/wan", help="the script that makes the namespaces and the cable")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--mbit", type=float, default=MBIT_PER_S, help="the limit, in Mbit/s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for how long each is watched")
    parser.add_argument("--part", choices=("serve", "call", "relay"), help=argparse.SUPPRESS)
    parser.add_argument("--relay", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part == "relay":
        trio.run(relay, options.relay)
        return 0
    if options.part:
        rate = options.mbit * 1e6 / 8
        way, direction = options.ways[0], options.directions[0]
        trio.run(_take_part, options.part, way, direction, options.relay, rate, options.seconds)
        return 0
    failures = []
    subprocess.run([options.wan, "veth"], check=True)
    try:
        for way in options.ways:
            for direction in options.directions:
                held = measure(options.wan, way, direction, options.mbit, options.seconds)
                print(held, flush=True)
                failures += [held.failure] if held.failure else []
    finally:
        subprocess.run([options.wan, "down"], check=True)
    print("\n".join(failures) or "every limit holds")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
