"""How much a volunteer may say and ask for: a bucket for each, filled by time and by the work that it was given.

Messages are small and cost a server about 0.1 ms each, parameters are large and cost it its line. An honest volunteer
speaks because it has leases, and asks for a version because there is a new one; who does either in a loop is refused.
All of this is counted by node and not by link, so that nothing is gained by calling again.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.base.ids import NodeId

MESSAGES_PER_S = 50.0
"""Without any lease: pings, greetings, news passed on. At 0.1 ms each, half a hundredth of a processor …"""
MESSAGES_BURST = 200.0
"""… and so many at once: what a volunteer that comes back says of four open steps, one message for each of 50 tasks."""
MESSAGES_PER_LEASE = 8.0
"""A lease's own: its slot, the input asked for, the result, that it is summed up, its share of the contribution, what
is given back or said again after a break. A tiny run with 100 leases a second is never near its bound."""
MESSAGES_SAVED_MAX = 2000.0
"""What leases may bring together and nobody has spoken of yet: 0.2 s of the processor, if it is all said at once."""
FETCHES_BURST = 8.0
"""A newcomer asks for two versions (the open steps', with a delayed update); one that loses its link in the middle asks
again, and one whose device could not take them asks a third time. At 8 B in 16 stages of two servers a part is 103 MB
(3.3 bits each), so a loop moves 0.8 GB once …"""
FETCHES_PER_VERSION = 2.0
"""… and then two parts for each new version, where an honest one asks for one …"""
FETCHES_PER_S = 1.0 / 60.0
"""… or one a minute while no step ends: a line of 14 Mbit/s at most, and less than a link needs that breaks over and
over, since 103 MB take longer than a minute where lines are slow."""
REMEMBERED_MAX = 4096
"""Nodes, sixteen times what one server links to; who was silent longest is forgotten, with its burst."""


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float

    def take(self, now: float, per_s: float, burst: float) -> bool:
        """Takes one, or says that there is none. Time fills it up to `burst`, and takes nothing that was earned."""
        self.left = max(self.left, min(burst, self.left + max(0.0, now - self.at) * per_s))
        self.at = now
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True


@dataclass(slots=True)
class _Node:
    messages: _Bucket
    fetches: _Bucket
    version: int
    """The newest one that its fetches were counted by."""


class Rates:
    """What one server takes from each volunteer."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, _Node] = {}

    def may_speak(self, node: NodeId, now: float) -> bool:
        """Counts a message; whether it is one that the node may send."""
        return self._of(node, now).messages.take(now, MESSAGES_PER_S, MESSAGES_BURST)

    def leased(self, node: NodeId, now: float) -> None:
        """It was given a lease, and will have something to say. What it does not say now it may say later: leases may
        last longer than it takes to fill a bucket."""
        messages = self._of(node, now).messages
        messages.left = max(messages.left, min(MESSAGES_SAVED_MAX, messages.left + MESSAGES_PER_LEASE))

    def may_fetch(self, node: NodeId, newest: int, now: float) -> bool:
        """Counts a question for parameters; `newest` is the version that the shard has."""
        known = self._of(node, now)
        versions = max(0, newest - known.version) if known.version >= 0 else 0
        known.version = newest
        known.fetches.left = min(FETCHES_BURST, known.fetches.left + FETCHES_PER_VERSION * versions)
        return known.fetches.take(now, FETCHES_PER_S, FETCHES_BURST)

    def _of(self, node: NodeId, now: float) -> _Node:
        known = self._nodes.pop(node, None)
        if known is None:
            known = _Node(_Bucket(MESSAGES_BURST, now), _Bucket(FETCHES_BURST, now), version=-1)
        self._nodes[node] = known
        if len(self._nodes) > REMEMBERED_MAX:
            del self._nodes[next(iter(self._nodes))]
        return known
