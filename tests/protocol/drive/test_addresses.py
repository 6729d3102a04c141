"""HOST:PORT from people, and addresses for others."""

from __future__ import annotations

import click
import pytest

from protocol.base.errors import BadInputError
from protocol.drive.addresses import HostPort, host_port, is_loopback, reachable_addresses


@pytest.mark.parametrize(
    ("text", "pair"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80)), ("a.example:65535", ("a.example", 65535))],
)
def test_host_and_port_are_read(text: str, pair: tuple[str, int]) -> None:
    """Names, IPv4, IPv6 in brackets; port 0 lets the system choose."""
    assert HostPort().convert(text, None, None) == pair
    assert HostPort().convert(pair, None, None) == pair


@pytest.mark.parametrize("text", ["127.0.0.1", ":80", "a:65536", "a:-1", "a:x", ""])
def test_what_is_no_address_is_named_with_its_option(text: str) -> None:
    """The option and what stood there."""
    with pytest.raises(BadInputError, match=r"--listen: '.*' is not HOST:PORT"):
        HostPort().convert(text, click.Option(["--listen"]), None)


def test_announced_addresses_count_alone() -> None:
    """They are checked, and at most eight."""
    assert reachable_addresses([("0.0.0.0", 5)], ("a.example:1",)) == ("a.example:1",)
    with pytest.raises(BadInputError, match="not HOST:PORT"):
        reachable_addresses([("0.0.0.0", 5)], ("a.example",))
    with pytest.raises(BadInputError, match="more than 8"):
        reachable_addresses([("0.0.0.0", 5)], ("a.example:1",) * 9)


def test_a_socket_for_all_interfaces_is_announced_with_loopback_last() -> None:
    """This machine's own addresses; 127.0.0.1 is among them and comes after those that others can reach."""
    addresses = reachable_addresses([("0.0.0.0", 7)])
    loopback = [is_loopback(address.rpartition(":")[0]) for address in addresses]
    assert "127.0.0.1:7" in addresses and loopback == sorted(loopback)
    assert reachable_addresses([("10.1.2.3", 7)]) == ("10.1.2.3:7",)
    assert host_port("::1", 7) == "[::1]:7"


def test_several_sockets_are_all_told() -> None:
    """Each listening socket adds its addresses once; loopback comes last, and nobody is told more than eight."""
    sockets = [("127.0.0.1", 1), ("192.0.2.1", 443), ("a.example", 2), ("192.0.2.1", 443)]
    assert reachable_addresses(sockets) == ("192.0.2.1:443", "a.example:2", "127.0.0.1:1")
    assert len(reachable_addresses([("192.0.2.1", port) for port in range(1, 20)])) == 8
    assert not any("%" in address for address in reachable_addresses([("::", 7)]))
