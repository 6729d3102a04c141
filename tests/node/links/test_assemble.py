"""What the owner's wishes and the coordinator's word make of a node's ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from node.links import assemble as assembling
from node.links.assemble import Forward, WayOptions, assemble, ice_servers, punch_options
from node.links.callee import Surroundings
from node.links.punch.helper_frames import SERVERS_MAX, StunServer, TurnServer
from node.links.relay.relayed import Proof
from protocol.trust.membership import Invite, JoinLink, sign_statement
from tests.protocol.drive.harness import admit_all, stations
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
    invite = Invite(issuer=BOB.public_key, run_id=RUN_ID, role="server", uses=1, not_after=2**40, nonce=bytes(16))
    announced: list[tuple[str, ...]] = []
    recorded: list[tuple[Any, ...]] = []
    here = Surroundings(("[2001:db8::1]:5",), ())
    heard: list[tuple[str, ...]] = []

    def announce(addresses: tuple[str, ...]) -> None:
        announced.append(addresses)
        heard.append(here.addresses)

    async with stations("server") as (station,), trio.open_nursery() as nursery:
        assemble(
            nursery,
            transport=station.transport,
            proof=Proof(station.identity, RUN_ID, lambda: b"", admit_all),
            link=JoinLink(("127.0.0.1:9",), sign_statement(invite, BOB)),
            role="volunteer",
            options=WayOptions(punch=False, map_port=allowed),
            surroundings=here,
            give_up=lambda peer, reason: None,
            record=lambda *values: recorded.append(values),
            rejected=lambda address, reason, detail: None,
            count_relayed=lambda metric, value, labels: None,
            forward=Forward(7001, announce),
        )
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    if not allowed:
        assert asked == [] and announced == [] and recorded == []
        return
    assert asked == [("tcp", 7001)]
    assert announced == heard == [("203.0.113.9:7", "[2001:db8::1]:5"), ("[2001:db8::1]:5",)]
    assert recorded == [("barnraise_node_port_forwarded", 1.0), ("barnraise_node_port_forwarded", 0.0)]
