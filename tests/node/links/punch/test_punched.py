"""Punched links between two nodes on this computer: both ways, both directions, ends, limits, the helper's life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from random import Random
from typing import Any

import msgspec
import pytest
import trio

from node.links.punch.ice_process import own_addresses
from node.links.punch.punched import PUNCH_S, Punched, Puncher, PunchError, lets_no_udp_through
from protocol.base.ids import NodeId
from protocol.drive.limits import Limits
from protocol.link.candidates import Candidate
from protocol.link.signal import Answer, Offer, Way, letter_hash, sign_letter
from protocol.trust.handshake import Initiator, Responder, Session
from tests.node.links.punch.punch_pair import helper_is_idle, is_alive, punch_pair, puncher, settled
from tests.protocol.samples import ALICE, BOB, RUN_ID

BOTH: list[Way] = ["quic", "channel"]


async def _send(stream: trio.abc.Stream, data: bytes) -> None:
    for start in range(0, len(data), 100_000):
        await stream.send_all(data[start : start + 100_000])


async def _receive(stream: trio.abc.Stream, byte_count: int) -> bytes:
    got = bytearray()
    while len(got) < byte_count:
        piece = await stream.receive_some(70_000)
        assert piece, "the stream ended early"
        got += piece
    return bytes(got)


@pytest.mark.slow
@pytest.mark.parametrize("way", BOTH)
async def test_bytes_go_both_ways_at_once_unchanged(way: Way) -> None:
    data = Random(7).randbytes(3_000_000)
    async with punch_pair(way) as pair:
        alices, bobs = await pair.link()
        assert (alices.path, alices.initiator, bobs.path, bobs.initiator) == (way, True, way, False)
        assert alices.prologue == bobs.prologue and alices.prologue.startswith(b"quic" if way == "quic" else b"webrtc")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, alices.stream, data)
            nursery.start_soon(_send, bobs.stream, data[::-1])
            assert await _receive(bobs.stream, len(data)) == data
            assert await _receive(alices.stream, len(data)) == data[::-1]
        for punched in (alices, bobs):
            await punched.stream.aclose()


async def _shake_hands(handshake: Initiator | Responder, stream: trio.abc.Stream) -> NodeId:
    """Whom it proved to be at the other end."""
    session = None
    while session is None:
        first = handshake.data_to_send()
        if first:
            await stream.send_all(first)
        session = handshake.receive(bytes(await stream.receive_some(4096)))
    assert isinstance(session, Session)
    last = handshake.data_to_send()
    if last:
        await stream.send_all(last)
    return session.peer


@pytest.mark.parametrize("way", BOTH)
async def test_the_handshake_in_the_stream_proves_both(way: Way) -> None:
    """With the prologue that each side made of the letters that it saw."""
    async with punch_pair(way) as pair:
        alices, bobs = await pair.link()
        common: dict[str, Any] = {"credential": b"", "run_id": RUN_ID, "admit": lambda _key, _credential: "server"}
        initiator = Initiator(identity=ALICE, peer=BOB.node, entropy=b"a" * 32, prologue=alices.prologue, **common)
        responder = Responder(identity=BOB, entropy=b"b" * 32, prologue=bobs.prologue, **common)
        found: list[NodeId] = []

        async def respond() -> None:
            found.append(await _shake_hands(responder, bobs.stream))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(respond)
            assert await _shake_hands(initiator, alices.stream) == BOB.node
        assert found == [ALICE.node]
        for punched in (alices, bobs):
            await punched.stream.aclose()


@pytest.mark.slow
@pytest.mark.skipif("::1" not in own_addresses(loopback=True), reason="this computer has no IPv6 at all")
@pytest.mark.parametrize("way", BOTH)
async def test_a_pair_of_ipv6_addresses_does_as_well(way: Way) -> None:
    """Their letters tell only of those."""
    async with punch_pair(way) as pair:

        def only_six(letter: Offer | Answer) -> tuple[Candidate, ...]:
            return tuple(one for one in letter.candidates if len(one.address) == 16)

        async def exchange(signed: bytes) -> bytes:
            offer = msgspec.msgpack.decode(signed[:-64], type=Offer)
            changed = sign_letter(msgspec.structs.replace(offer, candidates=only_six(offer)), ALICE)
            answer = msgspec.msgpack.decode((await pair.exchange(changed))[:-64], type=Answer)
            fields = {"candidates": only_six(answer), "offer_hash": letter_hash(signed)}
            return sign_letter(msgspec.structs.replace(answer, **fields), BOB)

        alices = await pair.alice.call(BOB.node, exchange)
        assert pair.finish is not None
        bobs = await pair.finish()
        assert alices.address.startswith("[")
        await alices.stream.send_all(b"by the new road")
        assert await _receive(bobs.stream, 15) == b"by the new road"
        for punched in (alices, bobs):
            await punched.stream.aclose()


@pytest.mark.parametrize("way", BOTH)
async def test_what_was_sent_before_the_end_arrives_and_then_the_end(way: Way) -> None:
    """Also when the closing side does not wait, as a link that closes does."""
    async with punch_pair(way) as pair:
        alices, bobs = await pair.link()
        await alices.stream.send_all(b"x" * 60_000)
        await trio.aclose_forcefully(alices.stream)
        assert await _receive(bobs.stream, 60_000) == b"x" * 60_000
        assert await bobs.stream.receive_some() == b""
        with pytest.raises(trio.ClosedResourceError):
            await alices.stream.send_all(b"late")
        await bobs.stream.aclose()
        await settled(lambda: helper_is_idle(pair.alice))
        await settled(lambda: helper_is_idle(pair.bob))


@pytest.mark.slow
async def test_one_helper_carries_several_links_and_a_slow_reader_stops_only_its_own() -> None:
    async with punch_pair("channel") as pair:
        links = [await pair.link() for _ in range(3)]
        slow, *others = links
        data = Random(8).randbytes(2_500_000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, slow[0].stream, data)
            for alices, bobs in others:
                nursery.start_soon(_send, alices.stream, data)
                assert await _receive(bobs.stream, len(data)) == data
            assert await _receive(slow[1].stream, len(data)) == data
        assert pair.alice.helper_pid != pair.bob.helper_pid
        for link in links:
            for punched in link:
                await punched.stream.aclose()


@pytest.mark.slow
async def test_a_sender_stops_when_nobody_reads() -> None:
    """Back-pressure reaches the sending daemon: windows and queues of both helpers hold under 3 MB together."""
    async with punch_pair("channel") as pair:
        alices, bobs = await pair.link()
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await alices.stream.send_all(bytes(10_000))
                sent += 10_000

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            before = -1
            while before != sent:  # it has stopped when half a second brings nothing
                before = sent
                await trio.sleep(0.5)
            assert 0 < sent < 3_000_000
            nursery.cancel_scope.cancel()
        for punched in (alices, bobs):
            await punched.stream.aclose()


class _CountingLimits(Limits):
    """An owner's limits that only count."""

    def __init__(self) -> None:
        super().__init__()
        self.up_bytes = self.down_bytes = 0

    async def take_up(self, byte_count: int) -> None:
        self.up_bytes += byte_count
        await trio.lowlevel.checkpoint()

    async def take_down(self, byte_count: int) -> None:
        self.down_bytes += byte_count
        await trio.lowlevel.checkpoint()


class _ClosedLimits(_CountingLimits):
    """Lets so many bytes up and then no more, as a quota does."""

    def __init__(self, quota_bytes: int) -> None:
        super().__init__()
        self._quota_bytes = quota_bytes
        self.closed = trio.Event()

    async def take_up(self, byte_count: int) -> None:
        await super().take_up(byte_count)
        if self.up_bytes > self._quota_bytes:
            self.closed.set()
            await trio.sleep_forever()


@pytest.mark.slow
@pytest.mark.parametrize("way", BOTH)
async def test_every_datagram_counts_against_the_owners_limits(way: Way) -> None:
    """What one side counts as sent the other counts as received, checks and all, also after the end."""
    alices_limits, bobs_limits = _CountingLimits(), _CountingLimits()
    async with punch_pair(way, limits=(alices_limits, bobs_limits)) as pair:
        alices, bobs = await pair.link()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send, alices.stream, bytes(2_000_000))
            await _receive(bobs.stream, 2_000_000)
        for punched in (alices, bobs):
            await punched.stream.aclose()
        await settled(lambda: helper_is_idle(pair.alice))
        await settled(lambda: helper_is_idle(pair.bob))

        async def counted() -> bool:
            sent, received = alices_limits.up_bytes, bobs_limits.down_bytes
            return sent > 2_000_000 and received > 2_000_000 and abs(sent - received) < 0.02 * sent

        await settled(counted)
        assert alices_limits.down_bytes > 1_000, "acknowledgements count too"


@pytest.mark.slow
@pytest.mark.parametrize("way", BOTH)
async def test_a_limit_slows_the_sender_down(way: Way) -> None:
    """No more is sent than the limit lets pass, but for what was on its way when it closed."""
    limits = _ClosedLimits(1_000_000)
    async with punch_pair(way, limits=(limits, None)) as pair:
        alices, bobs = await pair.link()
        got = 0

        async def receive() -> None:
            nonlocal got
            while piece := await bobs.stream.receive_some():
                got += len(piece)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            nursery.start_soon(alices.stream.send_all, bytes(8_000_000))
            await limits.closed.wait()
            before = -1
            while before != got:
                before = got
                await trio.sleep(0.5)
            assert 0 < got < 3_000_000
            nursery.cancel_scope.cancel()
        for punched in (alices, bobs):
            await punched.stream.aclose()


async def test_without_a_common_way_nothing_is_tried() -> None:
    async with trio.open_nursery() as nursery:
        alice, bob = puncher(nursery, ALICE, ("quic",)), puncher(nursery, BOB, ("channel",))

        async def exchange(offer: bytes) -> bytes:
            return (await bob.answer(ALICE.node, offer))[0]

        with pytest.raises(PunchError, match="no way that both can go"):
            await alice.call(BOB.node, exchange)
        assert bob.helper_pid is None
        nursery.cancel_scope.cancel()


def test_a_network_without_udp_is_known_by_its_candidates() -> None:
    """Private addresses alone, when servers were asked; a public one, a reflected one or a relay is a way out."""
    private = Candidate("host", b"\xc0\xa8\x01\x14", 40000)
    public = Candidate("host", b"\x08\x08\x08\x08", 40000)
    assert lets_no_udp_through([private])
    assert not lets_no_udp_through([private, public])
    assert not lets_no_udp_through([private, Candidate("srflx", public.address, 40000)])
    assert not lets_no_udp_through([private, Candidate("relay", public.address, 40000)])


@pytest.mark.slow
async def test_a_peer_that_never_comes_is_given_up_after_six_seconds() -> None:
    async with punch_pair("quic", "channel") as pair:
        answer, finish = await pair.bob.answer(ALICE.node, await _offer_of(pair.alice))
        assert answer
        began = trio.current_time()
        with pytest.raises(PunchError, match="did not come"):
            await finish()
        assert trio.current_time() - began < 2 * PUNCH_S
        await settled(lambda: helper_is_idle(pair.bob))


async def _offer_of(alice: Puncher) -> bytes:
    """An offer whose sender went away."""
    offers: list[bytes] = []

    async def exchange(offer: bytes) -> bytes:
        offers.append(offer)
        raise PunchError("gone")

    with pytest.raises(PunchError, match="gone"):
        await alice.call(BOB.node, exchange)
    return offers[0]


async def test_a_stream_that_nobody_asks_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.links.punch.punched.CLAIM_S", 0.1)
    async with punch_pair("channel") as pair:
        alices = await pair.alice.call(BOB.node, pair.exchange)
        assert await alices.stream.receive_some() == b""
        await alices.stream.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
async def test_a_helper_that_fails_is_noticed_and_replaced(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links break with a reason, and the next link starts another one."""
    monkeypatch.setattr("node.links.punch.helper.WATCH_S", 0.2)
    async with punch_pair("channel") as pair:
        alices, bobs = await pair.link()
        monkeypatch.setattr("node.links.punch.helper.HUNG_S", 1.0)
        first = pair.alice.helper_pid
        assert first is not None
        os.kill(first, how)
        with pytest.raises(trio.BrokenResourceError, match="punching helper"):
            await alices.stream.receive_some()
        with trio.fail_after(30), pytest.raises(trio.BrokenResourceError):
            await _receive_until_broken(bobs)
        await alices.stream.aclose()
        await bobs.stream.aclose()
        monkeypatch.setattr("node.links.punch.helper.HUNG_S", 10.0)
        alices, bobs = await pair.link()
        assert pair.alice.helper_pid not in (first, None) and not is_alive(first)
        for punched in (alices, bobs):
            await punched.stream.aclose()


async def _receive_until_broken(punched: Punched) -> None:
    while await punched.stream.receive_some():
        pass


_DAEMON = """
import sys, trio
from node.links.punch.punched import IceServers, Puncher, PunchOptions
from protocol.trust.identity import Identity

async def main():
    async with trio.open_nursery() as nursery:
        puncher = Puncher(nursery, identity=Identity(b"d" * 32), run_id=b"r" * 16, generation=lambda: 1,
            servers=lambda: IceServers(), options=PunchOptions(loopback=True))
        async def exchange(offer):
            print("helper", puncher.helper_pid, flush=True)
            await trio.sleep_forever()
        await puncher.call("a" * 52, exchange)

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("helper_hangs", [False, True], ids=["alive", "stopped"])
async def test_the_helper_ends_with_its_daemon(helper_hangs: bool) -> None:
    """The daemon is killed without a word; its helper is gone a moment later."""
    daemon = subprocess.Popen([sys.executable, "-c", _DAEMON], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert daemon.stdout is not None
        line = b""
        while not line.startswith(b"helper "):
            line = await trio.to_thread.run_sync(daemon.stdout.readline)
        helper = int(line.split()[1])
        if helper_hangs:
            os.kill(helper, signal.SIGSTOP)
    finally:
        daemon.kill()
        daemon.wait()
        assert daemon.stdout is not None
        daemon.stdout.close()
    if helper_hangs:
        os.kill(helper, signal.SIGCONT)

    async def gone() -> bool:
        return not is_alive(helper) or _is_zombie(helper)

    await settled(gone)


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"
