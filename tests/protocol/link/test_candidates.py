"""Which of a peer's addresses a packet may be sent to (S8)."""

from __future__ import annotations

import ipaddress

import pytest

from protocol.link.candidates import (
    CANDIDATES_MAX,
    Candidate,
    CandidateKind,
    Reach,
    acceptable_address,
    acceptable_candidates,
    offered_candidates,
)


def candidate(host: str, port: int = 40000, kind: CandidateKind = "host") -> Candidate:
    return Candidate(kind, ipaddress.ip_address(host).packed, port)


PUBLIC = ("8.8.8.8", "203.0.113.9", "1.1.1.1", "2606:4700::1", "2a00:1450::5")
PRIVATE = ("10.0.0.7", "172.16.3.4", "172.31.255.1", "192.168.1.20", "100.64.0.1", "100.127.255.1", "fd12:3456::1")
LOOPBACK = ("127.0.0.1", "127.8.8.8", "::1")
METADATA = ("169.254.169.254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd00:ec2::254")
NEVER = (
    *METADATA, "0.0.0.0", "0.1.2.3", "169.254.1.1", "198.18.0.1", "224.0.0.1", "239.255.255.250", "240.0.0.1",
    "255.255.255.255", "::", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1",
    "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:1::", "100::1", "fe80::1", "fec0::1", "ff02::1",
)  # fmt: skip


@pytest.mark.parametrize("host", PUBLIC)
def test_public_addresses_are_accepted(host: str) -> None:
    assert acceptable_candidates([candidate(host)], Reach()) == (candidate(host),)


@pytest.mark.parametrize("host", [*PRIVATE, *LOOPBACK, *NEVER])
def test_addresses_inside_are_refused(host: str) -> None:
    """Nobody's peer looks around in the owner's network, on this computer, or at the cloud's metadata."""
    assert acceptable_candidates([candidate(host)], Reach()) == ()


@pytest.mark.parametrize("host", NEVER)
def test_some_addresses_are_refused_whatever_the_owner_allows(host: str) -> None:
    ours = (candidate(host, kind="srflx"), candidate(host))
    everything = Reach(lan=True, loopback=True, ours=ours, same_site=True)
    assert not acceptable_address(ipaddress.ip_address(host), 40000, everything)


@pytest.mark.parametrize("host", PRIVATE)
def test_the_owner_may_open_private_networks(host: str) -> None:
    assert acceptable_candidates([candidate(host)], Reach(lan=True)) == (candidate(host),)


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_opens_only_by_its_own_option(host: str) -> None:
    assert acceptable_candidates([candidate(host)], Reach(lan=True)) == ()
    assert acceptable_candidates([candidate(host)], Reach(loopback=True)) == (candidate(host),)


@pytest.mark.parametrize("port", [1, 22, 53, 80, 443, 1023])
def test_ports_of_services_are_refused(port: int) -> None:
    assert acceptable_candidates([candidate("8.8.8.8", port)], Reach(lan=True, loopback=True)) == ()


def test_a_peer_behind_our_own_public_address_is_reached_in_our_own_subnet_only() -> None:
    """The coordinator sees both there; that gives it our subnet, not our whole network."""
    ours = (candidate("192.168.1.20"), candidate("203.0.113.9", kind="srflx"))
    theirs = [candidate("203.0.113.9", 50000, "srflx"), candidate("192.168.1.33"), candidate("192.168.2.33")]
    accepted = acceptable_candidates([*theirs, candidate("10.0.0.1")], Reach(ours=ours, same_site=True))
    assert accepted == (theirs[0], theirs[1])


def test_that_a_peer_is_behind_our_own_public_address_is_not_for_it_to_say() -> None:
    """Our address stands in the letter that it answers."""
    ours = (candidate("192.168.1.20"), candidate("203.0.113.9", kind="srflx"))
    theirs = [candidate("203.0.113.9", 50000, "srflx"), candidate("192.168.1.33")]
    assert acceptable_candidates(theirs, Reach(ours=ours)) == (theirs[0],)


def test_a_peer_elsewhere_does_not_get_our_subnet() -> None:
    ours = (candidate("192.168.1.20"), candidate("203.0.113.9", kind="srflx"))
    theirs = [candidate("203.0.113.10", 50000, "srflx"), candidate("192.168.1.33")]
    assert acceptable_candidates(theirs, Reach(ours=ours)) == (theirs[0],)


def test_a_public_address_of_ours_that_a_peer_calls_its_own_interface_opens_nothing() -> None:
    ours = (candidate("192.168.1.20"), candidate("203.0.113.9", kind="srflx"))
    theirs = [candidate("203.0.113.9", 50000), candidate("192.168.1.33")]
    assert acceptable_candidates(theirs, Reach(ours=ours)) == (theirs[0],)


def test_only_the_first_sixteen_are_looked_at_and_none_twice() -> None:
    many = [candidate("8.8.8.8", 40000 + number) for number in range(40)]
    assert acceptable_candidates(many, Reach()) == tuple(many[:CANDIDATES_MAX])
    assert acceptable_candidates([many[0], many[0]], Reach()) == (many[0],)


def test_an_address_of_another_length_is_dropped() -> None:
    assert acceptable_candidates([Candidate("host", b"12345", 40000)], Reach()) == ()


def test_what_we_offer_leaves_out_what_no_peer_could_use() -> None:
    """Private addresses are told, since the peer may be a neighbour; loopback and link-local ones never."""
    ours = [candidate(host) for host in ("192.168.1.20", "127.0.0.1", "169.254.3.4", "fe80::1", "203.0.113.9")]
    assert [str(one.ip) for one in offered_candidates(ours, Reach())] == ["192.168.1.20", "203.0.113.9"]
