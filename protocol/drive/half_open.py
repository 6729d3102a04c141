"""Places for handshakes that are going on: few, shared out among networks (the slow-loris attack, and floods of calls).

A caller starts without proof that it hears us. When it has shown a cookie it moves to places of its own kind, and no
crowd of callers without one can push it out. Whoever has to give way is of the network, and there of the address, that
has the most places: so one network can take its share and no more, however often it calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from protocol.base.limits import COOKIE_ABOVE, HALF_OPEN_MAX, HALF_OPEN_PREFIX_MAX, HALF_OPEN_PROVEN_MAX
from protocol.link.networks import network_of


class Place:
    """One caller's place."""

    def __init__(self, places: HalfOpenPlaces, host: str, scope: trio.CancelScope) -> None:
        self._places = places
        self.host = host
        self.network = network_of(host)
        self.scope = scope
        self.proven = False
        """Whether it has shown a cookie."""

    def prove(self) -> None:
        """The caller has shown a cookie that we gave to its address: only others that have can push it out."""
        self.proven = True
        self._places.make_room(self)


class HalfOpenPlaces:
    """Holds HALF_OPEN_MAX callers without a cookie and HALF_OPEN_PROVEN_MAX with one, HALF_OPEN_PREFIX_MAX of each
    kind from one network.

    A new caller is never turned away: one that is there is. An honest handshake is over within two round trips, so
    whoever is oldest in the most crowded network is most likely idle on purpose.
    """

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}

    @property
    def crowded(self) -> bool:
        """Whether callers should show a cookie first."""
        return sum(not place.proven for place in self._places) > COOKIE_ABOVE

    @contextmanager
    def place(self, host: str) -> Iterator[Place]:
        """A place for a caller from `host`; its scope is cancelled when it has to give way."""
        with trio.CancelScope() as scope:
            place = Place(self, host, scope)
            self._places[place] = None
            self.make_room(place)
            try:
                yield place
            finally:
                self._places.pop(place, None)

    def make_room(self, newest: Place) -> None:
        """Somebody gives way when `newest` is one too many of its kind, or of its network's."""
        kind = [place for place in self._places if place.proven == newest.proven]
        same = [place for place in kind if place.network == newest.network != ""]
        if len(same) > HALF_OPEN_PREFIX_MAX:
            self._evict(same, newest)
        elif len(kind) > (HALF_OPEN_PROVEN_MAX if newest.proven else HALF_OPEN_MAX):
            crowd = Counter(place.network for place in kind)
            most = max(crowd.values())
            self._evict([place for place in kind if crowd[place.network] == most], newest)

    def _evict(self, candidates: list[Place], newest: Place) -> None:
        """Of these the oldest from the address that has the most of them; `newest` only if there is nobody else."""
        hosts = Counter(place.host for place in candidates)
        most = max(hosts.values())
        gives_way = next(
            (place for place in candidates if hosts[place.host] == most and place is not newest), candidates[0]
        )
        del self._places[gives_way]
        gives_way.scope.cancel()
