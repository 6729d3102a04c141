"""Which addresses lead to a node, seen from where."""

from __future__ import annotations

import pytest

from protocol.link.reach import dialable, host_of, is_local, same_network, split, worth_dialling


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "10.0.0.1", "172.31.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0",
     "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "localhost"],
)  # fmt: skip
def test_addresses_that_mean_something_in_one_network_only(host: str) -> None:
    """Loopback, private, carrier-grade, link-local, multicast, in every way of writing them."""
    assert is_local(host)


@pytest.mark.parametrize("host", ["203.0.113.7", "172.32.0.1", "100.128.0.1", "2001:db8::1", "2a00::1", "a.example"])
def test_addresses_that_anybody_can_dial(host: str) -> None:
    """Public ones, those that test beds use as public ones, and names."""
    assert not is_local(host)


def test_hosts_and_kinds_of_addresses() -> None:
    """Brackets go, order stays."""
    assert (host_of("[2001:db8::1]:5"), host_of("a.example:5"), host_of("")) == ("2001:db8::1", "a.example", "")
    assert split(("10.0.0.1:1", "[2a00::1]:1", "[::1]:1")) == (("[2a00::1]:1",), ("10.0.0.1:1", "[::1]:1"))


def test_local_addresses_count_for_those_in_the_same_network() -> None:
    """Seen at a public address: behind a NAT. Two nodes behind one public address may share a network."""
    assert dialable(("p:1",), ("10.0.0.1:1",), "203.0.113.7") == ("p:1",)
    assert dialable((), ("10.0.0.1:1",), "10.0.0.1") == ("10.0.0.1:1",)
    assert same_network("203.0.113.7", "203.0.113.7") and same_network("10.0.0.1", "127.0.0.1")
    assert not same_network("203.0.113.7", "203.0.113.8") and not same_network("", "")


def test_a_peers_word_leads_to_public_addresses_and_to_our_own_network_only_where_both_are_in_it() -> None:
    """Nothing that somebody on the way made up makes us knock at this computer, a metadata service, or a service."""
    public = ("203.0.113.9:443", "[2001:db8::7]:7000")
    local = ("192.168.1.5:4000", "127.0.0.1:4000", "169.254.169.254:8080", "192.168.1.1:80", "[fe80::1]:4000")
    assert worth_dialling(public, local, "203.0.113.1", "203.0.113.2") == public
    assert worth_dialling((*public, *local), (), "203.0.113.1", "203.0.113.2") == public
    assert worth_dialling(public, local, "203.0.113.1", "203.0.113.1") == ("192.168.1.5:4000", *public)
    assert worth_dialling((), local, "127.0.0.1", "127.0.0.1") == ("192.168.1.5:4000", "127.0.0.1:4000")
    assert worth_dialling((), local, "", "") == ()


@pytest.mark.parametrize(
    "address",
    [
        "a.example:7000", "localhost:7000",  # names are looked up by nobody who is told them
        "127.1:7000", "2130706433:7000", "0x7f.1:7000", "2852039166:7000",  # what a resolver takes for addresses
        "[::ffff:169.254.169.254]:7000", "[64:ff9b::a9fe:a9fe]:7000", "[2002:7f00:1::]:7000", "[fd00:ec2::254]:7000",
        "100.100.100.200:7000", "203.0.113.9:22", "203.0.113.9:1023", "10.0.0.7:80", "[::1]:7000",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("ours", "theirs"), [("203.0.113.1", "203.0.113.2"), ("203.0.113.1", "203.0.113.1")])
def test_no_spelling_of_an_address_leads_where_none_may(address: str, ours: str, theirs: str) -> None:
    """Whether it is called public or local, and whether the peer is our neighbour or not."""
    assert worth_dialling((address,), (), ours, theirs) == worth_dialling((), (address,), ours, theirs) == ()
