"""Nodes find a way to each other: by TCP, being dialled, punching, a relay; and from there to the next one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import structlog.testing
import trio
import trio.testing

from node.links.ladder import DIRECT, EXPLORE_S
from node.links.notes import Knock, Meet, Offer, write_note
from node.links.relay.relay_desk import RelayLimits
from protocol.base.ids import NodeId
from protocol.drive.transport import DialError, Link
from protocol.messages import Ping, Reach, Relay, Relays, Signal
from tests.node.links.switchboard import FakePunched, Node, plan_of, switchboard
from tests.protocol.drive.harness import PATIENCE_S
from tests.protocol.samples import ALICE

pytestmark = pytest.mark.trio


async def talk(one: Node, other: Node, number: int) -> None:
    """A message each way, once both sides know of the link."""

    def linked(sender: Node, receiver: Node) -> Callable[[object], bool]:
        return lambda _: sender.link_to(receiver) is not None

    for sender, receiver in ((one, other), (other, one)):
        await sender.until(linked(sender, receiver))
        link = sender.link_to(receiver)
        assert link is not None
        link.send(Ping(number=number))
        await receiver.until(lambda r: any(m == Ping(number=number) for _, m, _ in r.messages))


async def test_a_peer_with_an_address_is_dialled_and_no_signal_is_sent() -> None:
    """A run of plain TCP is as it was."""
    async with switchboard("server", "volunteer", addresses=True) as (board, (a, b)):
        b.connector.dial(a.node, (a.station.address,))
        await b.linked(a, "tcp")
        await talk(a, b, 1)
        assert board.signals == [] and a.puncher is not None and a.puncher.calls == 0
        assert ("barnraise_transport_connects_total", 1.0, {"path": "tcp", "outcome": "ok"}) in b.counted


async def test_a_server_that_nobody_can_dial_is_asked_to_dial() -> None:
    """The volunteer listens, the server does not: it is the server that dials, and all are content."""
    async with switchboard("server", "volunteer", punchers=False) as (_, (server, volunteer)):
        volunteer.connector.here.local_addresses = (volunteer.station.address,)
        volunteer.connector.dial(server.node, ())
        link = await volunteer.linked(server, "tcp")
        assert not link.dialled and volunteer.given_up == []
        await talk(server, volunteer, 1)


async def test_the_address_that_a_peer_tells_is_dialled() -> None:
    """The plan knew none, but both are in one network."""
    async with switchboard("server", "volunteer", punchers=False) as (_, (server, volunteer)):
        server.connector.here.local_addresses = (server.station.address,)
        volunteer.connector.dial(server.node, ())
        assert (await volunteer.linked(server, "tcp")).dialled


async def test_a_peer_that_comes_while_its_own_address_is_dead_ends_the_wait() -> None:
    """A home's firewall lets its IPv6 out and nobody in: what it tells as its address only looks like one."""
    async with switchboard("server", "volunteer", punchers=False) as (_, (server, volunteer)):
        with trio.socket.socket() as dead:
            await dead.bind(("127.0.0.1", 0))
            dead.listen(1)  # takes connections and never says a word
            server.connector.here.local_addresses = (f"127.0.0.1:{dead.getsockname()[1]}",)
            volunteer.connector.here.local_addresses = (volunteer.station.address,)
            volunteer.connector.dial(server.node, ())
            link = await volunteer.linked(server, "tcp")
            assert not link.dialled
            with trio.fail_after(PATIENCE_S):
                while (
                    "barnraise_transport_connects_total",
                    1.0,
                    {"path": "tcp", "outcome": "ok"},
                ) not in volunteer.counted:
                    await trio.sleep(0.01)
            assert not volunteer.connector._scopes  # nobody goes on dialling


async def test_without_addresses_they_punch() -> None:
    """TCP between them is impossible; the punched stream carries the link, proven with its own prologue."""
    async with switchboard("server", "volunteer", relays=0) as (_, (server, volunteer)):
        volunteer.connector.dial(server.node, ())
        await volunteer.linked(server, "quic")
        await server.linked(volunteer, "quic")
        await talk(server, volunteer, 3)
        assert ("barnraise_transport_connects_total", 1.0, {"path": "quic", "outcome": "ok"}) in volunteer.counted


async def test_where_udp_is_refused_they_meet_at_a_relay() -> None:
    """Neither can be dialled, no packet comes through: a third server carries, and sees nothing."""
    async with switchboard("server", "server", "volunteer", relays=1) as (_, (relay, server, volunteer)):
        for node in (server, volunteer):
            assert node.puncher is not None
            node.puncher.works = False
        volunteer.connector.dial(server.node, ())
        await volunteer.linked(server, "relay")
        await server.linked(volunteer, "relay")
        await talk(server, volunteer, 5)
        assert relay.relay is not None and relay.relay.desk.session_count == 1
        assert relay.link_to(server) is None and relay.link_to(volunteer) is None


@pytest.mark.parametrize("which", [0, 1])
async def test_a_server_without_a_shard_relays_before_one_that_has_work_to_lose(which: int) -> None:
    """The plan's servers could carry, too; whichever the coordinator named as a spare is asked first."""
    names = ("server", "server", "server", "volunteer")
    async with switchboard(*names, relays=2, punchers=False) as (_, (x, y, server, volunteer)):
        spare, holder = ((x, y), (y, x))[which]
        relays = Relays(relays=(Relay(node=spare.node, addresses=(spare.station.address,)),))
        assert volunteer.connector.on_message(relays) and server.connector.on_message(relays)
        volunteer.connector.dial(server.node, ())
        await volunteer.linked(server, "relay")
        assert spare.relay is not None and holder.relay is not None
        assert (spare.relay.desk.session_count, holder.relay.desk.session_count) == (1, 0)


async def test_spares_are_forgotten_with_the_coordinator_that_named_them() -> None:
    """One that has started again names those that are there; a link that only moves forgets nothing."""
    async with switchboard("server", "volunteer", relays=1) as (_, (x, volunteer)):
        spare = Relay(node=ALICE.node, addresses=("203.0.113.9:1",))
        volunteer.connector.on_message(Relays(relays=(spare,)))
        assert list(volunteer.connector.here.relays) == [ALICE.node, x.node]
        (link,) = (link for link in volunteer.station.transport.links if link.role == "coordinator")
        volunteer.connector.on_moved(link)
        assert list(volunteer.connector.here.relays) == [ALICE.node, x.node]
        volunteer.connector.on_up(link)
        assert list(volunteer.connector.here.relays) == [x.node]


async def test_a_relay_that_dies_or_is_full_is_left_for_the_next() -> None:
    """The link moves to the other one and is never down: nothing that was sent is lost."""
    names = ("server", "server", "server", "volunteer")
    async with switchboard(*names, relays=2, punchers=False) as (_, (x, y, server, volunteer)):
        volunteer.connector.dial(server.node, ())
        await volunteer.linked(server, "relay")
        first, second = (x, y) if x.relay is not None and x.relay.desk.session_count else (y, x)
        assert first.relay is not None and second.relay is not None
        link = volunteer.link_to(server)
        assert link is not None
        first.relay.end()  # and from now on it refuses whoever comes
        link.send(Ping(number=8))
        with trio.fail_after(PATIENCE_S):
            while second.relay.desk.session_count == 0 or link.ailing:
                await trio.sleep(0.01)
        assert volunteer.link_to(server) is link and volunteer.down == server.down == []
        await server.until(lambda r: any(message == Ping(number=8) for _, message, _ in r.messages))
        await talk(server, volunteer, 9)


@pytest.mark.slow
async def test_a_relayed_link_moves_to_the_punched_one_when_that_is_there() -> None:
    """A slow punch loses the race and takes over; the relay is free again."""
    async with switchboard("server", "server", "volunteer", relays=1) as (_, (relay, server, volunteer)):
        assert volunteer.puncher is not None and relay.relay is not None
        volunteer.puncher.delay_s = 2.5
        volunteer.connector.dial(server.node, ())
        link = await volunteer.linked(server, "relay")
        assert await volunteer.linked(server, "quic") is link and volunteer.down == server.down == []
        await server.linked(volunteer, "quic")
        await talk(server, volunteer, 2)
        with trio.fail_after(PATIENCE_S):
            while relay.relay.desk.session_count:
                await trio.sleep(0.01)


async def test_a_relayed_link_explores_by_itself() -> None:
    """Once UDP works again, the relay is spared after a while, without anybody asking."""
    async with switchboard("server", "server", "volunteer", relays=1) as (_, (_, server, volunteer)):
        assert volunteer.puncher is not None
        volunteer.puncher.works = False
        volunteer.connector.dial(server.node, ())
        await volunteer.linked(server, "relay")
        volunteer.puncher.works = True
        state = volunteer.connector.ladder._peers[server.node]
        with trio.fail_after(PATIENCE_S):
            while state.explore_at is None:
                await trio.sleep(0.01)
        assert 0 < state.explore_at - trio.current_time() <= EXPLORE_S[0]
        state.explore_at = trio.current_time()  # the wait is over
        volunteer.connector._changed.set()
        await volunteer.linked(server, "quic")


async def test_a_peer_without_any_way_is_given_up_with_a_sentence() -> None:
    """What became of each way, in words that help."""
    async with switchboard("server", "volunteer") as (_, (server, volunteer)):
        assert volunteer.puncher is not None
        volunteer.puncher.works = False
        volunteer.connector.dial(server.node, ())
        await volunteer.until(lambda r: volunteer.given_up)
        assert "reverse: neither of us can be dialled" in volunteer.given_up[0]
        assert "punch: no packet came through" in volunteer.given_up[0]
        volunteer.connector.dial(ALICE.node, ())
        await volunteer.until(lambda r: len(volunteer.given_up) > 1)
        assert "the coordinator has no link to the peer" in volunteer.given_up[1]


async def test_while_the_coordinator_is_away_only_what_needs_no_signal_is_left() -> None:
    """And it says so at once instead of waiting."""
    async with switchboard("server", "volunteer") as (_, (server, volunteer)):
        for link in volunteer.station.transport.links:
            link.close("away")
        await volunteer.until(lambda r: r.down)
        volunteer.connector.dial(server.node, ())
        await volunteer.until(lambda r: volunteer.given_up)
        assert "the coordinator, which carries signals, is away" in volunteer.given_up[0]


async def test_a_way_that_is_stopped_while_another_proves_closes_its_stream() -> None:
    """The punch has come through, but the direct way wins: the punched stream must not live on with the peer's."""
    async with switchboard("server", "volunteer") as (_, (server, volunteer)):
        connector, ours = volunteer.connector, []

        async def call(peer: NodeId, exchange: object, same_site: object) -> FakePunched:
            ours.append(trio.testing.memory_stream_pair()[0])
            return FakePunched(ours[0], b"x", initiator=True)

        assert volunteer.puncher is not None
        volunteer.puncher.call = call  # type: ignore[method-assign]
        lock = connector._proving.setdefault(server.node, trio.Lock())
        async with lock:
            connector.dial(server.node, ())
            with trio.fail_after(PATIENCE_S):
                while not lock.statistics().tasks_waiting:
                    await trio.sleep(0.01)
            connector._perform(connector.ladder.opened(server.node, DIRECT, trio.current_time()))
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.ClosedResourceError):
            await ours[0].send_all(b"still here?")


async def test_a_helper_whose_address_is_none_is_left_out_and_costs_nothing() -> None:
    """What an operator mistyped, or a coordinator of another mind says."""
    async with switchboard("server", punchers=False) as (board, (server,)):
        (link,) = board.up
        stun = ("stun.example", "a.example:0", "b.example:3478")
        turn = ("x:99999",)
        link.send(Reach(seen_from="203.0.113.5", stun=stun, turn=turn, username="", password="", valid_s=0.0))
        link.send(Ping(number=1))
        await server.until(lambda r: r.messages)
        assert server.connector.here.stun == ("b.example:3478",) and server.connector.here.turn == ()


async def test_signals_that_lie_make_nobody_dial_into_a_private_network() -> None:
    """A knock with addresses of services, and a name to look up: no connection is tried."""
    async with switchboard("server", "volunteer", punchers=False) as (board, (server, _)):
        server.connector.here.seen_from = "203.0.113.5"
        tried: list[object] = []

        async def dial(addresses: Sequence[str], peer: NodeId, *, switch: bool = False) -> Link:
            tried.append(addresses)
            raise DialError("nobody is dialled here")

        server.station.transport.dial = dial  # type: ignore[method-assign]
        link = next(link for link in board.up if link.peer == server.node)
        lie = Knock(
            7, ("169.254.169.254:8080", "127.0.0.1:9000", "127.1:9000", "a.example:9000"), ("192.168.1.1:8080",)
        )
        link.send(Signal(peer=ALICE.node, content=write_note(lie), seen_from="203.0.113.6"))
        with trio.fail_after(PATIENCE_S):
            while len(board.signals) < 1:
                await trio.sleep(0.01)
        assert tried == [] and server.rejected == []


@pytest.mark.parametrize("content", [b"\xff", b"x" * 2048, b"\x93\xa5knock\x01\x02"])
async def test_signals_that_are_no_notes_are_refused_and_counted(content: bytes) -> None:
    """The link to the coordinator stays: it only carried them."""
    async with switchboard("server", punchers=False) as (board, (server,)):
        (link,) = board.up
        link.send(Signal(peer=ALICE.node, content=content))
        link.send(Ping(number=1))
        await server.until(lambda r: r.messages)
        assert ("barnraise_transport_rejected_messages_total", 1.0, {"reason": "decode"}) in server.counted
        assert server.down == []


async def test_a_flood_of_notes_is_answered_within_bounds() -> None:
    """A peer that writes a hundred offers and meetings gets refusals for most; others are answered."""
    async with switchboard("server", "server", relays=1, limits=RelayLimits(wait_s=0.2)) as (board, (relay, server)):
        link = next(link for link in board.up if link.peer == server.node)
        for number in range(100):
            link.send(Signal(peer=ALICE.node, content=write_note(Meet(number, relay.node, bytes(16)))))
            link.send(Signal(peer=relay.node, content=write_note(Offer(number, b"offer"))))
        link.send(Ping(number=1))
        await server.until(lambda r: r.messages)
        assert server.connector._callee._answering.total() <= 12
        with trio.fail_after(PATIENCE_S):
            while server.connector._callee._answering.total():
                await trio.sleep(0.01)
        assert server.connector._callee._answering == {}


async def test_the_punching_helper_is_started_ahead_where_it_will_be_needed() -> None:
    """A plan with a server that nobody can dial: whoever cannot be dialled either gets ready; others save memory."""
    async with switchboard("server", "server", "volunteer", relays=1) as (_, (public, hidden, volunteer)):
        public.connector.here.addresses = (public.station.address,)
        assert volunteer.puncher is not None and public.puncher is not None and not volunteer.puncher.warm
        for node in (public, volunteer):
            node.connector.set_plan(plan_of([public, hidden]))
        with trio.fail_after(PATIENCE_S):
            while not volunteer.puncher.warm:
                await trio.sleep(0.01)
        assert not public.puncher.warm


async def test_a_connector_with_nothing_to_do_rests() -> None:
    """A loop that takes its own deeds for news would burn a core of a lent computer, and nobody would notice."""
    async with switchboard("server", "volunteer", addresses=True) as (_, (a, b)):
        b.connector.dial(a.node, (a.station.address,))
        await b.linked(a, "tcp")
        with trio.fail_after(PATIENCE_S):
            await trio.testing.wait_all_tasks_blocked(0.001)


async def test_a_coordinator_that_cannot_be_reached_is_named_once_for_each_reason() -> None:
    """The owner of a node learns at the first failure why nothing happens; again after it was there meanwhile."""
    async with switchboard("server") as (_, (a,)):
        link = a.station.transport.links[0]
        coordinator, hub = link.peer, link.address

        async def fail(*addresses: str) -> None:
            known = len(a.given_up)
            a.connector.dial(coordinator, addresses)
            await a.until(lambda _: len(a.given_up) > known)

        async def lose() -> None:
            for each in a.station.transport.links:
                each.close("over")
            await a.until(lambda _: not a.station.transport.links)

        await lose()
        with structlog.testing.capture_logs() as lines:
            for addresses in (("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:2", "127.0.0.1:1"), ("127.0.0.1:1",)):
                await fail(*addresses)
            a.connector.dial(coordinator, (hub,))
            await a.until(lambda _: bool(a.station.transport.links))
            await lose()
            await fail("127.0.0.1:1")
        said = [line["reason"] for line in lines if line["event"] == "cannot reach the coordinator, trying again"]
        assert len(said) == 3 and said[1] == said[2]
        assert "127.0.0.1:1" in said[0] and "127.0.0.1:2" in said[0] and "127.0.0.1:2" not in said[1]
