"""What the owner's wishes and the coordinator's word make of a node's ways."""

from __future__ import annotations

import pytest

from node.links.assemble import WayOptions, ice_servers, punch_options
from node.links.callee import Surroundings
from node.links.helper_frames import StunServer, TurnServer
from protocol.membership import JoinLink
from tests.protocol.samples import ALICE, BOB


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
    """TURN by UDP and by TCP; without STUN servers, public servers of the plan, and no others."""
    here = Surroundings((), ())
    assert ice_servers(here).stun == ice_servers(here).turn == ()
    here.relays = {ALICE.node: ("203.0.113.7:7000", "203.0.113.8:7000"), BOB.node: ("192.168.1.1:7000",)}
    assert ice_servers(here).stun == (StunServer("203.0.113.7", 7000),)
    here.stun, here.turn, here.username, here.password = ("[2001:db8::1]:5",), ("turn.example:6",), "u", "p"
    servers = ice_servers(here)
    assert servers.stun == (StunServer("2001:db8::1", 5),)
    assert servers.turn == (
        TurnServer("turn.example", 6, "u", "p", False),
        TurnServer("turn.example", 6, "u", "p", True),
    )
