"""Two processes with a whole link between them, in the two network namespaces of `deploy/wan`; for measurements.

Each has a transport, a puncher, and events that answer pings. Letters (and what a measurement has to agree on) travel
over a TCP connection of their own, which is silent while something is measured.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import trio

from node.links.punch.punched import IceServers, Punched, Puncher, PunchOptions
from node.links.relay.relay_desk import RelayLimits
from node.links.relay.relayed import Proof, RelayServer, open_leg
from protocol.base.ids import TaskId, TensorRef
from protocol.drive.limits import Limits
from protocol.drive.tcp import open_listeners
from protocol.drive.transport import Link, LinkOptions, Transport
from protocol.link.relay import link_prologue
from protocol.messages import Activation, Message, Ping, Pong
from protocol.trust.identity import Identity
from tests.protocol.samples import RUN_ID

TENSOR_BYTES = 8 << 20
PING_EVERY_S = 0.05
LOOP_HELD_S = 0.010
"""What one step of a link may take of its loop."""
HOSTS = {"serve": "10.77.0.1", "call": "10.77.0.2"}
NAMESPACES = {"serve": "a", "call": "b"}
LETTERS_PORT, LINK_PORT, RELAY_PORT = 7000, 7001, 7002

_IDENTITIES = {
    part: Identity(bytes((number,)) * 32) for number, part in ((0x71, "serve"), (0x72, "call"), (0x73, "relay"))
}
_MEETING = b"0123456789abcdef"


class StepWatch(trio.abc.Instrument):
    """The processor time of the longest step of any task, how much of it the kernel took, and whose it was."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.longest_kernel_s = 0.0
        self.longest_task = ""
        self._began: float | None = None
        self._began_kernel_s = 0.0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began_kernel_s = _kernel_s()
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is None:
            return  # the step in which we came
        step_s = time.thread_time() - self._began
        if step_s > self.longest_s:
            self.longest_s, self.longest_kernel_s = step_s, _kernel_s() - self._began_kernel_s
            self.longest_task = ".".join(task.name.split(".")[-2:])

    def told(self) -> dict[str, Any]:
        """For `held`, as JSON carries it."""
        return {"held_s": self.longest_s, "held_kernel_s": self.longest_kernel_s, "held_task": self.longest_task}


def held(told: dict[str, Any]) -> str:
    """What a watch told, as words."""
    kernel_ms, task = told["held_kernel_s"] * 1e3, told["held_task"]
    return f"{told['held_s'] * 1e3:4.1f} ms ({kernel_ms:3.1f} in the kernel; {task})"


def pause_s(seconds: float) -> float:
    """The longest step of a loop that does nothing, in processor time: what a busy host takes from its machines."""
    longest_s, until, last = 0.0, time.monotonic() + seconds, time.thread_time()
    while time.monotonic() < until:
        now = time.thread_time()
        longest_s, last = max(longest_s, now - last), now
    return longest_s


def _kernel_s() -> float:
    """Of this thread, in the kernel: system calls and pages that are touched first."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_stime


@dataclass
class Events:
    """Counts tensor bytes, answers pings, and notes when pongs came."""

    tensor_bytes: int = 0
    waits_s: list[float] = field(default_factory=list)
    """From a ping to its pong."""
    ways_s: list[float] = field(default_factory=list)
    """From a ping's sending to its arrival: both processes look at one clock."""
    up: trio.Event = field(default_factory=trio.Event)
    down: trio.Event = field(default_factory=trio.Event)
    reason: str = ""
    """Why the link went."""
    link: Link | None = None
    wanted: Callable[[Link, Message], bool] = lambda link, message: False
    """Sees every message first; true when it was one of its own."""

    def on_up(self, link: Link) -> None:
        self.link = link
        self.up.set()

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if self.wanted(link, message):
            return
        if isinstance(message, Ping):
            link.send(Pong(number=message.number))
            self.ways_s.append((time.monotonic_ns() - message.number) * 1e-9)
        elif isinstance(message, Pong):
            self.waits_s.append((time.monotonic_ns() - message.number) * 1e-9)
        self.tensor_bytes += sum(map(len, buffers))

    def on_down(self, link: Link, reason: str) -> None:
        self.reason = reason
        self.down.set()

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        print("rejected:", reason, detail, file=sys.stderr)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Counted elsewhere."""


class Side:
    """One process: a transport, a puncher, and what the measuring noted. `way`: tcp, relay, quic or channel."""

    def __init__(self, nursery: trio.Nursery, part: str, way: str, limits: Limits | None = None) -> None:
        self.part = part
        self.way = way
        self.peer = _IDENTITIES["call" if part == "serve" else "serve"].node
        self.events = Events()
        self.watch = StepWatch()
        self.transport = _transport(nursery, part, self.events, limits)
        self.puncher = Puncher(
            nursery,
            identity=_IDENTITIES[part],
            run_id=RUN_ID,
            generation=lambda: 0,
            servers=IceServers,
            options=PunchOptions(lan=True, ways=("channel",) if way == "channel" else ("quic",)),
            limits=limits,
        )
        trio.lowlevel.add_instrument(self.watch)

    def cpu_s(self) -> float:
        """Of this process and its helper."""
        total = time.process_time()
        if self.puncher.helper_pid is not None:
            times = psutil.Process(self.puncher.helper_pid).cpu_times()
            total += times.user + times.system
        return total

    async def answer(self, letters: trio.SocketStream, relay_host: str = "") -> None:
        """Be the one whom the other process opens a link to: returns when it is there, over TCP at once."""
        if self.way in ("quic", "channel"):
            answer, wait = await self.puncher.answer(self.peer, await hear(letters))
            await say(letters, answer)
            await self._adopt(await wait())
        elif self.way == "relay":
            await self._meet(relay_host, initiator=False)

    async def open(self, letters: trio.SocketStream, relay_host: str = "") -> Link:
        """Open the link."""
        if self.way == "tcp":
            return await self.transport.dial([f"{HOSTS['serve']}:{LINK_PORT}"], self.peer)
        if self.way == "relay":
            return await self._meet(relay_host, initiator=True)

        async def exchange(offer: bytes) -> bytes:
            await say(letters, offer)
            return await hear(letters)

        return await self._adopt(await self.puncher.call(self.peer, exchange))

    async def _adopt(self, punched: Punched) -> Link:
        return await self.transport.adopt(
            punched.stream,
            self.peer,
            initiator=punched.initiator,
            path=punched.path,
            address=punched.address,
            prologue=punched.prologue,
        )

    async def _meet(self, host: str, *, initiator: bool) -> Link:
        address = f"{host}:{RELAY_PORT}"
        leg = await open_leg([address], _IDENTITIES["relay"].node, _MEETING, _proof(self.part), self.transport)
        return await self.transport.adopt(
            leg,
            self.peer,
            initiator=initiator,
            path="relay",
            address=address,
            prologue=link_prologue(_MEETING),
        )

    async def send_tensors(self, link: Link, enough: trio.Event) -> None:
        """Always have one or two waiting, until the event is set."""
        data = await trio.to_thread.run_sync(os.urandom, TENSOR_BYTES)
        tensors = (TensorRef(0, (TENSOR_BYTES // 4,), "fp32", TENSOR_BYTES),)
        number = 0
        while not enough.is_set():
            if link.queued_bytes < TENSOR_BYTES:
                link.send(Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors), [data])
                number += 1
            await trio.sleep(0.01)


async def ping(link: Link) -> None:
    """Until cancelled."""
    while True:
        link.send(Ping(number=time.monotonic_ns()))
        await trio.sleep(PING_EVERY_S)


async def relay(host: str) -> None:
    """A server that relays for the two others, until cancelled."""
    async with trio.open_nursery() as nursery:
        transport = _transport(nursery, "relay", Events(), None)
        transport.guests = RelayServer(
            _proof("relay"),
            RelayLimits(bytes_per_s=math.inf),
            rejected=transport.events.on_rejected,
            count=lambda metric, value, labels: None,
        )
        nursery.start_soon(transport.serve, await open_listeners(host, RELAY_PORT))
        print("ready", flush=True)


def start(wan: str, side: str, module: str, *arguments: str) -> subprocess.Popen[str]:
    """`python -m MODULE ARGUMENTS` in a namespace; the process itself, not one that waits for it."""
    command = [wan, "exec", side, sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _proof(part: str) -> Proof:
    return Proof(_IDENTITIES[part], RUN_ID, lambda: b"", lambda key, credential: "server")


def _transport(nursery: trio.Nursery, part: str, events: Events, limits: Limits | None) -> Transport:
    return Transport(
        nursery,
        identity=_IDENTITIES[part],
        role="server",
        run_id=RUN_ID,
        credential=lambda: b"",
        admit=lambda key, credential: "server",
        events=events,
        options=LinkOptions(tensor_bytes_max=TENSOR_BYTES, window_bytes=8 * TENSOR_BYTES),
        limits=limits,
    )


async def say(stream: trio.SocketStream, letter: bytes) -> None:
    await stream.send_all(len(letter).to_bytes(4, "big") + letter)


async def hear(stream: trio.SocketStream) -> bytes:
    async def exactly(byte_count: int) -> bytes:
        data = b""
        while len(data) < byte_count:
            piece = await stream.receive_some(byte_count - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    return await exactly(int.from_bytes(await exactly(4), "big"))
