"""Links cancelled and cut at named points: afterwards no task, process, socket or helper's state is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import trio

from node.links.punch import punched
from node.links.punch.helper import Connection
from node.links.punch.punched import Punched, PunchError
from node.links.quic.quic import open_quic
from protocol.link.signal import Way
from tests.node.links.punch.punch_pair import PunchPair, helper_is_idle, punch_pair, settled
from tests.protocol.samples import ALICE, BOB

pytestmark = pytest.mark.slow

Point = Callable[[PunchPair], Awaitable[None]]
POINTS: dict[str, tuple[Way, Point]] = {}


def point(way: Way) -> Callable[[Point], Point]:
    """Registers a point by its function's name."""

    def register(function: Point) -> Point:
        POINTS[function.__name__] = (way, function)
        return function

    return register


async def _until(happened: Callable[[], bool]) -> None:
    async def probe() -> bool:
        return happened()

    await settled(probe)


def _connections(pair: PunchPair) -> dict[int, Connection]:
    process = pair.alice._helper._process
    return {} if process is None else process.connections


async def _cancel_call_when(
    pair: PunchPair, reached: Callable[[], bool], exchange: Callable[[bytes], Awaitable[bytes]] | None = None
) -> None:
    """Cancel Alice's call as soon as `reached`."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.alice.call, BOB.node, exchange or pair.exchange)
        await _until(reached)
        nursery.cancel_scope.cancel()


async def _send_on_and_on(link: Punched) -> None:
    while True:
        await link.stream.send_all(bytes(1 << 16))


async def _close(*links: Punched) -> None:
    for link in links:
        await trio.aclose_forcefully(link.stream)


@point("channel")
async def offerer_cancelled_while_its_helper_starts(pair: PunchPair) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.alice.call, BOB.node, pair.exchange)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


@point("channel")
async def offerer_cancelled_while_gathering(pair: PunchPair) -> None:
    await _cancel_call_when(pair, lambda: bool(_connections(pair)))


@point("channel")
async def offerer_cancelled_while_letters_travel(pair: PunchPair) -> None:
    travelling = trio.Event()

    async def exchange(_offer: bytes) -> bytes:
        travelling.set()
        await trio.sleep_forever()
        raise AssertionError

    await _cancel_call_when(pair, travelling.is_set, exchange)


@point("quic")
async def exchange_fails(pair: PunchPair) -> None:
    async def exchange(_offer: bytes) -> bytes:
        raise PunchError("the coordinator is gone")

    with pytest.raises(PunchError, match="the coordinator is gone"):
        await pair.alice.call(BOB.node, exchange)


@point("channel")
async def offerer_cancelled_in_checks(pair: PunchPair) -> None:
    stopped: list[int] = []

    async def exchange(offer: bytes) -> bytes:
        answer = await pair.exchange(offer)
        assert pair.bob.helper_pid is not None
        stopped.append(pair.bob.helper_pid)
        os.kill(stopped[0], signal.SIGSTOP)  # its side of the checks never comes
        return answer

    try:
        await _cancel_call_when(pair, lambda: bool(stopped), exchange)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@point("channel")
async def offerer_cancelled_when_the_channel_is_open(pair: PunchPair) -> None:
    await _cancel_call_when(pair, lambda: any(one.outcome is not None for one in _connections(pair).values()))


@point("quic")
async def offerer_cancelled_in_the_quic_handshake(pair: PunchPair) -> None:
    opened = trio.Event()

    async def noting(*arguments: Any, **options: Any) -> trio.abc.Stream:
        if options["client"]:
            opened.set()
        return await open_quic(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(punched, "open_quic", noting)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.alice.call, BOB.node, pair.exchange)
            await opened.wait()
            nursery.cancel_scope.cancel()


@point("channel")
async def answerer_cancelled_while_gathering(pair: PunchPair) -> None:
    async def exchange(offer: bytes) -> bytes:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pair.bob.answer, ALICE.node, offer)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        raise PunchError("no answer")

    with pytest.raises(PunchError):
        await pair.alice.call(BOB.node, exchange)


@point("channel")
async def answerer_cancelled_while_it_waits(pair: PunchPair) -> None:
    async def exchange(offer: bytes) -> bytes:
        answer, finish = await pair.bob.answer(ALICE.node, offer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(finish)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        return answer

    with pytest.raises(PunchError):
        await pair.alice.call(BOB.node, exchange)


@point("quic")
async def answerer_does_not_ask_for_its_stream(pair: PunchPair) -> None:
    alices = await pair.alice.call(BOB.node, pair.exchange)
    assert await alices.stream.receive_some() == b""  # Bob closes it after a while
    await _close(alices)


async def _send_cancelled(pair: PunchPair) -> None:
    links = await pair.link()
    with trio.move_on_after(1):
        await _send_on_and_on(links[0])
    await _close(*links)


@point("channel")
async def send_cancelled_on_a_channel(pair: PunchPair) -> None:
    await _send_cancelled(pair)


@point("quic")
async def send_cancelled_on_quic(pair: PunchPair) -> None:
    await _send_cancelled(pair)


async def _receive_cancelled(pair: PunchPair) -> None:
    alices, bobs = await pair.link()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alices.stream.receive_some)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await bobs.stream.send_all(b"afterwards it still works")
    assert await alices.stream.receive_some() == b"afterwards it still works"
    await _close(alices, bobs)


@point("channel")
async def receive_cancelled_on_a_channel(pair: PunchPair) -> None:
    await _receive_cancelled(pair)


@point("quic")
async def receive_cancelled_on_quic(pair: PunchPair) -> None:
    await _receive_cancelled(pair)


async def _cut_while_sending(pair: PunchPair, *, by_offerer: bool) -> None:
    cutter, sender = await pair.link()
    if not by_offerer:
        cutter, sender = sender, cutter
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            with pytest.raises(trio.BrokenResourceError):
                await _send_on_and_on(sender)

        nursery.start_soon(send)
        assert await cutter.stream.receive_some()
        await _close(cutter)
    await _close(sender)


@point("channel")
async def offerer_cuts_a_channel_that_is_full(pair: PunchPair) -> None:
    await _cut_while_sending(pair, by_offerer=True)


@point("channel")
async def answerer_cuts_a_channel_that_is_full(pair: PunchPair) -> None:
    await _cut_while_sending(pair, by_offerer=False)


@point("quic")
async def offerer_cuts_quic_that_is_full(pair: PunchPair) -> None:
    await _cut_while_sending(pair, by_offerer=True)


@point("channel")
async def helper_killed_while_gathering(pair: PunchPair) -> None:
    assert pair.alice.helper_pid is not None
    os.kill(pair.alice.helper_pid, signal.SIGKILL)
    with pytest.raises(PunchError, match="helper"):
        await pair.alice.call(BOB.node, pair.exchange)


@point("channel")
async def helper_killed_while_letters_travel(pair: PunchPair) -> None:
    async def exchange(offer: bytes) -> bytes:
        answer = await pair.exchange(offer)
        assert pair.alice.helper_pid is not None
        os.kill(pair.alice.helper_pid, signal.SIGKILL)
        await _until(lambda: pair.alice.helper_pid is None)
        return answer

    with pytest.raises(PunchError, match="helper"):
        await pair.alice.call(BOB.node, exchange)


@point("channel")
async def answerers_helper_killed_in_checks(pair: PunchPair) -> None:
    async def exchange(offer: bytes) -> bytes:
        answer = await pair.exchange(offer)
        assert pair.bob.helper_pid is not None
        os.kill(pair.bob.helper_pid, signal.SIGKILL)
        return answer

    with pytest.raises(PunchError):
        await pair.alice.call(BOB.node, exchange)
    assert pair.finish is not None
    with pytest.raises(PunchError, match="helper"):
        await pair.finish()


@point("channel")
async def helper_killed_under_a_full_channel(pair: PunchPair) -> None:
    alices, bobs = await pair.link()
    assert pair.alice.helper_pid is not None
    os.kill(pair.alice.helper_pid, signal.SIGKILL)
    with pytest.raises(trio.BrokenResourceError, match="helper"):
        await _send_on_and_on(alices)
    with suppress(trio.BrokenResourceError):
        while await bobs.stream.receive_some():
            pass
    await _close(alices, bobs)


@point("quic")
async def helper_killed_after_it_handed_the_socket_over(pair: PunchPair) -> None:
    """Nothing happens to the link: the helper has nothing to do with it any more."""
    alices, bobs = await pair.link()
    for which in (pair.alice, pair.bob):
        assert which.helper_pid is not None
        os.kill(which.helper_pid, signal.SIGKILL)
    await alices.stream.send_all(b"still here")
    assert await bobs.stream.receive_some() == b"still here"
    await _close(alices, bobs)


@point("channel")
async def daemon_ends_under_a_full_channel(pair: PunchPair) -> None:
    alices, _ = await pair.link()
    pair.nursery.start_soon(alices.stream.send_all, bytes(8 << 20))
    await trio.testing.wait_all_tasks_blocked()
    pair.nursery.cancel_scope.cancel()


@point("quic")
async def daemon_ends_under_full_quic(pair: PunchPair) -> None:
    alices, _ = await pair.link()
    pair.nursery.start_soon(alices.stream.send_all, bytes(8 << 20))
    await trio.testing.wait_all_tasks_blocked()
    pair.nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", POINTS)
async def test_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block around the pair compares handles, children and tasks; here the helpers are asked for theirs."""
    monkeypatch.setattr("node.links.punch.punched.CLAIM_S", 0.2)
    way, act = POINTS[name]
    async with punch_pair(way) as pair:
        if act is not offerer_cancelled_while_its_helper_starts:
            await pair.alice.start_helper()
            await pair.bob.start_helper()
        await act(pair)
        for which in (pair.alice, pair.bob):
            await settled(partial(helper_is_idle, which))


def test_there_are_enough_points() -> None:
    assert len(POINTS) >= 20
