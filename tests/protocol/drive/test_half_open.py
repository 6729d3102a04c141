"""Half-open places: bounded in all and for each network; a cookie holds one against any crowd without."""

from __future__ import annotations

from contextlib import ExitStack

from protocol.base.limits import COOKIE_ABOVE, HALF_OPEN_MAX, HALF_OPEN_PREFIX_MAX, HALF_OPEN_PROVEN_MAX
from protocol.drive.half_open import HalfOpenPlaces, Place


async def test_one_network_keeps_to_its_share() -> None:
    """Of many callers from one /24, the newest few stay and no other network's caller is touched."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        other = stack.enter_context(places.place("198.51.100.1"))
        same = [stack.enter_context(places.place(f"192.0.2.{number}")) for number in range(10)]
        gone = [place.scope.cancel_called for place in same]
        assert gone == [True] * (10 - HALF_OPEN_PREFIX_MAX) + [False] * HALF_OPEN_PREFIX_MAX
        assert not other.scope.cancel_called


async def test_all_places() -> None:
    """Of more callers than places the oldest give way; cookies are asked for long before; all places come back."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        taken: list[Place] = []
        for number in range(HALF_OPEN_MAX + 3):
            assert places.crowded == (number > COOKIE_ABOVE)
            taken.append(stack.enter_context(places.place(f"10.0.{number}.1")))
        assert [place.scope.cancel_called for place in taken] == [True] * 3 + [False] * HALF_OPEN_MAX
    assert not places.crowded
    with places.place("10.0.0.1") as place:
        assert not place.scope.cancel_called


async def test_a_cookie_holds_a_place_against_a_flood_without_cookies() -> None:
    """300 calls a second from 64 networks turn all places over in 0.2 s; a handshake at 150 ms takes longer."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        honest = stack.enter_context(places.place("198.51.100.1"))
        honest.prove()
        for number in range(10 * HALF_OPEN_MAX):
            stack.enter_context(places.place(f"203.0.{number % 64}.{number // 64}"))
        assert not honest.scope.cancel_called


async def test_a_flood_with_cookies_pushes_out_its_own_networks_only() -> None:
    """An attacker on 64 networks fills all places for cookies with its four each; a 65th network's caller stays."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:

        def call(host: str) -> Place:
            place = stack.enter_context(places.place(host))
            place.prove()
            return place

        for number in range(64 * HALF_OPEN_PREFIX_MAX):
            call(f"203.0.{number % 64}.{number // 64}")
        assert 64 * HALF_OPEN_PREFIX_MAX == HALF_OPEN_PROVEN_MAX
        honest = call("198.51.100.1")
        for number in range(1000):
            call(f"203.0.{number % 64}.{number // 64 % 250}")
        assert not honest.scope.cancel_called


async def test_one_address_cannot_push_out_its_neighbour() -> None:
    """20 calls a second from one address of a /24 take that address's places, not those of another house."""
    places = HalfOpenPlaces()
    with ExitStack() as stack:
        honest = stack.enter_context(places.place("192.0.2.1"))
        for _ in range(100):
            stack.enter_context(places.place("192.0.2.66"))
        assert not honest.scope.cancel_called
