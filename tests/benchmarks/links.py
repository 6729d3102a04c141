"""What a link costs: `python -m tests.benchmarks.links` measures it beside raw trio TCP on the same path, in one run.

On loopback by default. With `--wan deploy/wan` (needs root) also over delay, loss and a slow line:

    share of raw TCP     at 0 (a line of 1 Gbit/s), 50 and 100 ms at least 0.9, with 1 % loss at least 0.8 (both sides
                         with BBR where there is one)
    control messages     95th percentile under 150 ms while 8 MB tensors fill a line of 20 Mbit/s (loopback: 50 ms)
    hold of the loop     no step of a link holds its loop for more than 10 ms of processor time

Without any line between them raw TCP is limited by nothing but the processor, and the link by its cipher (about 0.8 of
its processor seconds per gigabyte on each side): there the share is printed without a bound.

Raw and link take turns, and the medians of the rounds are compared: other work on the machine shows in both. Prints
Mbit/s and processor seconds per gigabyte of each side too. Exits with 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import trio

from protocol.base.ids import TaskId, TensorRef
from protocol.base.loading import keep_what_is_loaded
from protocol.drive import tcp
from protocol.drive.tcp import open_listeners
from protocol.drive.transport import Link, LinkOptions, Transport
from protocol.messages import Activation, Message, Ping, Pong
from protocol.trust.identity import Identity
from tests.benchmarks.pair import LOOP_HELD_S, TENSOR_BYTES, StepWatch, held, pause_s
from tests.protocol.samples import RUN_ID

WARM_UP_S = 2.0
"""Not measured: BBR finds the line's rate in it."""
LOOPBACK_CONTROL_S = 0.05
"""Loopback carries 100 MB/s and more: what waits in front of a control message takes a few milliseconds; the rest is
room for a busy machine."""
LINE_CONTROL_S = 0.150
PATIENCE_S = 60.0

_SERVER, _CLIENT = Identity(b"\x71" * 32), Identity(b"\x72" * 32)
_OPTIONS = LinkOptions(tensor_bytes_max=TENSOR_BYTES, window_bytes=8 * TENSOR_BYTES)


@dataclass(frozen=True)
class Case:
    """A path to measure on."""

    name: str
    wan: tuple[str, ...] | None = None
    """Arguments of the script; None: loopback."""
    share_min: float | None = None
    """What the link must reach of raw TCP."""
    control_max_s: float | None = None
    """For the 95th percentile of control messages while tensors flow."""


LOOPBACK = Case("loopback", control_max_s=LOOPBACK_CONTROL_S)
WAN = (
    Case("0 ms, any rate", ("up", "0", "0", "0", "4096")),
    Case("0 ms, 1 Gbit/s", ("up", "0", "0", "1000", "2048"), share_min=0.9),
    Case("50 ms", ("up", "25", "0", "0", "16384"), share_min=0.9),
    Case("100 ms", ("up", "50", "0", "0", "16384"), share_min=0.9),
    Case("50 ms, 1 % loss", ("up", "25", "1", "0", "16384"), share_min=0.8),
    Case("20 Mbit/s, 50 ms", ("up", "25", "0", "20", "256"), share_min=0.9, control_max_s=LINE_CONTROL_S),
)


class Meter:
    """Bytes and processor time between the end of the warm-up and the end."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began: float | None = None
        self._cpu_s = 0.0
        self.byte_count = 0

    def add(self, byte_count: int) -> bool:
        """Whether it goes on."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now + WARM_UP_S
        if now < self._began:
            self._cpu_s = time.process_time()
        else:
            self.byte_count += byte_count
        return now < self._began + self._seconds

    def result(self) -> dict[str, float]:
        assert self._began is not None
        took_s = time.perf_counter() - self._began
        return {"bytes": self.byte_count, "seconds": took_s, "cpu_s": time.process_time() - self._cpu_s}


@dataclass
class Events:
    """Counts tensor bytes, answers pings, and keeps the times of pongs."""

    meter: Meter | None = None
    done: trio.Event = field(default_factory=trio.Event)
    pong: trio.Event = field(default_factory=trio.Event)

    def on_up(self, link: Link) -> None:
        """Nothing to note."""

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if isinstance(message, Ping):
            link.send(Pong(number=message.number))
        elif isinstance(message, Pong):
            self.pong.set()

    def on_down(self, link: Link, reason: str) -> None:
        self.done.set()

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        print("rejected:", reason, detail, file=sys.stderr)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Counted from the stream instead: a message of 8 MB is too coarse on a slow line."""


def transport_of(nursery: trio.Nursery, identity: Identity, events: Events) -> Transport:
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


# ---- the two ends, each a process of its own -----------------------------------------------------------------------


async def serve(kind: str, host: str, seconds: float) -> None:
    """Prints the port, receives until the time is over, prints the result."""
    listeners = await open_listeners(host, 0)
    print(listeners[0].socket.getsockname()[1], flush=True)
    meter, watch = Meter(seconds), StepWatch()
    async with trio.open_nursery() as nursery:
        if kind == "raw":

            async def receive(stream: trio.SocketStream) -> None:
                tcp.tune(stream.socket)
                while meter.add(len(await stream.receive_some(256 << 10))):
                    pass
                nursery.cancel_scope.cancel()

            await trio.serve_listeners(receive, listeners)
        else:
            events = Events()
            transport = transport_of(nursery, _SERVER, events)
            nursery.start_soon(transport.serve, listeners)
            while not transport.links:
                await trio.sleep(0.01)
            (link,) = transport.links
            trio.lowlevel.add_instrument(watch)
            before = link.received_bytes
            while meter.add(link.received_bytes - before):
                before = link.received_bytes
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
    print(json.dumps({**meter.result(), **watch.told()}), flush=True)


async def call(kind: str, host: str, port: int, seconds: float) -> None:
    """Sends until the other end goes, and asks for an answer all the time; prints the result."""
    meter, watch, waits = Meter(seconds), StepWatch(), []
    if kind == "raw":
        (candidate,) = [tcp.Candidate(0, f"{host}:{port}", trio.socket.AF_INET, (host, port))]
        stream = await tcp.connect(candidate)
        data = bytes(256 << 10)
        try:
            while True:
                await stream.send_all(data)
                meter.add(len(data))
        except trio.BrokenResourceError:
            pass
    else:
        events = Events()
        async with trio.open_nursery() as nursery:
            link = await transport_of(nursery, _CLIENT, events).dial([f"{host}:{port}"], _SERVER.node)
            data = os.urandom(TENSOR_BYTES)
            await trio.sleep(0.01)
            trio.lowlevel.add_instrument(watch)
            tensors = (TensorRef(0, (TENSOR_BYTES // 4,), "fp32", TENSOR_BYTES),)
            number, before = 0, 0
            while not events.done.is_set():
                while link.queued_bytes < 2 * TENSOR_BYTES and not link.closing:
                    link.send(Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors), [data])
                    number += 1
                asked, events.pong = time.perf_counter(), trio.Event()
                link.send(Ping(number=number))
                with trio.move_on_after(PATIENCE_S):
                    async with trio.open_nursery() as either:
                        either.start_soon(_cancel_after, events.pong, either.cancel_scope)
                        either.start_soon(_cancel_after, events.done, either.cancel_scope)
                if events.pong.is_set() and meter.byte_count:
                    waits.append(time.perf_counter() - asked)
                meter.add(link.sent_bytes - before)
                before = link.sent_bytes
                await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
    print(json.dumps({**meter.result(), **watch.told(), "waits_s": waits}), flush=True)


async def _cancel_after(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


# ---- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One round of one kind."""

    kind: str
    received: dict[str, Any]
    sent: dict[str, Any]

    @property
    def mbit_per_s(self) -> float:
        return float(self.received["bytes"] * 8e-6 / self.received["seconds"])

    @property
    def longest(self) -> dict[str, Any]:
        """What the watch of the side told whose loop was held for longer."""
        return max(self.received, self.sent, key=itemgetter("held_s"))

    def __str__(self) -> str:
        gigabytes = max(1, self.received["bytes"]) / 1e9
        return (
            f"  {self.kind:<5}{self.mbit_per_s:9.1f} Mbit/s   CPU s/GB "
            f"{self.sent['cpu_s'] / gigabytes:6.2f} send + {self.received['cpu_s'] / gigabytes:6.2f} receive"
        )


def measure(kind: str, case: Case, seconds: float, wan: str | None) -> Result:
    """One round: two processes, in the two namespaces of the line or here."""
    host = "127.0.0.1" if case.wan is None else "10.77.0.2"
    here = [[], []] if case.wan is None or wan is None else [[wan, "exec", side] for side in "ab"]
    own = [sys.executable, "-m", "tests.benchmarks.links"]
    server = subprocess.Popen([*here[1], *own, "--serve", kind, host, str(seconds)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = server.stdout.readline().strip()
        client = subprocess.run(
            [*here[0], *own, "--call", kind, host, port, str(seconds)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds + PATIENCE_S,
            check=True,
        )
        received, _ = server.communicate(timeout=PATIENCE_S)
    finally:
        server.kill()
        server.wait()
    return Result(kind, json.loads(received), json.loads(client.stdout))


def compare(case: Case, rounds: int, seconds: float, wan: str | None) -> bool:
    """Measures and prints one case; whether its bounds hold."""
    print(case.name)
    raws, links = [], []
    for _ in range(rounds):
        raws.append(measure("raw", case, seconds, wan))
        links.append(measure("link", case, seconds, wan))
        print(raws[-1], links[-1], sep="\n")
    share = statistics.median(r.mbit_per_s for r in links) / statistics.median(r.mbit_per_s for r in raws)
    waits_s = sorted(wait for result in links for wait in result.sent["waits_s"])
    p50_s, p95_s = (waits_s[int(len(waits_s) * part)] for part in (0.5, 0.95))
    longest = max((result.longest for result in links), key=itemgetter("held_s"))
    ok = bool(longest["held_s"] <= LOOP_HELD_S)
    words = [f"share of raw TCP {share:.2f}"]
    if case.share_min is not None:
        ok = ok and share >= case.share_min
        words[-1] += f" (at least {case.share_min})"
    words.append(f"control p50 {p50_s * 1e3:.0f} ms, p95 {p95_s * 1e3:.0f} ms of {len(waits_s)}")
    if case.control_max_s is not None:
        ok = ok and p95_s <= case.control_max_s
        words[-1] += f" (p95 under {case.control_max_s * 1e3:.0f})"
    words.append(f"longest step {held(longest)}")
    print("  " + "; ".join(words), "" if ok else "FAIL", flush=True)
    return ok


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 0 when all bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round, after the warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wan", metavar="SCRIPT", help="also over delay and loss, by this script")
    parser.add_argument("--case", action="append", help="only cases whose name starts so; may be repeated")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--call", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve or options.call:
        keep_what_is_loaded()  # as the daemons do
    if options.serve:
        kind, host, seconds = options.serve
        trio.run(serve, kind, host, float(seconds))
        return 0
    if options.call:
        kind, host, port, seconds = options.call
        trio.run(call, kind, host, int(port), float(seconds))
        return 0
    print(f"a loop that does nothing: longest step {pause_s(options.seconds) * 1e3:.1f} ms")
    good = True
    for case in (LOOPBACK, *(WAN if options.wan else ())):
        if options.case and not case.name.startswith(tuple(options.case)):
            continue
        if case.wan is not None:
            subprocess.run([options.wan, *case.wan], check=True)
        try:
            good = compare(case, options.rounds, options.seconds, options.wan) and good
        finally:
            if case.wan is not None:
                subprocess.run([options.wan, "down"], check=True)
    print("pass" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
