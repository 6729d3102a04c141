"""What a server that relays decides: who may, who meets whom, how fast, how much. A machine without any socket.

A leg is one connection of a proven member of the run. Two legs with the same meeting number make a session.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.base.ids import NodeId

REFUSED_FOR = ("full", "busy", "quota", "alone", "taken", "ending")
"""Reasons of `Refuse`, as in protocol.link.relay.REFUSALS."""


WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What the owner of a server gives away."""

    sessions_max: int = 64
    """Sessions at once: each costs two sockets and at most half a megabyte of buffers; 0: it does not relay."""
    node_sessions_max: int = 8
    """Of one node: a volunteer has links to the servers of one stage."""
    waiting_max: int = 64
    """Legs that wait for their other one."""
    wait_s: float = WAIT_S
    """How long they wait: the other node was told before this one came."""
    bytes_per_s: float = 25e6
    """Of all sessions together, both directions: its own work must not starve. 200 Mbit/s."""
    burst_bytes: float = 1e6
    total_bytes: float = 1e12
    """Since the process started; then it relays no more."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Say why not, and close the leg."""

    leg: int
    reason: str


@dataclass(frozen=True, slots=True)
class Splice:
    """Tell both legs to go, and carry their bytes."""

    session: int
    legs: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """End a session that runs; `reason` as in `Refuse`."""

    session: int
    reason: str


RelayOrder = Refuse | Splice | Cut


@dataclass(slots=True)
class _Waiting:
    leg: int
    node: NodeId
    until: float


class RelayDesk:
    """Facts in, orders out. Legs are numbered by the caller; a session has the number of its first leg."""

    def __init__(self, limits: RelayLimits, now: float) -> None:
        self.limits = limits
        self._waiting: dict[bytes, _Waiting] = {}
        self._sessions: dict[int, tuple[bytes, NodeId, NodeId]] = {}
        self._tokens = limits.burst_bytes
        self._tokens_at = now
        self._ending = False
        self.moved_bytes = 0
        """Since the start, both directions."""

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    @property
    def has_room(self) -> bool:
        """Whether another session would be taken."""
        spent = self.moved_bytes >= self.limits.total_bytes
        return not self._ending and not spent and self.session_count < self.limits.sessions_max

    def arrive(self, leg: int, node: NodeId, meeting: bytes, now: float) -> list[RelayOrder]:
        """A leg of a proven member."""
        reason = self._refusal(node, meeting)
        if reason:
            return [Refuse(leg, reason)]
        other = self._waiting.pop(meeting, None)
        if other is None:
            self._waiting[meeting] = _Waiting(leg, node, now + self.limits.wait_s)
            return []
        self._sessions[other.leg] = (meeting, other.node, node)
        return [Splice(other.leg, (other.leg, leg))]

    def _refusal(self, node: NodeId, meeting: bytes) -> str:
        limits = self.limits
        if self._ending:
            return "ending"
        if self.moved_bytes >= limits.total_bytes:
            return "quota"
        other = self._waiting.get(meeting)
        if any(taken == meeting for taken, _, _ in self._sessions.values()) or (other and other.node == node):
            return "taken"
        if self.session_count >= limits.sessions_max or (other is None and len(self._waiting) >= limits.waiting_max):
            return "full"
        own = sum(node in (a, b) for _, a, b in self._sessions.values())
        own += sum(waiting.node == node for waiting in self._waiting.values())
        return "busy" if own >= limits.node_sessions_max else ""

    def left(self, leg: int) -> None:
        """A leg that waited is gone, or the session of that number is over."""
        self._sessions.pop(leg, None)
        for meeting, waiting in list(self._waiting.items()):
            if waiting.leg == leg:
                del self._waiting[meeting]

    def move(self, byte_count: int, now: float) -> float:
        """Bytes of some session came in; how long to wait before they may go out, in seconds."""
        limits = self.limits
        self.moved_bytes += byte_count
        self._tokens = min(limits.burst_bytes, self._tokens + (now - self._tokens_at) * limits.bytes_per_s)
        self._tokens_at = now
        self._tokens -= byte_count
        return max(0.0, -self._tokens / limits.bytes_per_s)

    def spent(self) -> list[RelayOrder]:
        """Cuts every session once the total is used up; ask after `move`."""
        if self.moved_bytes < self.limits.total_bytes:
            return []
        return [Cut(session, "quota") for session in self._sessions]

    def end(self) -> list[RelayOrder]:
        """The server ends: nobody may come any more."""
        self._ending = True
        orders: list[RelayOrder] = [Refuse(waiting.leg, "ending") for waiting in self._waiting.values()]
        self._waiting.clear()
        return orders + [Cut(session, "ending") for session in self._sessions]

    def wake_at(self) -> float | None:
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    def wake(self, now: float) -> list[RelayOrder]:
        late = [(meeting, waiting) for meeting, waiting in self._waiting.items() if waiting.until <= now]
        for meeting, _ in late:
            del self._waiting[meeting]
        return [Refuse(waiting.leg, "alone") for _, waiting in late]

    def check(self) -> None:
        """Raises if an invariant is broken."""
        limits = self.limits
        assert len(self._sessions) <= limits.sessions_max and len(self._waiting) <= limits.waiting_max
        meetings = [*self._waiting, *(meeting for meeting, _, _ in self._sessions.values())]
        assert len(set(meetings)) == len(meetings), "a meeting of three"
        assert all(a != b for _, a, b in self._sessions.values()), "a node meets itself"
        nodes = [node for _, a, b in self._sessions.values() for node in (a, b)]
        nodes += [waiting.node for waiting in self._waiting.values()]
        assert all(nodes.count(node) <= limits.node_sessions_max for node in nodes), "a node has more than its share"
