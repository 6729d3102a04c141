"""Who counts together, and how much a network may ask for."""

from __future__ import annotations

import pytest

from protocol.link.networks import NETWORKS_MAX, NetworkRates, network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("8.8.8.7", "8.8.8.0/24"),
        ("::ffff:8.8.8.9", "8.8.8.0/24"),
        ("192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1::/48"),
        ("2606:4700:1:2::3", "2606:4700:1::/48"),
        ("10.1.2.3", "10.1.2.3"),
        ("192.168.1.4", "192.168.1.4"),
        ("100.64.3.2", "100.64.3.2"),
        ("fd00::5", "fd00::5"),
        ("fe80::1%eth0", "fe80::1"),
        ("127.0.0.1", ""),
        ("::1", ""),
        ("::ffff:127.0.0.1", ""),
        ("a name", ""),
    ],
)
def test_networks(host: str, network: str) -> None:
    """Public addresses count by /24 and /48, private ones alone, this computer not at all."""
    assert network_of(host) == network


def test_a_network_has_a_burst_and_then_its_rate() -> None:
    """Others are not touched by it."""
    rates = NetworkRates(per_s=0.1, burst=6)
    assert [rates.may("a", 0.0) for _ in range(8)] == [True] * 6 + [False] * 2
    assert rates.may("b", 0.0)
    assert [rates.may("a", 10.0), rates.may("a", 10.0)] == [True, False]
    assert all(rates.may("", 0.0) for _ in range(100))


def test_what_is_remembered_is_bounded() -> None:
    """Networks that nobody has heard of for a while are forgotten, whoever keeps asking is not."""
    rates = NetworkRates(per_s=0.0, burst=1)
    assert rates.may("a", 0.0)
    for number in range(2 * NETWORKS_MAX):
        rates.may(str(number), 0.0)
        assert not rates.may("a", 0.0)
    assert len(rates._buckets) <= NETWORKS_MAX
