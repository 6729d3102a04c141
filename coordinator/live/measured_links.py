"""What the run knows of its network: the newest report of every link, and a `NETWORK.json` for the planner. Pure.

Both ends of a link report both directions. For each direction the newest figure counts, whoever brought it. Figures are
what members say of themselves: a wrong one costs speed and nothing else, and the planner's own look at outliers
(`protocol.schedule.profile`) keeps one that is far too good from drawing traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from coordinator.live.roster import Member
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.messages import LinkFigures, LinkReport
from protocol.schedule.profile import Link, Machine, NetworkFile

RATE_MAX = 1e12
"""Bytes per second that no link has."""
TRIP_S_MAX = 3600.0
TRIPS_S = 300.0
"""A way's own round trip is the least that was heard of it in this time or the one before: what a link says while
tensors wait in its queues is theirs (BBR takes the least, too: Cardwell et al. 2016). A new path begins anew."""


@dataclass(frozen=True, slots=True)
class Heard:
    """One member's figures of one link, and when they came."""

    figures: LinkFigures
    at: float
    trips_since: float
    trips_s: tuple[float, float]
    """The least round trips since then, and in the time before; -1: none."""

    @property
    def round_trip_s(self) -> float:
        """-1: not known."""
        return min((trip_s for trip_s in self.trips_s if trip_s >= 0), default=-1.0)

    def age_s(self, now: float) -> float:
        """Since the newest measurement of a rate."""
        return self.figures.age_s + max(0.0, now - self.at)


@dataclass(frozen=True, slots=True)
class Direction:
    """What is known of one direction of one pair."""

    bytes_per_s: float
    round_trip_s: float
    age_s: float
    spread: float


class NetworkBook:
    """The reports of all members that are linked."""

    def __init__(self, *, over: bool = False) -> None:
        """`over`: the run is finished, so who was measured has left already."""
        self._heard: dict[NodeId, dict[NodeId, Heard]] = {}
        self._ever_heard = over

    def take(self, reporter: NodeId, report: LinkReport, now: float) -> str:
        """A report replaces the reporter's last one. Returns what no honest node says, or an empty string."""
        for figures in report.links:
            fault = _fault_of(reporter, figures)
            if fault:
                return fault
        self._ever_heard = self._ever_heard or bool(report.links)
        before = self._heard.get(reporter, {})
        self._heard[reporter] = {
            figures.peer: _heard(figures, before.get(figures.peer), now) for figures in report.links
        }
        return ""

    def left(self, member: NodeId) -> None:
        """What it said is void; what others said of it fades with their next reports."""
        self._heard.pop(member, None)

    def links_of(self, member: NodeId) -> dict[NodeId, Heard]:
        """The links that a member reports, by peer."""
        return self._heard.get(member, {})

    def line_of(self, member: NodeId) -> tuple[float, float]:
        """Bytes per second up and down of a member's best links, by its own measurements when it came and by what its
        servers have seen since; 0: not known."""
        own = self._heard.get(member, {})
        up = max((heard.figures.sent_bytes_per_s for heard in own.values()), default=0.0)
        down = max((heard.figures.received_bytes_per_s for heard in own.values()), default=0.0)
        # What servers have seen counts more than the member's own word; of several the best, for the way to one of them
        # may lead through a relay.
        seen = [found.figures for peer in own if (found := self._heard.get(peer, {}).get(member)) is not None]
        up = max((figures.received_bytes_per_s for figures in seen), default=0.0) or up
        down = max((figures.sent_bytes_per_s for figures in seen), default=0.0) or down
        return up, down

    def directions(self, now: float) -> dict[tuple[NodeId, NodeId], Direction]:
        """(source, target) -> the newest that either end says, where a rate is known; and the least round trip."""
        newest: dict[tuple[NodeId, NodeId], Direction] = {}

        def trip_s(reporter: NodeId, peer: NodeId) -> float:
            ends = (self._heard.get(reporter, {}).get(peer), self._heard.get(peer, {}).get(reporter))
            return min((end.round_trip_s for end in ends if end is not None and end.round_trip_s >= 0), default=-1.0)

        for reporter, links in self._heard.items():
            for peer, heard in links.items():
                figures, age_s = heard.figures, heard.age_s(now)
                for pair, rate in (
                    ((reporter, peer), figures.sent_bytes_per_s),
                    ((peer, reporter), figures.received_bytes_per_s),
                ):
                    known = newest.get(pair)
                    if rate > 0 and (known is None or age_s < known.age_s):
                        newest[pair] = Direction(rate, trip_s(reporter, peer), age_s, figures.spread)
        return newest

    def to_network(self, members: Iterable[Member], flops_per_s: Callable[[Member], float], now: float) -> NetworkFile:
        """A `NETWORK.json` of the members of whom a link is measured.

        `flops_per_s(member)`: its measured power, 0 when it was not measured; then the others' median stands in.
        Raises `BadInputError` when nothing is known yet, or any more.
        """
        directions = self.directions(now)
        known = {member.peer: member for member in members if any(member.peer in pair for pair in directions)}
        powers = {peer: flops_per_s(member) for peer, member in known.items()}
        measured = [power for power in powers.values() if power > 0]
        if not known and self._ever_heard:
            raise BadInputError("network: everybody whose links were measured has left; ask again while they take part")
        if not known or not measured:
            what = "link" if not known else "computer's speed"
            raise BadInputError(f"network: no {what} is measured yet; volunteers measure when they join")
        typical = median(measured)
        links = [
            Link(
                source=source,
                target=target,
                latency_s=max(0.0, found.round_trip_s) / 2,
                bytes_per_s=found.bytes_per_s,
                age_s=round(found.age_s, 3),
                spread=round(found.spread, 4),
            )
            for (source, target), found in directions.items()
            if source in known and target in known
        ]
        machines = [
            Machine(
                name=peer,
                role="server" if member.role == "server" else "volunteer",
                forward_flops_per_s=powers[peer] or typical,
                backward_flops_per_s=powers[peer] or typical,
                memory_bytes=member.join.memory_bytes if member.join is not None else 0,
                uplink_bytes_per_s=max((link.bytes_per_s for link in links if link.source == peer), default=0.0),
                downlink_bytes_per_s=max((link.bytes_per_s for link in links if link.target == peer), default=0.0),
            )
            for peer, member in known.items()
        ]
        return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links))


def _heard(figures: LinkFigures, before: Heard | None, now: float) -> Heard:
    """With the least round trips of this path so far."""
    trip_s = figures.round_trip_s
    if before is None or before.figures.path != figures.path:
        return Heard(figures, now, now, (trip_s, -1.0))
    if now >= before.trips_since + TRIPS_S:
        return Heard(figures, now, now, (trip_s, before.trips_s[0]))
    least_s = min((each for each in (trip_s, before.trips_s[0]) if each >= 0), default=-1.0)
    return Heard(figures, now, before.trips_since, (least_s, before.trips_s[1]))


def _fault_of(reporter: NodeId, figures: LinkFigures) -> str:
    """What no honest node says of a link, or an empty string."""
    if figures.peer == reporter:
        return "a link of a node with itself"
    for name, value, least, most in (
        ("round_trip_s", figures.round_trip_s, -1.0, TRIP_S_MAX),
        ("loss", figures.loss, -1.0, 1.0),
        ("sent_bytes_per_s", figures.sent_bytes_per_s, 0.0, RATE_MAX),
        ("received_bytes_per_s", figures.received_bytes_per_s, 0.0, RATE_MAX),
        ("age_s", figures.age_s, 0.0, 1e9),
        ("spread", figures.spread, 0.0, 1e6),
    ):
        if not least <= value <= most:
            return f"links: {name} {value} cannot be"
    return ""
