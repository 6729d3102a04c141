"""Links over loopback: opening, carrying, closing, and what strangers and bad peers can do to them (S7)."""

from __future__ import annotations

import os
import random
import resource
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
import trio
import trio.testing
from msgspec.structs import replace as replace_fields

from protocol.base.ids import TaskId, TensorRef
from protocol.base.limits import AHEAD_BYTES_MIN, AHEAD_S, COOKIE_ABOVE, HALF_OPEN_MAX, UNSENT_BYTES, WRITE_BYTES
from protocol.drive import link as link_module
from protocol.drive import transport as transport_module
from protocol.drive.limits import Metered
from protocol.drive.transport import DialError, Link, LinkOptions
from protocol.link import line as line_module
from protocol.link import outgoing as outgoing_module
from protocol.link.budget import Budget
from protocol.link.codec import PROTOCOL_MINOR, encode
from protocol.link.framing import Frame, Hello
from protocol.messages import Contribute, Freeze, Output, Ping
from protocol.trust.handshake import CookieDemanded, Initiator, Session
from protocol.trust.identity import Identity
from protocol.trust.records import RecordWriter
from tests.protocol.drive.harness import PATIENCE_S, Recorder, Station, activation, stations
from tests.protocol.samples import ALICE, RUN_ID, samples

_MIB = 1 << 20
_HELLO = PROTOCOL_MINOR.to_bytes(2, "big") + bytes(8)
"""The shortest there is: no window, and nothing kept for another path."""


async def _stranger(
    station: Station, *, identity: Any = ALICE, role: bytes = b"server"
) -> tuple[trio.SocketStream, Session]:
    """A proven peer that then may send whatever it likes."""
    stream = await trio.open_tcp_stream("127.0.0.1", int(station.address.rpartition(":")[2]))
    handshake = Initiator(
        identity=identity,
        credential=role,
        run_id=RUN_ID,
        peer=station.identity.node,
        entropy=os.urandom(32),
        admit=lambda key, credential: "server",
    )
    await stream.send_all(handshake.data_to_send())
    session: Session | CookieDemanded | None = None
    while session is None:
        session = handshake.receive(bytes(await stream.receive_some(4096)))
    assert isinstance(session, Session)
    await stream.send_all(handshake.data_to_send())
    return stream, session


async def _ended(stream: trio.SocketStream) -> None:
    """Wait until the other side has closed the connection."""
    async with stream:
        with trio.fail_after(PATIENCE_S), suppress(trio.BrokenResourceError):
            while await stream.receive_some(65536):
                pass


def _messages(count: int) -> Callable[[Recorder], bool]:
    return lambda events: len(events.messages) == count


def _downs(count: int) -> Callable[[Recorder], bool]:
    return lambda events: len(events.down) == count


async def _results_and_a_sum(volunteer: Station, one: Station, two: Station) -> list[Link]:
    """A volunteer's links: by one go four results of step 7, with 4 MiB each, by two the sum of that step."""
    links = [await volunteer.transport.dial([each.address], each.identity.node) for each in (one, two)]
    found = {type(message): message for message in samples()}
    tensors, content = (TensorRef(0, (_MIB,), "fp32", 4 * _MIB),), [bytes(4 * _MIB)]
    for _ in range(4):
        links[0].send(replace_fields(found[Output], task=TaskId(7, 1, 0, "F"), tensors=tensors), content)
    links[1].send(replace_fields(found[Contribute], step=7, tensors=tensors), content)
    return links


async def test_messages_and_tensors_both_ways() -> None:
    """A dialled link carries control and tensors in both directions, and both sides know each other."""
    async with stations("server", "volunteer") as (server, volunteer):
        link = await volunteer.transport.dial([server.address], server.identity.node)
        await server.events.until(lambda events: events.up)
        (other,) = server.events.up
        assert (link.peer, link.role, link.dialled) == (server.identity.node, "server", True)
        assert (other.peer, other.role, other.dialled) == (volunteer.identity.node, "volunteer", False)
        assert other.public_key == volunteer.identity.public_key and other.credential == b"volunteer"
        link.send(Ping(number=1))
        other.send(Ping(number=2))
        await server.events.until(lambda events: len(events.messages) == 1)
        await volunteer.events.until(lambda events: len(events.messages) == 1)
        assert server.events.messages[0][:2] == (other, Ping(number=1))
        assert volunteer.events.messages[0][:2] == (link, Ping(number=2))


async def test_large_tensors_arrive_and_are_counted() -> None:
    """More tensor bytes than the window come through as the receiver digests them, and both ends count them."""
    options = LinkOptions(tensor_bytes_max=2 * _MIB, window_bytes=4 * _MIB)
    async with stations("server", "server", options=options) as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        content = [random.Random(number).randbytes(2 * _MIB) for number in range(8)]
        for data in content:
            link.send(activation(2 * _MIB), [data])
        await one.events.until(lambda events: len(events.messages) == 8)
        assert sorted(bytes(buffers[0]) for _, _, buffers in one.events.messages) == sorted(content)
        assert one.events.byte_counts["rx", "activation"] == two.events.byte_counts["tx", "activation"] > 16 * _MIB


async def test_a_sum_goes_on_when_the_results_that_went_before_it_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volunteer's result for one server holds its sum for another one back; when it has left, that link's sender,
    which has nothing else to do, goes on at once, and not at the next sign of life."""
    monkeypatch.setattr(link_module, "KEEP_ALIVE_S", 3600.0)
    options = LinkOptions(tensor_bytes_max=4 * _MIB, window_bytes=32 * _MIB)
    async with stations("server", "server", "volunteer", options=options) as (one, two, volunteer):
        links = await _results_and_a_sum(volunteer, one, two)
        await two.events.until(lambda events: len(events.messages) == 1)
        assert links[0].queued_bytes == 0, "the sum went first"
        await one.events.until(lambda events: len(events.messages) == 4)


async def test_who_holds_a_sum_back_for_its_results_is_not_cut_off_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of the sum sees a little of it now and then, and waits, five times as long as it would for nothing:
    before, it cut the volunteer off for what it had begun and did not bring."""
    for module, name, seconds in (
        (link_module, "KEEP_ALIVE_S", 0.02), (link_module, "PROGRESS_S", 0.5), (line_module, "MOVING_S", 3600.0),
        (outgoing_module, "TRICKLE_S", 0.1),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)
    options = LinkOptions(tensor_bytes_max=4 * _MIB, window_bytes=8 * _MIB)
    async with stations("server", "server", "volunteer", options=options) as (one, two, volunteer):
        one.events.hold = trio.Event()
        await _results_and_a_sum(volunteer, one, two)
        await two.events.until(lambda events: events.up)
        with trio.fail_after(PATIENCE_S):
            while two.events.up[0].received_bytes < 25 * 65536:  # one every 0.1 s, of 64 in the sum
                assert not two.events.rejected and not two.events.messages
                await trio.sleep(0.05)
        one.events.hold.set()
        await two.events.until(lambda events: events.messages)


async def test_a_link_that_was_cut_keeps_no_sum_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results wait for a server that takes nothing; when it ends, the sum for the other server goes on at once."""
    monkeypatch.setattr(link_module, "KEEP_ALIVE_S", 3600.0)
    monkeypatch.setattr(line_module, "MOVING_S", 3600.0)
    options = LinkOptions(tensor_bytes_max=4 * _MIB, window_bytes=8 * _MIB)
    async with stations("server", "server", "volunteer", options=options) as (one, two, volunteer):
        one.events.hold = trio.Event()
        links = await _results_and_a_sum(volunteer, one, two)
        await one.events.until(lambda events: events.messages)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not two.events.messages
        links[0].abort("it was cut")
        await two.events.until(lambda events: events.messages)
        one.events.hold.set()


async def test_a_receiver_that_waits_holds_the_sender_back() -> None:
    """While the receiver's `on_message` waits, no more than its window leaves the sender; then all of it comes."""
    options = LinkOptions(tensor_bytes_max=_MIB, window_bytes=2 * _MIB)
    async with stations("server", "server", options=options) as (one, two):
        one.events.hold = trio.Event()
        link = await two.transport.dial([one.address], one.identity.node)
        for _ in range(6):
            link.send(activation(_MIB), [bytes(_MIB)])
        await one.events.until(lambda events: events.messages)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert len(one.events.messages) == 1 and link.queued_bytes >= 4 * _MIB
        one.events.hold.set()
        await one.events.until(lambda events: len(events.messages) == 6)


async def test_all_links_of_a_process_share_one_memory() -> None:
    """A peer that has more under way than the process can hold is cut off with a sentence, before its bytes are taken
    in; another one's message comes through, and at the end nothing is counted any more."""
    options = LinkOptions(tensor_bytes_max=_MIB, window_bytes=2 * _MIB)
    async with stations("server", "server", "server", options=options) as (one, greedy, honest):
        budget = one.transport.budget = Budget(_MIB * 3 // 2)
        one.events.hold = trio.Event()
        link = await greedy.transport.dial([one.address], one.identity.node)
        for _ in range(2):
            link.send(activation(_MIB), [bytes(_MIB)])
        await one.events.until(lambda events: events.rejected)
        assert [reason for reason, _ in one.events.rejected] == ["busy"]
        await one.events.until(lambda events: events.down)
        other = await honest.transport.dial([one.address], one.identity.node)
        other.send(activation(_MIB), [bytes(_MIB)])
        one.events.hold.set()
        await one.events.until(lambda events: any(link.peer == honest.identity.node for link, *_ in events.messages))
        other.close("enough")
        await one.events.until(lambda events: len(events.down) == 2)
        with trio.fail_after(PATIENCE_S):
            while budget.held_bytes:
                await trio.sleep(0.01)


async def test_closing() -> None:
    """`close` sends what waits without tensors and ends cleanly: both sides hear of it once."""
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        link.send(Ping(number=9))
        link.close("enough")
        link.close("again")
        link.send(Ping(number=10))
        await two.events.until(lambda events: events.down)
        await one.events.until(lambda events: events.down)
        assert [message for _, message, _ in one.events.messages] == [Ping(number=9)]
        assert two.events.down == [(link, "enough")] and one.events.down[0][1] == "closed by the peer"
        assert link.closing and not one.transport.links and not two.transport.links
        assert one.events.rejected == two.events.rejected == []


async def test_a_cut_connection_is_no_clean_end() -> None:
    """A connection that breaks without the final record is reported as lost (state-and-trust 2.2: truncation)."""
    async with stations("server") as (station,):
        stream, session = await _stranger(station)
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
        await station.events.until(lambda events: events.up)
        await stream.aclose()
        await station.events.until(lambda events: events.down)
        assert station.events.down[0][1].startswith("lost")


async def test_who_loses_many_links_at_once_takes_them_down_a_few_in_a_turn() -> None:
    """Others are served in between. Before, all of them went in one turn of the loop."""
    count, turn, turns = 64, 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, stations("coordinator") as (station,):
        callers: list[trio.SocketStream] = []
        for number in range(1, count + 1):
            stream, session = await _stranger(station, identity=Identity(bytes([number]) * 32))
            writer = RecordWriter(session.send_key, bytes(24))
            await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
            callers.append(stream)
            await station.events.until(lambda events: len(events.up) == len(callers))
        recorder, down = station.events, station.events.on_down
        recorder.on_down = lambda link, reason: (turns.update([turn]), down(link, reason))[1]  # type: ignore[method-assign]
        nursery.start_soon(count_turns)
        for stream in callers:
            stream.socket.close()
        await recorder.until(_downs(count))
        nursery.cancel_scope.cancel()
    assert max(turns.values()) <= 2 * transport_module.ENDINGS_AT_ONCE, turns


async def test_a_slow_peer_is_let_go() -> None:
    """When more waits for a peer than the bound, its link ends instead of eating our memory."""
    options = LinkOptions(tensor_bytes_max=_MIB, window_bytes=_MIB, send_queue_bytes=5 * _MIB)
    async with stations("server", "server", options=options) as (one, two):
        one.events.hold = trio.Event()
        link = await two.transport.dial([one.address], one.identity.node)
        for _ in range(8):
            link.send(activation(_MIB), [bytes(_MIB)])
        await two.events.until(lambda events: events.down)
        assert "too slow" in two.events.down[0][1]


async def test_links_begin_again_when_the_tensors_of_the_run_have_grown() -> None:
    """A link keeps the bounds that it was opened under: a larger tensor could not leave by it, and would have ended the
    process of a server that goes on with larger parts. Links that carry it already, or no tensors, stay."""
    options = LinkOptions(tensor_bytes_max=_MIB, window_bytes=2 * _MIB)
    async with stations("server", "server", "coordinator", options=options) as (one, two, coordinator):
        with_coordinator = await two.transport.dial([coordinator.address], coordinator.identity.node)
        old = await two.transport.dial([one.address], one.identity.node)
        for station in (one, two, coordinator):
            bounds = station.transport.options
            station.transport.options = replace(
                bounds, tensor_bytes_max=4 * bounds.tensor_bytes_max, window_bytes=4 * bounds.window_bytes
            )
        data = random.Random(3).randbytes(2 * _MIB)
        old.send(activation(2 * _MIB), [data])
        await two.events.until(_downs(1))
        await one.events.until(_downs(1))
        link = await two.transport.dial([one.address], one.identity.node)
        link.send(activation(2 * _MIB), [data])
        await one.events.until(_messages(1))
        assert [bytes(buffer) for buffer in one.events.messages[0][2]] == [data] and old is not link
        for station in (one, two):
            station.transport.options = options
        assert not link.closing and not with_coordinator.closing and not coordinator.events.down
        assert not one.events.rejected and not two.events.rejected


async def test_bounds_that_grow_while_a_link_opens_hold_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It said its old window already, so it is not kept."""
    options = LinkOptions(tensor_bytes_max=_MIB, window_bytes=2 * _MIB)
    larger = LinkOptions(tensor_bytes_max=4 * _MIB, window_bytes=8 * _MIB)
    async with stations("server", "server", options=options) as (one, two):
        plain = transport_module.Transport._hello

        def then_grow(self: transport_module.Transport, token: bytes) -> Hello:
            hello = plain(self, token)
            two.transport.options = larger
            return hello

        monkeypatch.setattr(two.transport, "_hello", partial(then_grow, two.transport))
        link = await two.transport.dial([one.address], one.identity.node)
        await two.events.until(_downs(1))
        assert link.closing and link.options.window_bytes == 2 * _MIB


async def test_dialling_goes_through_the_addresses() -> None:
    """The first address that leads to the peer is used; what the others answered is told when none does."""
    async with stations("server", "server", "server") as (one, two, three):
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        link = await three.transport.dial([dead, one.address, two.address], two.identity.node)
        assert link.address == two.address and link.peer == two.identity.node
        assert [reason for reason, _ in three.events.rejected] == ["identity"]
        with pytest.raises(DialError, match=f"{dead}: no connection"):
            await three.transport.dial([dead], one.identity.node)
        with pytest.raises(DialError, match="no address"):
            await three.transport.dial([], one.identity.node)


async def test_refusals_in_the_handshake() -> None:
    """A wrong run and a wrong credential end at the door with a reason in the log, and the caller learns nothing."""
    async with stations("server") as (one,), stations("server", run_id=bytes(16)) as (other_run,):
        with pytest.raises(DialError, match="does not let us in"):
            await other_run.transport.dial([one.address], one.identity.node)
        await one.events.until(lambda events: events.rejected)
        assert one.events.rejected[0][0] == "run"
        stream, _ = await _stranger(one, role=b"nobody")
        await _ended(stream)
        assert one.events.rejected[1][0] == "credential"
        assert not one.events.up


@pytest.mark.parametrize(
    ("kind", "plain", "reason"),
    [
        (Frame.MESSAGE, b"\xc1 no message", "decode"),
        (Frame.MESSAGE, encode(Freeze(ledger_generation=1, step=1, contributions=())), "role"),
        (Frame.BULK, bytes(4) + encode(activation(4)), "role"),
        (Frame.CREDIT, b"\xff" * 8, "size"),
        (99, b"", "decode"),
    ],
    ids=["no message", "forbidden kind", "forbidden tensors", "false credit", "unknown frame"],
)
async def test_bad_peers_are_closed_and_nobody_else(kind: int, plain: bytes, reason: str) -> None:
    """A proven peer that breaks a rule is cut off with a named reason; other links of the process go on."""
    async with stations("server", "volunteer") as (server, volunteer):
        link = await volunteer.transport.dial([server.address], server.identity.node)
        stream, session = await _stranger(server, role=b"volunteer")
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
        await server.events.until(lambda events: len(events.up) == 2)
        await stream.send_all(writer.seal(kind, plain))
        await _ended(stream)
        await server.events.until(lambda events: events.down)
        assert [rejected for rejected, _ in server.events.rejected] == [reason]
        assert server.events.down[0][1] == f"refused: {reason}"
        link.send(Ping(number=1))
        await server.events.until(lambda events: events.messages)


async def test_random_bytes_at_the_door() -> None:
    """Strangers that send noise, too much, or nothing are refused; an honest caller comes in all the same."""
    rng = random.Random(5)
    async with stations("server", "server") as (one, two):
        for size in (0, 1, 4, 69, 70, 5000):
            stream = await trio.open_tcp_stream("127.0.0.1", int(one.address.rpartition(":")[2]))
            with suppress(trio.BrokenResourceError):
                await stream.send_all(rng.randbytes(size))
                await stream.send_eof()
            await _ended(stream)
        await two.transport.dial([one.address], one.identity.node)
        assert one.events.rejected and {reason for reason, _ in one.events.rejected} <= {"size", "version"}


async def test_garbage_instead_of_records() -> None:
    """After a good handshake, bytes that are not sealed with the session's key end the link."""
    async with stations("server") as (one,):
        stream, session = await _stranger(one)
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
        await one.events.until(lambda events: events.up)
        await stream.send_all(b"\x02\x00\x00\x20" + bytes(32))
        await _ended(stream)
        assert one.events.rejected[0][0] == "signature"


async def test_one_link_for_each_peer() -> None:
    """Dialling a peer that is linked gives the open link; a newer link from the same side replaces the older one."""
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        assert await two.transport.dial([one.address], one.identity.node) is link
        stream, session = await _stranger(one, identity=two.identity)
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
        await one.events.until(lambda events: len(events.up) == 2)
        assert one.events.down == [(one.events.up[0], "replaced by a new link")]
        assert one.transport.links == (one.events.up[1],)
        await stream.aclose()


async def test_dialling_each_other_at_once_leaves_one_link() -> None:
    """When both sides dial at the same moment, both end with the same one link, and it works."""
    for _ in range(10):
        async with stations("server", "server") as (one, two):
            found: list[Link] = []

            async def dial(here: Station, there: Station, found: list[Link] = found) -> None:
                found.append(await here.transport.dial([there.address], there.identity.node))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(dial, one, two)
                nursery.start_soon(dial, two, one)
            await one.events.until(lambda events: len(events.up) - len(events.down) == 1)
            await two.events.until(lambda events: len(events.up) - len(events.down) == 1)
            await trio.testing.wait_all_tasks_blocked(0.02)
            (mine,), (yours,) = one.transport.links, two.transport.links
            assert mine.dialled != yours.dialled
            mine.send(Ping(number=1))
            yours.send(Ping(number=2))
            await one.events.until(lambda events: events.messages)
            await two.events.until(lambda events: events.messages)


async def test_idle_callers_do_not_keep_honest_ones_out() -> None:
    """With far more silent connections than there are places, an honest caller still gets in, with a cookie (S7)."""
    async with stations("server", "server") as (one, two):
        port = int(one.address.rpartition(":")[2])
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(2 * HALF_OPEN_MAX)]
        await one.events.until(lambda events: len(events.rejected) >= HALF_OPEN_MAX)
        assert {reason for reason, _ in one.events.rejected} == {"busy"}
        link = await two.transport.dial([one.address], one.identity.node)
        assert link.peer == one.identity.node
        for stream in idle:
            await stream.aclose()
    assert HALF_OPEN_MAX > COOKIE_ABOVE


@pytest.mark.slow
async def test_hundreds_of_idle_callers_and_slow_readers() -> None:
    """500 silent callers and 200 members that read nothing: honest ones get in in time, memory stays bounded (S7).

    Half of the members are of the version whose frames are kept until acknowledged, and acknowledge none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("needs 2,000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    streams: list[trio.SocketStream] = []
    process = psutil.Process()
    async with stations("server", "server") as (one, two):
        before_bytes = process.memory_info().rss
        for number in range(200):
            stream, session = await _stranger(one, identity=Identity(number.to_bytes(32, "big")))
            writer = RecordWriter(session.send_key, bytes(24))
            hello = Hello(PROTOCOL_MINOR, 64 * _MIB, number.to_bytes(16, "big") if number % 2 else b"")
            await stream.send_all(writer.header + writer.seal(Frame.HELLO, hello.encode()))
            streams.append(stream)
        await one.events.until(lambda events: len(events.up) == 200)
        data = bytes(16 * _MIB)
        for link in one.events.up:
            link.send(activation(len(data)), [data])
        port = int(one.address.rpartition(":")[2])

        async def hold_open() -> None:
            """One of 500 who call, say nothing, and call again when they are thrown out."""
            while True:
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                await _ended(stream)
                await trio.sleep(5.0)

        took_s = []
        async with trio.open_nursery() as idle:
            for _ in range(500):
                idle.start_soon(hold_open)
            await one.events.until(lambda events: len(events.rejected) >= 500)
            for number in range(100):
                began = trio.current_time()
                link = await two.transport.dial([one.address], one.identity.node)
                link.send(Ping(number=number))
                await one.events.until(_messages(number + 1))
                took_s.append(trio.current_time() - began)
                link.close("next")
                await two.events.until(_downs(number + 1))
            assert process.memory_info().rss - before_bytes < 64 * _MIB + len(data)
            idle.cancel_scope.cancel()
        assert {reason for reason, _ in one.events.rejected} <= {"busy", "timeout"}
        assert sorted(took_s)[98] < 3.0, f"99 of 100 honest callers were in within {sorted(took_s)[98]:.2f} s"
        for stream in streams:
            await stream.aclose()


async def test_stalled_handshakes_and_frames_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that stops in the middle of the handshake or of a tensor is cut off as "timeout"."""
    monkeypatch.setattr(transport_module, "HANDSHAKE_S", 0.1)
    async with stations("server") as (one,):
        silent = await trio.open_tcp_stream("127.0.0.1", int(one.address.rpartition(":")[2]))
        await _ended(silent)
        assert one.events.rejected[0][0] == "timeout"
    monkeypatch.setattr(transport_module, "HANDSHAKE_S", 5.0)
    monkeypatch.setattr(link_module, "PROGRESS_S", 0.1)
    async with stations("server") as (one,):
        stream, session = await _stranger(one)
        writer = RecordWriter(session.send_key, bytes(24))
        await stream.send_all(writer.header + writer.seal(Frame.HELLO, _HELLO))
        await stream.send_all(writer.seal(Frame.BULK, bytes(4) + encode(activation(_MIB))))
        await _ended(stream)
        assert one.events.rejected[0][0] == "timeout"


async def test_idle_links_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link on which nobody says anything is not cut off by the watch on progress."""
    monkeypatch.setattr(link_module, "PROGRESS_S", 0.02)
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        await trio.sleep(0.1)
        link.send(Ping(number=1))
        await one.events.until(lambda events: events.messages)
        assert not one.events.down and not two.events.down


async def test_keys_change_by_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link whose keys change all the time carries on."""
    monkeypatch.setattr(link_module, "REKEY_S", 0.0)
    monkeypatch.setattr(link_module, "PROGRESS_S", 0.01)
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        for number in range(20):
            link.send(Ping(number=number))
            await one.events.until(_messages(number + 1))
            await trio.sleep(0.01)


async def test_a_slow_line_is_handed_little_at_once() -> None:
    """What a control message waits for in our own process and in the kernel shrinks with the line's measured rate."""
    async with stations("server", "server") as (one, two):
        link = await two.transport.dial([one.address], one.identity.node)
        stream = link._carrier.stream
        assert isinstance(stream, Metered)

        def in_the_kernel() -> int:
            return int(stream.inner.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT))

        assert in_the_kernel() == UNSENT_BYTES
        link._hurry(2.5e6)
        assert in_the_kernel() == link._ahead_bytes == int(2.5e6 * AHEAD_S)
        link._hurry(0.0)
        assert in_the_kernel() == link._ahead_bytes == AHEAD_BYTES_MIN
        link._hurry(1e9)
        assert (in_the_kernel(), link._ahead_bytes) == (UNSENT_BYTES, WRITE_BYTES)
