"""Places for handshakes that are going on: few, and the oldest gives way (state-and-trust 2.1, slowloris)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from protocol.limits import COOKIE_ABOVE, HALF_OPEN_MAX, HALF_OPEN_PREFIX_MAX


class HalfOpenPlaces:
    """Holds at most HALF_OPEN_MAX callers, and HALF_OPEN_PREFIX_MAX from one network.

    A new caller is never turned away: the one that has waited longest is. An honest handshake is over within two
    round trips, so whoever is oldest among so many is most likely idle on purpose.
    """

    def __init__(self) -> None:
        self._places: dict[trio.CancelScope, str] = {}

    @property
    def crowded(self) -> bool:
        """Whether callers should show a cookie first."""
        return len(self._places) > COOKIE_ABOVE

    @contextmanager
    def place(self, host: str) -> Iterator[trio.CancelScope]:
        """A place for a caller from `host`; its scope is cancelled when it has to give way."""
        prefix = prefix_of(host)
        with trio.CancelScope() as scope:
            self._places[scope] = prefix
            same = [other for other, its_prefix in self._places.items() if its_prefix == prefix != ""]
            if len(same) > HALF_OPEN_PREFIX_MAX:
                self._evict(same[0])
            elif len(self._places) > HALF_OPEN_MAX:
                self._evict(next(iter(self._places)))
            try:
                yield scope
            finally:
                self._places.pop(scope, None)

    def _evict(self, scope: trio.CancelScope) -> None:
        del self._places[scope]
        scope.cancel()


def prefix_of(host: str) -> str:
    """The network of a caller: IPv4 /24, IPv6 /48; empty for this machine, where no network can be blamed."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))
