"""What strangers do at a run's doors, over and over, until they are told to stop: raw links, calls and datagrams.

`attacks.py` runs each of them beside an honest run. Every raid goes on after a refusal: it dials again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import trio

from protocol.base.ids import ContributionId, TaskId
from protocol.link import stun
from protocol.link.framing import Frame
from protocol.messages import FetchParameters, Ping, Pong
from protocol.trust.handshake import ENTROPY_BYTES, VERSION
from protocol.trust.identity import Identity
from protocol.trust.membership import JoinLink
from tests.integration.attacker import RawLink, join, join_message
from tests.integration.bad_deeds import (
    GOOD,
    STEPS_AHEAD,
    Target,
    contribute,
    input_gradient,
    output,
    ready,
    whole_part,
)

ZEROS = bytes(GOOD.byte_count)
CALLS_PER_S = 300
SILENT = 200
"""Callers of a metrics port that say nothing."""


@dataclass
class Raid:
    """What a raid may use, and what came of it."""

    link: JoinLink
    """The reusable one, for volunteers."""
    places: dict[str, Target]
    """By the attacked: `coordinator`, `front 0`, `back 0`, `front 1`, `back 1`."""
    metrics: str
    """HOST:PORT of a server's metrics."""
    step: Callable[[], int]
    ended: Callable[[], bool]
    strikes: int = 0
    out_after_s: list[float] = field(default_factory=list)
    """From a link's opening to its end by the other side."""
    calls_s: list[float] = field(default_factory=list)
    """What an honest call took meanwhile, handshake and an answer."""
    honest_failed: int = 0

    def targets(self, *names: str) -> Iterator[Target]:
        """These, in turns, for as long as the raid lasts."""
        while not self.ended():
            for name in names:
                if not self.ended():
                    yield self.places[name]


Play = Callable[[Raid], Awaitable[None]]


async def _until_closed(raid: Raid, strike: Callable[[], Awaitable[RawLink]]) -> None:
    """One attempt; how long the other side bore with it."""
    began = time.monotonic()
    try:
        link = await strike()
        raid.strikes += 1
        with trio.move_on_after(5) as patience:
            await link.is_closed()
        if not patience.cancelled_caught:
            raid.out_after_s.append(time.monotonic() - began)
        with contextlib.suppress(OSError):
            link.stream.socket.close()
    except (OSError, AssertionError, trio.BrokenResourceError, trio.ClosedResourceError):
        raid.strikes += 1  # not even let in
        raid.out_after_s.append(time.monotonic() - began)
        await trio.sleep(0.01)


async def results_without_a_lease(raid: Raid) -> None:
    """Results for all of the steps that are open: of the stage's whole work, if they counted."""

    async def strike(target: Target, back: bool) -> RawLink:
        link = await target.open()
        step = raid.step()
        for number in range(step + 1, step + 1 + STEPS_AHEAD):
            made = output(GOOD) if back else input_gradient(GOOD)
            await link.say(made(target, number), (ZEROS,))
        return link

    for target in raid.targets("back 0", "front 1"):
        back = target is raid.places["back 0"]
        await _until_closed(raid, lambda target=target, back=back: strike(target, back))  # type: ignore[misc]


async def sums_without_a_lease(raid: Raid) -> None:
    """Whole contributions of sixteen identities at once, 256 each: once they filled a table of 4,096 parts."""

    async def one(seed: int) -> None:
        back = raid.places["back 0"]
        papers = await join(raid.link, seed)

        async def strike() -> RawLink:
            link = await RawLink.open(back.address, back.node, papers)
            part = whole_part(back)
            for number in range(256):
                message = contribute(
                    part,
                    contribution=ContributionId(papers.identity.node, 1, number),
                    tasks=(TaskId(raid.step() + 1, 0, 0, "B"),),
                )(back, raid.step() + 1)
                await link.say(message, (bytes(part.byte_count),))
            return link

        while not raid.ended():
            await _until_closed(raid, strike)

    async with trio.open_nursery() as nursery:
        for seed in range(200, 216):
            nursery.start_soon(one, seed)


async def slots_of_nobody(raid: Raid) -> None:
    """64 slots, and -1: once 200 leases at once."""

    async def strike(target: Target, slots: int) -> RawLink:
        link = await target.open()
        await link.say(ready(slots)(target, 0))
        return link

    slots = 64
    for target in raid.targets("front 0", "back 0", "front 1"):
        await _until_closed(raid, lambda target=target, slots=slots: strike(target, slots))  # type: ignore[misc]
        slots = -1 if slots == 64 else 64


async def many_identities(raid: Raid) -> None:
    """New keys on one reusable link, as fast as they are let in."""
    while not raid.ended():
        with contextlib.suppress(OSError, AssertionError, trio.TooSlowError):
            await join(raid.link, 0, Identity(os.urandom(32)))
        raid.strikes += 1


async def tensors_without_end(raid: Raid) -> None:
    """64 links, on each a tensor that is begun and never ended."""

    async def one() -> None:
        for target in raid.targets("back 0"):

            async def strike(target: Target = target) -> RawLink:
                link = await target.open()
                part = whole_part(target)
                message = contribute(part)(target, raid.step() + 1)
                await link.frame(Frame.BULK, bytes(4) + msgspec.msgpack.encode(message))
                await link.frame(Frame.CHUNK, bytes(4) + bytes(min(part.byte_count // 2, 30_000)))
                return link

            await _until_closed(raid, strike)

    async with trio.open_nursery() as nursery:
        for _ in range(64):
            nursery.start_soon(one)


async def half_open_calls(raid: Raid) -> None:
    """300 calls a second at a server that never say a word; beside them an honest call each half second."""
    target = raid.places["front 0"]
    held: list[RawLink] = []

    async def calls() -> None:
        while not raid.ended():
            with contextlib.suppress(OSError, trio.TooSlowError):
                held.append(await RawLink.connect(target.address))
            raid.strikes += 1
            if len(held) > 2 * CALLS_PER_S:
                held.pop(0).stream.socket.close()
            await trio.sleep(1 / CALLS_PER_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(calls)
        nursery.start_soon(_honest_calls, raid, target)


async def first_messages(raid: Raid) -> None:
    """Good first messages of a handshake at the coordinator, 300 a second, none of them followed by a second."""
    target = raid.places["coordinator"]

    async def calls() -> None:
        while not raid.ended():
            with contextlib.suppress(OSError, trio.TooSlowError, trio.BrokenResourceError):
                link = await RawLink.connect(target.address)
                first = bytes((VERSION,)) + target.volunteer.run_id + os.urandom(ENTROPY_BYTES) + bytes(16)
                await link.raw(len(first).to_bytes(4, "big") + first)
                link.stream.socket.close()
            raid.strikes += 1
            await trio.sleep(1 / CALLS_PER_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(calls)
        nursery.start_soon(_honest_calls, raid, raid.places["front 0"])


async def questions_by_udp(raid: Raid) -> None:
    """STUN questions at the coordinator's port, 300 a second."""
    host, _, port = raid.places["coordinator"].address.rpartition(":")
    sock = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
    while not raid.ended():
        with contextlib.suppress(OSError):
            await sock.sendto(stun.question(os.urandom(stun.TRANSACTION_BYTES)), (host, int(port)))
        raid.strikes += 1
        await trio.sleep(1 / CALLS_PER_S)
    sock.close()


async def silent_scrapers(raid: Raid) -> None:
    """Callers of a server's metrics that send nothing, 200 at a time."""
    held: list[RawLink] = []
    while not raid.ended():
        with contextlib.suppress(OSError, trio.TooSlowError):
            held.append(await RawLink.connect(raid.metrics))
        raid.strikes += 1
        if len(held) > SILENT:
            held.pop(0).stream.socket.close()
        await trio.sleep(1 / 100)


async def descriptors(raid: Raid) -> None:
    """A thousand links of members to one server, held open."""
    target = raid.places["back 0"]
    held: list[RawLink] = []
    while not raid.ended():
        with contextlib.suppress(OSError, AssertionError, trio.TooSlowError, trio.BrokenResourceError):
            if len(held) < 1000:
                held.append(await target.open())
                raid.strikes += 1
        await trio.sleep(0.002)


async def parameters_over_and_over(raid: Raid) -> None:
    """Asks for the same parameters, and reads none of them."""

    async def strike(target: Target) -> RawLink:
        link = await target.open()
        for _ in range(200):
            await link.say(FetchParameters(ledger_generation=target.volunteer.generation, version=raid.step() + 1))
        return link

    for target in raid.targets("front 0", "back 1"):
        await _until_closed(raid, lambda target=target: strike(target))  # type: ignore[misc]


async def words_for_a_terminal(raid: Raid) -> None:
    """A name that would write into the clipboard of whoever reads the status."""

    async def strike(target: Target) -> RawLink:
        link = await target.open()
        await link.say(join_message("volunteer", name="\x1b]52;c;ZWNobyBoaQ==\x07"))
        return link

    for target in raid.targets("coordinator"):
        await _until_closed(raid, lambda target=target: strike(target))  # type: ignore[misc]


async def _honest_calls(raid: Raid, target: Target) -> None:
    """A member calls, says a word, hears the answer, hangs up; again half a second later."""
    while not raid.ended():
        began = time.monotonic()
        try:
            link = await target.open()
            await link.say(Ping(number=7))
            await link.hear(Pong)
            raid.calls_s.append(time.monotonic() - began)
            link.stream.socket.close()
        except (OSError, AssertionError, trio.TooSlowError, trio.BrokenResourceError):
            raid.honest_failed += 1
        await trio.sleep(0.5)
