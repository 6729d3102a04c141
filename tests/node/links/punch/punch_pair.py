"""Two punchers on this computer, and somebody between them who carries their letters."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import trio

from node.links.punch.helper import HelperGoneError
from node.links.punch.punched import IceServers, Punched, Puncher, PunchOptions
from node.links.quic.quic import ByteLimits
from protocol.link.signal import Way
from protocol.trust.identity import Identity
from tests.protocol.samples import ALICE, BOB, RUN_ID

Carry = Callable[[bytes], Awaitable[bytes]]


async def unchanged(letter: bytes) -> bytes:
    """An honest carrier."""
    return letter


@dataclass
class PunchPair:
    """Alice offers, Bob answers."""

    alice: Puncher
    bob: Puncher
    nursery: trio.Nursery
    offers: list[bytes] = field(default_factory=list)
    finish: Callable[[], Awaitable[Punched]] | None = None

    async def exchange(self, offer: bytes) -> bytes:
        """What Alice's `call` is given."""
        self.offers.append(offer)
        answer, self.finish = await self.bob.answer(ALICE.node, offer)
        return answer

    async def link(self) -> tuple[Punched, Punched]:
        """Both ends of a new link."""
        alices = await self.alice.call(BOB.node, self.exchange)
        assert self.finish is not None
        return alices, await self.finish()


def puncher(
    nursery: trio.Nursery, identity: Identity, ways: tuple[Way, ...], limits: ByteLimits | None = None
) -> Puncher:
    return Puncher(
        nursery,
        identity=identity,
        run_id=RUN_ID,
        generation=lambda: 3,
        servers=IceServers,
        options=PunchOptions(loopback=True, ways=ways),
        limits=limits,
    )


@asynccontextmanager
async def punch_pair(
    *ways: Way, limits: tuple[ByteLimits | None, ByteLimits | None] = (None, None)
) -> AsyncIterator[PunchPair]:
    """Both are ended with the block; nothing of them may be left then. `limits`: Alice's and Bob's."""
    before = Held.now()
    async with trio.open_nursery() as nursery:
        alice, bob = (puncher(nursery, who, ways, limit) for who, limit in zip((ALICE, BOB), limits, strict=True))
        yield PunchPair(alice, bob, nursery)
        nursery.cancel_scope.cancel()
    assert Held.now() == before


@dataclass(frozen=True)
class Held:
    """What this process holds that could leak. Threads are trio's, which keeps idle ones for ten seconds."""

    handles: int
    children: int
    tasks: int

    @classmethod
    def now(cls) -> Held:
        tasks, todo = 0, [trio.lowlevel.current_root_task()]
        while todo:
            task = todo.pop()
            if task is not None:
                tasks += 1
                todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        return cls(len(list(Path("/proc/self/fd").iterdir())), len(psutil.Process().children()), tasks)


async def settled(probe: Callable[[], Awaitable[bool]]) -> None:
    """Returns when `probe` is true; thirty seconds are more than anything here takes on a busy computer."""
    with trio.fail_after(30):
        while not await probe():
            await trio.sleep(0.01)


async def helper_is_idle(which: Puncher) -> bool:
    """Whether the helper holds nothing for any connection: one task (its own), no UDP socket."""
    try:
        census = await which.helper_census()
    except HelperGoneError:
        return True
    return census is None or (census.connections, census.tasks, census.sockets) == (0, 1, 0)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
