"""Who was hung up on for a fault of its own, and how long it waits before it may come again.

A handshake costs us a millisecond and the caller nothing, so whoever is cut off and comes again at once costs as much
as it likes. A member waits: half a second after the first fault, twice as long after each further one. Its key is
known only at the end of a handshake, so the network that faults come from has an allowance of them, too, which is asked
for before a word is read. That one is the gentler of the two, since others may share the network: it asks for nothing
while handshakes end well, and forgets within seconds.

Only faults count: a broken line, a time-out, a place that somebody else needed more are none. And only what a proven
member has said counts as its own: a record that was changed on the way is its network's fault.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import (
    BACK_OFF_FIRST_S,
    BACK_OFF_FORGOTTEN_S,
    BACK_OFF_MAX_S,
    BACK_OFF_NODES_MAX,
    FAULTS_BURST,
    FAULTS_PER_S,
    LOCAL_FAULTS_BURST,
    LOCAL_FAULTS_PER_S,
)
from protocol.link.networks import NetworkRates, network_of
from protocol.link.reach import is_local

NO_FAULTS = frozenset({"busy", "timeout", "version", "credential", "run", "identity", "not_finite"})
"""Reasons that an honest node can be refused for: a crowd, a slow line, an update or a membership that it missed, a run
that diverges."""


class ComesTooSoonError(RemoteProtocolError):
    """Of a member that was hung up on, or of somebody who shows its key."""

    def __init__(self, wait_s: float) -> None:
        super().__init__("busy", f"comes {wait_s:.1f} s too soon after it was hung up on for a fault")


@dataclass(slots=True)
class _Waiting:
    step_s: float
    until: float


class Faults:
    """Of one process. Times in seconds, any origin."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[NodeId, _Waiting] = OrderedDict()
        self._far = NetworkRates(FAULTS_PER_S, FAULTS_BURST)
        self._near = NetworkRates(LOCAL_FAULTS_PER_S, LOCAL_FAULTS_BURST)

    # ---- members -------------------------------------------------------------------------------------------------

    def of_member(self, node: NodeId, reason: str, now: float) -> None:
        """It was hung up on for what it said. More faults of links that it had by then count with the first."""
        if reason in NO_FAULTS or reason == "signature":
            return
        before = self._nodes.pop(node, None)
        if before is None or now >= before.until + BACK_OFF_FORGOTTEN_S:
            before = _Waiting(BACK_OFF_FIRST_S, now + BACK_OFF_FIRST_S)
        elif now >= before.until:
            step_s = min(BACK_OFF_MAX_S, 2 * before.step_s)
            before = _Waiting(step_s, now + step_s)
        self._nodes[node] = before
        if len(self._nodes) > BACK_OFF_NODES_MAX:
            self._nodes.popitem(last=False)

    def check(self, node: NodeId, now: float) -> None:
        """Raises `ComesTooSoonError` when the member must still wait."""
        waiting = self._nodes.get(node)
        if waiting is not None and now < waiting.until:
            raise ComesTooSoonError(waiting.until - now)

    # ---- networks ------------------------------------------------------------------------------------------------

    def may_call(self, host: str, now: float) -> bool:
        """Whether a call from there is heard at all."""
        return self._rates(host).left(_network(host), now) >= 1

    @contextmanager
    def handshake(self, host: str, now: float) -> Iterator[None]:
        """With somebody from there: it counts as a fault until it is over without one. Raises `RemoteProtocolError`."""
        if not self._rates(host).may(_network(host), now):
            raise RemoteProtocolError("busy", "too many handshakes at once from a network of faults")
        fault = False
        try:
            yield
        except RemoteProtocolError as error:
            fault = isinstance(error, ComesTooSoonError) or error.reason not in NO_FAULTS
            raise
        finally:
            if not fault:
                self._rates(host).give_back(_network(host))

    def from_host(self, host: str, reason: str, now: float) -> None:
        """A link from there was ended for this."""
        if reason not in NO_FAULTS:
            self._rates(host).may(_network(host), now)

    def _rates(self, host: str) -> NetworkRates:
        return self._near if not network_of(host) or is_local(host) else self._far


def _network(host: str) -> str:
    return network_of(host) or "this computer"
