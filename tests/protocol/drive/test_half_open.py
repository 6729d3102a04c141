"""Half-open places: bounded in all and for each network, the oldest gives way."""

from __future__ import annotations

from contextlib import ExitStack

import trio

from protocol.drive.half_open import HalfOpenPlaces, prefix_of
from protocol.limits import COOKIE_ABOVE, HALF_OPEN_MAX, HALF_OPEN_PREFIX_MAX


async def test_one_network_keeps_to_its_share() -> None:
    """Of many callers from one /24, the newest few stay and no other network's caller is touched."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        other = stack.enter_context(places.place("198.51.100.1"))
        same = [stack.enter_context(places.place(f"192.0.2.{number}")) for number in range(10)]
        assert [scope.cancel_called for scope in same] == [True] * (10 - HALF_OPEN_PREFIX_MAX) + [False] * 4
        assert not other.cancel_called


async def test_all_places() -> None:
    """Of more callers than places the oldest give way; cookies are asked for long before; all places come back."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        scopes: list[trio.CancelScope] = []
        for number in range(HALF_OPEN_MAX + 3):
            assert places.crowded == (number > COOKIE_ABOVE)
            scopes.append(stack.enter_context(places.place(f"10.0.{number}.1")))
        assert [scope.cancel_called for scope in scopes] == [True] * 3 + [False] * HALF_OPEN_MAX
    assert not places.crowded
    with places.place("10.0.0.1") as scope:
        assert not scope.cancel_called


def test_prefixes() -> None:
    """Networks are /24 and /48; mapped addresses count as IPv4; this machine is no network."""
    assert prefix_of("192.0.2.7") == prefix_of("::ffff:192.0.2.9") == "192.0.2.0/24"
    assert prefix_of("2001:db8:1:2::3") == "2001:db8:1::/48"
    assert prefix_of("fe80::1%eth0") == "fe80::/48"
    assert prefix_of("127.0.0.1") == prefix_of("::1") == prefix_of("::ffff:127.0.0.1") == ""
