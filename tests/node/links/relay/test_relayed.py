"""Links through a server: what goes through, what it sees, whom it turns away, and what is left behind."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from node.links.relay.relay_desk import RelayLimits
from node.links.relay.relayed import UNSENT_BYTES, Proof, RelayRefusedError, RelayServer, open_leg
from protocol.base.errors import DialError
from protocol.drive.limits import Limits, Metered, Quota
from protocol.link.relay import link_prologue, preamble
from protocol.messages import Ping
from protocol.trust.identity import Identity
from tests.node.links.relay.relay_harness import proof_of, relayed_stations
from tests.protocol.drive.harness import Station, admit_all
from tests.protocol.samples import RUN_ID

pytestmark = pytest.mark.trio

MEETING = b"0123456789abcdef"


async def leg_and_link(station: Station, peer: Station, relay: Station, initiator: bool, role: str) -> None:
    stream = await open_leg((relay.address,), relay.identity.node, MEETING, proof_of(station, role), station.transport)
    await station.transport.adopt(
        stream,
        peer.identity.node,
        initiator=initiator,
        path="relay",
        address=relay.address,
        prologue=link_prologue(MEETING),
    )


async def test_two_nodes_are_linked_through_a_server_that_has_links_of_its_own() -> None:
    """The link between them is theirs: proven end to end; the relay's own links to both stay as they are."""
    async with relayed_stations("server", "server", "volunteer") as ((x, a, b), server, counter):
        await a.transport.dial((x.address,), x.identity.node)
        await b.transport.dial((x.address,), x.identity.node)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg_and_link, b, a, x, False, "volunteer")
            nursery.start_soon(leg_and_link, a, b, x, True, "server")
        link = a.transport.link_to(b.identity.node)
        assert link is not None and link.path == "relay" and link.role == "volunteer"
        link.send(Ping(number=7))
        await b.events.until(lambda events: any(m == Ping(number=7) for _, m, _ in events.messages))
        assert a.transport.link_to(x.identity.node) is not None and x.events.down == []
        assert server.desk.session_count == 1 and counter.values["sessions", ""] == 1
        assert counter.values["bytes_total", ""] == server.desk.moved_bytes > 0
        link.close("enough")
        await b.events.until(lambda events: any(reason == "closed by the peer" for _, reason in events.down))
        with trio.fail_after(5):
            while server.desk.session_count:
                await trio.sleep(0.01)
        assert counter.values["sessions", ""] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps what is not sent yet short")
async def test_a_relay_holds_little_for_a_slow_leg() -> None:
    """The kernel is told so for both legs: what it holds, a control message waits for."""
    async with relayed_stations("server", "server", "volunteer") as ((x, a, b), server, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg_and_link, b, a, x, False, "volunteer")
            nursery.start_soon(leg_and_link, a, b, x, True, "server")
        legs = [leg.stream for leg in server._legs.values()]
        assert len(legs) == 2
        for leg in legs:
            assert isinstance(leg, Metered)
            assert leg.inner.getsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES


@pytest.mark.slow
async def test_the_relay_dies_and_both_ends_know_at_once() -> None:
    """Its process gone, its sockets gone: no waiting for silence."""
    async with relayed_stations("server", "server", "volunteer") as ((x, a, b), server, _):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(leg_and_link, b, a, x, False, "volunteer")
            nursery.start_soon(leg_and_link, a, b, x, True, "server")
        server.end()
        for station in (a, b):
            await station.events.until(
                lambda events: [reason for _, reason in events.down] == ["lost: the stream was cut"]
            )


async def test_who_comes_alone_or_too_often_hears_why() -> None:
    """The refusals that a ladder acts upon, by name."""
    limits = RelayLimits(wait_s=0.05, node_sessions_max=1)
    async with relayed_stations("server", "server", limits=limits) as ((x, a), _, counter):
        ask = partial(open_leg, (x.address,), x.identity.node, proof=proof_of(a), transport=a.transport)
        with pytest.raises(RelayRefusedError, match="alone"):
            await ask(MEETING)
        assert counter.values["refused_total", "alone"] == 1
    async with relayed_stations("server", "server", limits=RelayLimits(sessions_max=0)) as ((x, a), _, counter):
        with pytest.raises(RelayRefusedError, match="full"):
            await open_leg((x.address,), x.identity.node, MEETING, proof_of(a), a.transport)
        assert counter.values["refused_total", "full"] == 1


class _Elsewhere:
    """A relay whose callers seem to come from these hosts, in the order in which they call."""

    def __init__(self, server: RelayServer, hosts: list[str]) -> None:
        self._server = server
        self._hosts = hosts
        self.expects = server.expects

    async def prove(
        self, stream: trio.abc.Stream, first: bytes, address: str, cookies: tuple[bytes, ...]
    ) -> Callable[[], Awaitable[None]] | None:
        return await self._server.prove(stream, first, self._hosts.pop(0) + ":5000", cookies)


@pytest.mark.parametrize("role", ["volunteer", "server"])
async def test_volunteers_of_one_network_give_a_session_to_another_network(role: str) -> None:
    """By the address that each leg comes from; servers share a network as they like, so a third pair finds no place."""
    async with relayed_stations("server", role, role, limits=RelayLimits(sessions_max=2)) as ((x, a, b), server, _):
        hosts = ["203.0.113.1", "203.0.113.2", "203.0.113.3", "203.0.113.4", "198.51.100.1", "2001:db8::1"]
        x.transport.guests = _Elsewhere(server, hosts)
        pairs: list[list[trio.abc.Stream]] = []
        refused: list[str] = []

        async def open_one(station: Station, meeting: bytes) -> None:
            ask = partial(open_leg, (x.address,), x.identity.node, meeting, proof_of(station, role))
            try:
                pairs[-1].append(await ask(station.transport))
            except RelayRefusedError as error:
                refused.append(error.reason)

        for number in range(3):
            pairs.append([])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_one, a, bytes([number]) * 16)
                nursery.start_soon(open_one, b, bytes([number]) * 16)
        if role == "server":
            assert refused == ["full", "full"] and server.desk.session_count == 2
        else:
            assert refused == [] and server.desk.session_count == 2
            with trio.fail_after(5):
                assert [await stream.receive_some(1) for stream in pairs[0]] == [b"", b""]
            await pairs[2][0].send_all(b"hello")
            with trio.fail_after(5):
                assert await pairs[2][1].receive_some(5) == b"hello"
        for stream in (stream for pair in pairs for stream in pair):
            await trio.aclose_forcefully(stream)


async def test_strangers_and_impostors_get_nothing() -> None:
    """No member: no leg. Another server at the relay's address: we do not tell it the rest."""
    stranger = Proof(Identity(b"\x77" * 32), RUN_ID, lambda: b"nobody", admit_all)
    async with relayed_stations("server", "server") as ((x, a), server, _):
        with pytest.raises(DialError, match="closed"):
            await open_leg((x.address,), x.identity.node, MEETING, stranger, a.transport)
        await x.events.until(lambda events: events.rejected)
        with pytest.raises(DialError, match="refused by us"):
            await open_leg((x.address,), a.identity.node, MEETING, proof_of(a), a.transport)
        assert server.desk.session_count == 0 and server.desk.wake_at() is None


async def test_a_guest_of_a_meeting_that_was_not_meant_is_found_out() -> None:
    """A member that learnt the number takes the place of the right node: no link, and the reason is the identity."""
    async with relayed_stations("server", "server", "volunteer", "volunteer") as ((x, a, b, thief), _, _):
        failures = []

        async def fails(station: Station, peer: Station, initiator: bool, role: str) -> None:
            with pytest.raises(DialError) as caught:
                await leg_and_link(station, peer, x, initiator, role)
            failures.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, thief, a, False, "volunteer")
            nursery.start_soon(fails, a, b, True, "server")
        assert any("identity" in failure for failure in failures), failures
        assert a.transport.links == thief.transport.links == ()


async def test_a_node_that_gives_up_waiting_frees_its_place() -> None:
    """Closed connections are noticed while they wait."""
    async with relayed_stations("server", "server", limits=RelayLimits(wait_s=60.0)) as ((x, a), server, _):
        with trio.move_on_after(0.5):
            await open_leg((x.address,), x.identity.node, MEETING, proof_of(a), a.transport)
        with trio.fail_after(5):
            while server.desk.wake_at() is not None:
                await trio.sleep(0.01)


async def test_a_server_that_does_not_relay_refuses_legs_like_any_noise() -> None:
    """And goes on serving links."""
    async with relayed_stations("server", "server") as ((x, a), _, _):
        x.transport.guests = None
        with pytest.raises(DialError):
            await open_leg((x.address,), x.identity.node, MEETING, proof_of(a), a.transport)
        await x.events.until(lambda events: events.rejected)
        await a.transport.dial((x.address,), x.identity.node)


async def test_a_preamble_may_come_byte_by_byte_and_must_be_right() -> None:
    """Slow networks cut anywhere; a wrong byte is refused."""
    async with relayed_stations("server") as ((x,), _server, _):
        host, _, port = x.address.rpartition(":")
        good = await trio.open_tcp_stream(host, int(port))
        for byte in preamble(MEETING):
            await good.send_all(bytes((byte,)))
            await trio.sleep(0)
        bad = await trio.open_tcp_stream(host, int(port))
        await bad.send_all(b"brrelay2" + MEETING)
        assert await bad.receive_some() == b""
        assert x.events.rejected[0][0] == "decode"
        await trio.aclose_forcefully(good)
        await trio.aclose_forcefully(bad)


async def test_a_quota_that_is_used_up_is_not_blamed_on_the_relay(tmp_path: Path) -> None:
    async with relayed_stations("server", "volunteer") as ((relay, station), _, _):
        station.transport.limits = Limits(quota=Quota(10, tmp_path / "transfers.json"))
        with pytest.raises(DialError, match="this month's transfer quota is used up"):
            await open_leg((relay.address,), relay.identity.node, bytes(16), proof_of(station), station.transport)
