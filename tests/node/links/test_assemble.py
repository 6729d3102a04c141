"""What the owner's wishes and the coordinator's word make of a node's ways."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from node.links import assemble as assembling
from node.links.assemble import WayOptions, assemble, ice_servers, punch_options
from node.links.callee import Surroundings
from node.links.connector import Connector
from node.links.punch.helper_frames import SERVERS_MAX, StunServer, TurnServer
from node.links.relay.relayed import Proof
from node.links.router.port_mapping import LOOK_S
from node.links.whereabouts import OwnPlaces
from protocol.drive.addresses import reachable_addresses
from protocol.link.reach import split
from protocol.trust.membership import Invite, JoinLink, sign_statement
from tests.protocol.drive.harness import Station, admit_all, stations
from tests.protocol.samples import ALICE, BOB, RUN_ID


@pytest.mark.parametrize(
    ("addresses", "lan", "loopback"),
    [
        (("203.0.113.1:1",), False, False),
        (("192.168.1.2:1",), True, False),
        (("127.0.0.1:1", "[::1]:1"), True, True),
        (("192.168.1.2:1", "a.example:1"), False, False),
        (("192.168.1.2:1", "127.0.0.1:1"), True, False),
    ],
)
def test_a_run_of_one_network_is_reached_in_that_network(addresses: tuple[str, ...], lan: bool, loopback: bool) -> None:
    """Where the coordinator has only private addresses, so may the peers; else only if the owner says so."""
    options = punch_options(JoinLink(addresses, b""), WayOptions())
    assert (options.lan, options.loopback) == (lan, loopback)
    assert punch_options(JoinLink(addresses, b""), WayOptions(lan=True)).lan


def test_helpers_are_those_that_the_coordinator_named_last() -> None:
    """TURN by UDP and by TCP; without STUN servers, public servers of the plan, and no others. IPv6 needs no STUN."""
    here = Surroundings((), ())
    assert ice_servers(here).stun == () and ice_servers(here).turn == ()
    here.relays = {
        ALICE.node: ("[2001:db8::7]:7000", "203.0.113.7:7000", "203.0.113.8:7000"),
        BOB.node: ("192.168.1.1:7000",),
    }
    assert ice_servers(here).stun == (StunServer("203.0.113.7", 7000),)
    here.stun, here.turn = ("[2001:db8::1]:5", "stun.example:5"), ("turn.example:6",)
    here.username, here.password = "u", "p"
    servers = ice_servers(here)
    assert servers.stun == (StunServer("stun.example", 5),)
    here.stun = here.turn = tuple(f"s{number}.example:1" for number in range(8))
    assert len(ice_servers(here).stun) == len(ice_servers(here).turn) == SERVERS_MAX  # the helper takes no more
    here.turn = ("turn.example:6",)
    assert servers.turn == (
        TurnServer("turn.example", 6, "u", "p", False),
        TurnServer("turn.example", 6, "u", "p", True),
    )


def assembled(
    nursery: trio.Nursery,
    station: Station,
    here: Surroundings,
    places: OwnPlaces,
    *,
    map_port: bool = False,
    record: Callable[..., None] = lambda *values: None,
) -> Connector:
    """The connector of a node that does not punch, with a coordinator that nobody dials."""
    invite = Invite(issuer=BOB.public_key, run_id=RUN_ID, role="server", uses=1, not_after=2**40, nonce=bytes(16))
    return assemble(
        nursery,
        transport=station.transport,
        proof=Proof(station.identity, RUN_ID, lambda: b"", admit_all),
        link=JoinLink(("127.0.0.1:9",), sign_statement(invite, BOB)),
        role="volunteer",
        options=WayOptions(punch=False, map_port=map_port),
        surroundings=here,
        give_up=lambda peer, reason: None,
        record=record,
        rejected=lambda address, reason, detail: None,
        count_relayed=lambda metric, value, labels: None,
        places=places,
    )


class Interfaces:
    """What this computer's network interfaces have, in the place of `psutil.net_if_addrs`."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.gone = False

    def __call__(self) -> dict[str, list[Any]]:
        if self.gone:
            raise OSError("no such device")
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return {"eth0": [SimpleNamespace(family=family[":" in host], address=host) for host in self.addresses]}


async def test_a_computers_new_address_is_announced_within_one_look_and_its_old_one_forgotten(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """A provider's new IPv6 prefix, a new lease: peers hear of it in notes, the coordinator by the machine, once."""
    interfaces = Interfaces("192.168.1.5", "2001:db8:1::5")
    monkeypatch.setattr("psutil.net_if_addrs", interfaces)
    told: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    sockets = (("*", 7000),)
    places = OwnPlaces(
        lambda: split(reachable_addresses(sockets)), lambda everybody, local: told.append((everybody, local))
    )
    here = Surroundings(*places.look())
    async with stations("server") as (station,), trio.open_nursery() as nursery:
        connector = assembled(nursery, station, here, places)
        await trio.sleep(2.5 * LOOK_S)
        assert told == []
        interfaces.addresses = ("192.168.1.6", "2001:db8:2::5")
        await trio.sleep(LOOK_S)
        now = (("[2001:db8:2::5]:7000",), ("192.168.1.6:7000",))
        assert told == [now] and (connector.here.addresses, connector.here.local_addresses) == now
        interfaces.gone = True
        await trio.sleep(3 * LOOK_S)
        assert told == [now]
        nursery.cancel_scope.cancel()


async def test_a_forwarded_port_stays_announced_beside_a_new_address(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """And the old address does not come back when the router forwards no more."""
    mapping: list[Callable[[tuple[str, int] | None], None]] = []

    async def keep_mapping(transport: str, port: int, on_change: Callable[[tuple[str, int] | None], None]) -> None:
        mapping.append(on_change)

    monkeypatch.setattr(assembling, "keep_mapping", keep_mapping)
    own = [((), ("192.168.1.5:7",))]
    told: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    places = OwnPlaces(lambda: own[0], lambda everybody, local: told.append((everybody, local)), 7)
    async with stations("server") as (station,), trio.open_nursery() as nursery:
        assembled(nursery, station, Surroundings(*own[0]), places, map_port=True)
        await trio.testing.wait_all_tasks_blocked()
        mapping[0](("203.0.113.9", 9))
        own[0] = ((), ("192.168.1.6:7",))
        await trio.sleep(1.5 * LOOK_S)
        mapping[0](None)
        nursery.cancel_scope.cancel()
    assert told == [
        (("203.0.113.9:9",), ("192.168.1.5:7",)),
        (("203.0.113.9:9",), ("192.168.1.6:7",)),
        ((), ("192.168.1.6:7",)),
    ]


@pytest.mark.parametrize("allowed", [True, False])
async def test_what_the_router_forwards_is_announced_only_where_the_owner_allows_it(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers hear of it in notes, the coordinator by the machine, who watches by a gauge; and of its end."""
    asked: list[tuple[str, int]] = []

    async def keep_mapping(transport: str, port: int, on_change: Callable[[tuple[str, int] | None], None]) -> None:
        asked.append((transport, port))
        on_change(("203.0.113.9", 7))
        on_change(None)

    monkeypatch.setattr(assembling, "keep_mapping", keep_mapping)
    announced: list[tuple[str, ...]] = []
    recorded: list[tuple[Any, ...]] = []
    own = (("[2001:db8::1]:5",), ("10.0.0.1:5",))
    here = Surroundings(*own)
    heard: list[tuple[str, ...]] = []

    def announce(addresses: tuple[str, ...], local_addresses: tuple[str, ...]) -> None:
        assert local_addresses == ("10.0.0.1:5",)
        announced.append(addresses)
        heard.append(here.addresses)

    async with stations("server") as (station,), trio.open_nursery() as nursery:
        places = OwnPlaces(lambda: own, announce, 7001)
        assembled(nursery, station, here, places, map_port=allowed, record=lambda *values: recorded.append(values))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    if not allowed:
        assert asked == [] and announced == [] and recorded == []
        return
    assert asked == [("tcp", 7001)]
    assert announced == heard == [("203.0.113.9:7", "[2001:db8::1]:5"), ("[2001:db8::1]:5",)]
    assert recorded == [("barnraise_node_port_forwarded", 1.0), ("barnraise_node_port_forwarded", 0.0)]
