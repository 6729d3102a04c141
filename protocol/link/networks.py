"""Which network a caller comes from, and how much each network may ask for: strangers have many keys, few networks.

A public address counts with its neighbours: whoever rents one IPv4 address can rent the /24's others, and an IPv6
customer is given a /48 or /56 whole. A private address (RFC 1918, RFC 4193, RFC 6598, link-local) counts alone: those
behind one home router or in one laboratory share a /24 without being one person, and a stranger from outside cannot
have one. This computer itself is no network: whoever can call from it could do worse than call.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict

from protocol.link.reach import is_local

NETWORKS_MAX = 4096
"""Networks remembered, 200 bytes each; the one that asked longest ago is forgotten first, and its burst with it."""


def network_of(host: str) -> str:
    """IPv4 /24, IPv6 /48, a private address alone; empty for this computer, and where there is no address."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return ""
    if is_local(str(address)):
        return str(address)
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


class NetworkRates:
    """A bucket for each network: `burst` at once, and `per_s` again. Whoever is no network is not counted."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """network -> (left, as of this time)"""

    def may(self, network: str, now: float) -> bool:
        """Takes one from the network's bucket, or says that it is empty. `now` in seconds, any origin."""
        if not network:
            return True
        left = self.left(network, now)
        self._buckets.pop(network, None)
        self._buckets[network] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > NETWORKS_MAX:
            self._buckets.popitem(last=False)
        return left >= 1

    def left(self, network: str, now: float) -> float:
        """What its bucket holds; nothing is taken."""
        left, at = self._buckets.get(network, (self._burst, now))
        return min(self._burst, left + (now - at) * self._per_s)

    def give_back(self, network: str) -> None:
        """One that was taken was not needed after all."""
        if network in self._buckets:
            left, at = self._buckets[network]
            self._buckets[network] = (min(self._burst, left + 1), at)
