"""Two or more transports on loopback, and a recorder of what they report."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TaskId, TensorRef
from protocol.drive.tcp import open_listeners
from protocol.drive.transport import Link, LinkOptions, Transport
from protocol.messages import Activation, Message
from protocol.trust.identity import Identity
from tests.protocol.samples import RUN_ID

PATIENCE_S = 30.0
"""A hang is a failure; nothing here takes anywhere near so long."""


@dataclass
class Recorder:
    """Keeps all events, and lets a test wait for a state of them."""

    up: list[Link] = field(default_factory=list)
    down: list[tuple[Link, str]] = field(default_factory=list)
    messages: list[tuple[Link, Message, tuple[memoryview, ...]]] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)
    byte_counts: dict[tuple[str, str], int] = field(default_factory=dict)
    hold: trio.Event | None = None
    """While set and not fired, messages wait inside `on_message`."""
    _changed: trio.Event = field(default_factory=trio.Event)

    def on_up(self, link: Link) -> None:
        self.up.append(link)
        self._notify()

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        self.messages.append((link, message, buffers))
        self._notify()
        if self.hold is not None:
            await self.hold.wait()

    def on_down(self, link: Link, reason: str) -> None:
        self.down.append((link, reason))
        self._notify()

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        self.rejected.append((reason, detail))
        self._notify()

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        self.byte_counts[direction, kind] = self.byte_counts.get((direction, kind), 0) + byte_count

    async def until(self, condition: Callable[[Recorder], object]) -> None:
        """Wait until the condition holds; a test that would hang fails instead."""
        with trio.fail_after(PATIENCE_S):
            while not condition(self):
                await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@dataclass
class Station:
    """One transport that serves on loopback."""

    identity: Identity
    transport: Transport
    events: Recorder
    address: str


def activation(byte_count: int, number: int = 1) -> Activation:
    """A message with one tensor of so many bytes."""
    tensors = (TensorRef(0, (byte_count // 4,), "fp32", byte_count),)
    return Activation(ledger_generation=1, task=TaskId(1, number, 0, "F"), tensors=tensors)


def admit_all(key: bytes, credential: bytes) -> str:
    """Everybody is what its credential says in plain letters."""
    if credential not in (b"server", b"volunteer", b"coordinator"):
        raise RemoteProtocolError("credential", "no such role")
    return credential.decode()


@asynccontextmanager
async def stations(
    *roles: str,
    run_id: bytes = RUN_ID,
    admit: Callable[[bytes, bytes], str] = admit_all,
    options: LinkOptions | None = None,
) -> AsyncIterator[list[Station]]:
    """Stations of these roles; everything is torn down at the end of the block."""
    async with trio.open_nursery() as nursery:
        made = []
        for number, role in enumerate(roles):
            identity, events = Identity(bytes([100 + number]) * 32), Recorder()
            transport = Transport(
                nursery,
                identity=identity,
                role=role,
                run_id=run_id,
                credential=role.encode,
                admit=admit,
                events=events,
                options=options,
            )
            listeners = await open_listeners("127.0.0.1", 0)
            port = listeners[0].socket.getsockname()[1]
            nursery.start_soon(transport.serve, listeners)
            made.append(Station(identity, transport, events, f"127.0.0.1:{port}"))
        yield made
        nursery.cancel_scope.cancel()
