"""Members that were hung up on for a fault, over real links on loopback: they wait, and nobody else does."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

import pytest
import trio

from protocol.base.limits import BACK_OFF_FIRST_S, FAULTS_BURST, LOCAL_FAULTS_BURST
from protocol.drive import door as door_module
from protocol.drive.door import Door
from protocol.drive.transport import DialError
from protocol.link.faults import Faults
from protocol.link.framing import Frame
from protocol.messages import Ping
from protocol.trust.identity import Identity
from protocol.trust.records import RecordWriter
from tests.protocol.drive.harness import PATIENCE_S, Recorder, Station, stations
from tests.protocol.drive.test_transport import _HELLO, _ended, _stranger
from tests.protocol.samples import ALICE


def _ups(count: int, events: Recorder) -> bool:
    return len(events.up) == count


def _downs(count: int, events: Recorder) -> bool:
    return len(events.down) == count


async def _breaks_a_rule(station: Station, identity: Identity = ALICE, role: bytes = b"volunteer") -> None:
    """A proven member says what cannot be decoded, and is cut off."""
    ups = len(station.events.up)
    stream, session = await _stranger(station, identity=identity, role=role)
    writer = RecordWriter(session.send_key, bytes(24))
    await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
    await station.events.until(lambda events: len(events.up) == ups + 1)
    await stream.send_all(writer.seal(Frame.MESSAGE, b"\xc1 no message"))
    await _ended(stream)
    await station.events.until(lambda events: events.down)


async def _is_let_in(station: Station, identity: Identity = ALICE, role: bytes = b"volunteer") -> bool:
    """Whether a dial of this member comes to a link."""
    ups, refusals = len(station.events.up), len(station.events.rejected)
    stream = None
    with suppress(trio.BrokenResourceError):
        stream, session = await _stranger(station, identity=identity, role=role)
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
    await station.events.until(lambda events: len(events.up) > ups or len(events.rejected) > refusals)
    if stream is not None:
        await trio.aclose_forcefully(stream)
    return len(station.events.up) > ups


async def test_a_member_that_broke_a_rule_waits_and_others_do_not() -> None:
    """Its next dial ends in the handshake; another member of the same address is let in, and a link that was there
    goes on. When its time is over it is let in again."""
    async with stations("server", "volunteer") as (server, volunteer):
        link = await volunteer.transport.dial([server.address], server.identity.node)
        await _breaks_a_rule(server)
        cut_at = trio.current_time()
        assert not await _is_let_in(server)
        assert server.events.rejected[-1][0] == "busy" and "too soon" in server.events.rejected[-1][1]
        assert await _is_let_in(server, Identity(os.urandom(32)))
        link.send(Ping(number=1))
        await server.events.until(lambda events: events.messages)
        with trio.fail_after(PATIENCE_S):
            while not await _is_let_in(server):
                await trio.sleep(0.05)
        assert trio.current_time() - cut_at > 0.8 * BACK_OFF_FIRST_S


async def test_neither_side_brings_it_back_before_its_time() -> None:
    """A server that is asked to dial such a member, or to take it over a relay, does not; another may."""
    async with stations("server", "volunteer") as (server, volunteer):
        await _breaks_a_rule(server, volunteer.identity)
        with pytest.raises(DialError, match="too soon"):
            await server.transport.dial([volunteer.address], volunteer.identity.node)
        ours, theirs = trio.testing.memory_stream_pair()
        with pytest.raises(DialError, match="too soon"):
            await server.transport.adopt(
                ours, volunteer.identity.node, initiator=False, path="relay", address="relay", prologue=b"x"
            )
        assert not await theirs.receive_some()
        assert not volunteer.events.up


async def test_a_line_that_breaks_makes_nobody_wait() -> None:
    """Cut off in the middle of a record, over and over: each new dial is let in at once."""
    async with stations("server") as (server,):
        for number in range(1, 11):
            stream, session = await _stranger(server, role=b"volunteer")
            writer = RecordWriter(session.send_key, bytes(24))
            await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
            await server.events.until(partial(_ups, number))
            await stream.send_all(writer.seal(Frame.MESSAGE, bytes(100))[:50])
            await trio.aclose_forcefully(stream)
            await server.events.until(partial(_downs, number))
        assert not server.events.rejected


async def test_servers_of_the_run_never_wait() -> None:
    """An operator chose them, and a step waits for each of them."""
    async with stations("server") as (server,):
        for _ in range(3):
            await _breaks_a_rule(server, role=b"server")
            assert await _is_let_in(server, role=b"server")


async def test_who_shows_the_key_of_a_member_that_waits_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is turned away before its signature is looked at; the member whose key it is does not wait longer for it."""
    async with stations("server") as (server,):
        await _breaks_a_rule(server)
        verified: list[bytes] = []

        def verifies(key: bytes, *rest: bytes) -> bool:
            verified.append(key)
            return True

        monkeypatch.setattr("protocol.trust.handshake.verify_signature", verifies)
        assert not await _is_let_in(server)
        assert ALICE.public_key not in verified
        monkeypatch.undo()
        with trio.fail_after(PATIENCE_S):
            while not await _is_let_in(server):
                await trio.sleep(0.05)


async def test_a_flood_of_faults_ends_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers from where too many faults came are closed before a word is read, and the log tells of them together."""
    monkeypatch.setattr("protocol.link.faults.LOCAL_FAULTS_BURST", 8.0)
    monkeypatch.setattr("protocol.link.faults.LOCAL_FAULTS_PER_S", 0.0)
    monkeypatch.setattr(door_module, "SAID_EVERY_S", 3600.0)
    async with stations("server", "volunteer") as (server, volunteer):
        link = await volunteer.transport.dial([server.address], server.identity.node)
        for _ in range(8):
            stream = await trio.open_tcp_stream("127.0.0.1", int(server.address.rpartition(":")[2]))
            await stream.send_all((2**24).to_bytes(4, "big"))
            await _ended(stream)
        for _ in range(50):
            await _ended(await trio.open_tcp_stream("127.0.0.1", int(server.address.rpartition(":")[2])))
        assert [reason for reason, _ in server.events.rejected] == ["size"] * 8 + ["busy"]
        link.send(Ping(number=1))
        await server.events.until(lambda events: events.messages)


def test_all_closed_calls_are_counted_and_few_are_told_of() -> None:
    """One line a second, with the number of calls that it stands for."""
    door = Door(Faults())
    told = [door.to_tell(number / 100) for number in range(301)]
    assert [count for count in told if count] == [1, 100, 100, 100]


def test_an_honest_network_is_never_closed_out_by_faults() -> None:
    """Handshakes that end well, or for want of a paper, take nothing, however many there are."""
    assert FAULTS_BURST < LOCAL_FAULTS_BURST
    door = Door(Faults())
    assert not any(door.refusal("127.0.0.1", 0.0) for _ in range(1000))
