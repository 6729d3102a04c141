"""What a server that relays decides: who may, who meets whom, how fast, how much. A machine without any socket.

A leg is one connection of a proven member of the run. Two legs with the same meeting number make a session.

A member costs whoever has an invite nothing, a network does: where all places are taken, the network that has most of
them gives one to a newcomer of another network. Legs that are of no network (this computer's own, and those of servers,
which came by an invite that is handed to few) are counted for none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.base.ids import NodeId

REFUSED_FOR = ("full", "busy", "quota", "alone", "taken", "ending")
"""Reasons of `Refuse`, as in protocol.link.relay.REFUSALS."""

WAIT_S = 5.0
LATELY_S = 60.0
"""What a session moved in this minute and in the one before says whether it is in use: an honest link is asked for
signs of life every few seconds, and one that was given a task moves megabytes."""
QUOTA_S = 30 * 86400.0
"""A month: lines are sold by it. 1 TB grows back at 386 kB/s, 33 GB a day, so a server that has given all of it away
relays on, and no month costs more than two quotas (the one that was full, and what grew), no year more than 13.2."""
QUOTA_AGAIN = 1 / 30
"""Share of a quota that must have grown back before a used-up one takes legs again, a day's: else each session would
be cut as soon as it was there."""


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
    quota_bytes: float = 1e12
    """What may be carried at once; what is used of it grows back evenly, all of it in QUOTA_S. A process begins with
    all of it."""


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
    networks: frozenset[str]
    until: float


@dataclass(slots=True)
class _Session:
    meeting: bytes
    nodes: tuple[NodeId, NodeId]
    networks: frozenset[str]
    """Of both legs."""
    minute: int = 0
    moved_bytes: int = 0
    """In this minute."""
    before_bytes: int = 0
    """In the minute before."""

    def count(self, byte_count: int, now: float) -> None:
        minute = int(now // LATELY_S)
        if minute != self.minute:
            self.before_bytes = self.moved_bytes if minute == self.minute + 1 else 0
            self.minute, self.moved_bytes = minute, 0
        self.moved_bytes += byte_count

    def lately_bytes(self, now: float) -> int:
        self.count(0, now)
        return self.before_bytes + self.moved_bytes


class RelayDesk:
    """Facts in, orders out. Legs are numbered by the caller; a session has the number of its first leg."""

    def __init__(self, limits: RelayLimits, now: float) -> None:
        self.limits = limits
        self._waiting: dict[bytes, _Waiting] = {}
        self._sessions: dict[int, _Session] = {}
        self._burst_left = limits.burst_bytes
        self._quota_left = limits.quota_bytes
        self._as_of = now
        """When both were what they are."""
        self._used_up = limits.quota_bytes <= 0
        self._ending = False
        self.moved_bytes = 0
        """Since the start, both directions."""

    @property
    def session_count(self) -> int:
        return len(self._sessions)

    def arrive(self, leg: int, node: NodeId, meeting: bytes, now: float, network: str = "") -> list[RelayOrder]:
        """A leg of a proven member. `network`: the one that it is counted for; empty for none."""
        self._grow(now)
        other = self._waiting.get(meeting)
        networks = frozenset((network,)) - {""}
        if other is not None:
            networks |= other.networks
        reason = self._refusal(node, meeting, networks)
        if reason:
            return [Refuse(leg, reason)]
        if other is None:
            made = self._make_way(networks)
            self._waiting[meeting] = _Waiting(leg, node, networks, now + self.limits.wait_s)
            return made
        del self._waiting[meeting]
        made = self._cut_one(networks, now)
        self._sessions[other.leg] = _Session(meeting, (other.node, node), networks, int(now // LATELY_S))
        return [*made, Splice(other.leg, (other.leg, leg))]

    def _refusal(self, node: NodeId, meeting: bytes, networks: frozenset[str]) -> str:
        limits = self.limits
        if self._ending:
            return "ending"
        if self._used_up:
            return "quota"
        other = self._waiting.get(meeting)
        if any(session.meeting == meeting for session in self._sessions.values()) or (other and other.node == node):
            return "taken"
        if self._are_full and not self._crowd_of_sessions(networks):
            return "full"
        if other is None and self._nobody_may_wait and not self._crowd_of_waiting(networks):
            return "full"
        own = sum(node in session.nodes for session in self._sessions.values())
        own += sum(waiting.node == node for waiting in self._waiting.values())
        return "busy" if own >= limits.node_sessions_max else ""

    @property
    def _are_full(self) -> bool:
        return self.session_count >= self.limits.sessions_max

    @property
    def _nobody_may_wait(self) -> bool:
        return len(self._waiting) >= self.limits.waiting_max

    def _crowd_of_sessions(self, newcomer: frozenset[str]) -> str:
        return crowd((session.networks for session in self._sessions.values()), newcomer)

    def _crowd_of_waiting(self, newcomer: frozenset[str]) -> str:
        return crowd((waiting.networks for waiting in self._waiting.values()), newcomer)

    def _cut_one(self, newcomer: frozenset[str], now: float) -> list[RelayOrder]:
        """Where there is no place: of the network that has most of them, the session that was used least lately."""
        if not self._are_full:
            return []
        network = self._crowd_of_sessions(newcomer)
        theirs = [number for number, session in self._sessions.items() if network in session.networks]
        least = min(theirs, key=lambda number: self._sessions[number].lately_bytes(now))
        del self._sessions[least]
        return [Cut(least, "full")]

    def _make_way(self, newcomer: frozenset[str]) -> list[RelayOrder]:
        """The same for those that wait: the one that has waited longest is the least likely to be met."""
        if not self._nobody_may_wait:
            return []
        network = self._crowd_of_waiting(newcomer)
        meeting, oldest = next(pair for pair in self._waiting.items() if network in pair[1].networks)
        del self._waiting[meeting]
        return [Refuse(oldest.leg, "full")]

    def left(self, leg: int) -> None:
        """A leg that waited is gone, or the session of that number is over."""
        self._sessions.pop(leg, None)
        for meeting, waiting in list(self._waiting.items()):
            if waiting.leg == leg:
                del self._waiting[meeting]

    def move(self, session: int, byte_count: int, now: float) -> float:
        """Bytes of a session came in; how long to wait before they may go out, in seconds."""
        limits = self.limits
        if session in self._sessions:  # it may have been cut a moment ago
            self._sessions[session].count(byte_count, now)
        self.moved_bytes += byte_count
        self._grow(now)
        self._burst_left -= byte_count
        self._quota_left -= byte_count
        self._used_up |= self._quota_left <= 0
        return max(0.0, -self._burst_left / limits.bytes_per_s)

    def spent(self) -> list[RelayOrder]:
        """Cuts every session once the quota is used up; ask after `move`."""
        return [Cut(session, "quota") for session in self._sessions] if self._used_up else []

    def _grow(self, now: float) -> None:
        limits, passed_s = self.limits, now - self._as_of
        self._as_of = now
        self._burst_left = min(limits.burst_bytes, self._burst_left + passed_s * limits.bytes_per_s)
        self._quota_left = min(limits.quota_bytes, self._quota_left + passed_s * limits.quota_bytes / QUOTA_S)
        if self._quota_left > 0 and self._quota_left >= limits.quota_bytes * QUOTA_AGAIN:
            self._used_up = False

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
        meetings = [*self._waiting, *(session.meeting for session in self._sessions.values())]
        assert len(set(meetings)) == len(meetings), "a meeting of three"
        nodes = [node for session in self._sessions.values() for node in session.nodes]
        assert all(len(set(session.nodes)) == 2 for session in self._sessions.values()), "a node meets itself"
        nodes += [waiting.node for waiting in self._waiting.values()]
        assert all(nodes.count(node) <= limits.node_sessions_max for node in nodes), "a node has more than its share"


def crowd(places: Iterable[frozenset[str]], newcomer: frozenset[str]) -> str:
    """The network that has most of these places, when it may be asked to give one to a newcomer of other networks.

    Empty: nobody need give way. It must still have as many as the newcomer's afterwards; else two networks would cut
    each other's sessions for ever.
    """
    counts = Counter(network for networks in places for network in networks)
    if not counts:
        return ""
    network, most = counts.most_common(1)[0]
    own = max((counts[network] for network in newcomer), default=0)
    return network if own + 1 < most else ""
