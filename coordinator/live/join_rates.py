"""How fast new members may come: by network, so that one person with many keys stays about one person."""

from __future__ import annotations

from protocol.base.limits import JOINS_BURST, JOINS_PER_S, LOCAL_JOINS_BURST, LOCAL_JOINS_PER_S
from protocol.link.networks import NetworkRates, network_of
from protocol.link.reach import is_local


class JoinRates:
    """Only those who come by an invite for the first time are counted: a member that comes again is let in."""

    def __init__(self) -> None:
        self._public = NetworkRates(JOINS_PER_S, JOINS_BURST)
        self._local = NetworkRates(LOCAL_JOINS_PER_S, LOCAL_JOINS_BURST)

    def may(self, host: str, now: float) -> bool:
        """Whether one more may come from `host`; empty where there is no network, as in a simulated world."""
        if host and is_local(host):
            return self._local.may(host, now)
        return self._public.may(network_of(host), now)
