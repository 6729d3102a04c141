"""Which calls are closed before a word is read, and how often the log says so.

A flood of them must not cost a line of the log each: they are told of together, once a second.
"""

from __future__ import annotations

from protocol.base.limits import CALLS_BURST, CALLS_PER_S
from protocol.link.faults import Faults
from protocol.link.networks import NetworkRates, network_of

SAID_EVERY_S = 1.0


class Door:
    """Of one process. Times in seconds, any origin."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._calls = NetworkRates(CALLS_PER_S, CALLS_BURST)
        self._untold = 0
        self._told_at = float("-inf")

    def refusal(self, host: str, now: float) -> str:
        """Why a call from there is closed at once; empty: it is not."""
        if not self._calls.may(network_of(host), now):
            return f"more than {CALLS_PER_S:g} calls a second from its network"
        if not self._faults.may_call(host, now):
            return "too many links from its network were ended for faults"
        return ""

    def to_tell(self, now: float) -> int:
        """Of one more closed call: how many are to be told of now, with it; 0: it is told of later."""
        self._untold += 1
        if now < self._told_at + SAID_EVERY_S:
            return 0
        count, self._untold, self._told_at = self._untold, 0, now
        return count
