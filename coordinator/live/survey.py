"""What is measured of a run's members, filled up to a network that a planner can read. Pure.

Servers measure the links to each other before the first plan. What could not be measured in time gets the median of
what was. Volunteers who wait have no link yet, so their lines count as a home's; those who work have links to the
servers of their stage, and their lines to others count as the best of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from coordinator.live.measured_links import Direction
from coordinator.live.roster import Member
from protocol.base.ids import NodeId
from protocol.schedule.profile import Link, Machine, NetworkFile

HOME_UP_BYTES_PER_S = 2.5e6
"""20 Mbit/s: the home line that the run's sizes are made for …"""
HOME_DOWN_BYTES_PER_S = 2.5e7
"""… and its 200 Mbit/s down."""
HOME_LATENCY_S = 0.02
SERVER_BYTES_PER_S = 1.25e8
"""1 Gbit/s, for servers of whom nothing at all is known."""
SERVER_LATENCY_S = 0.01
FLOPS_PER_S = 1e11
"""A core or two, where nobody's speed is known: only the relation of members counts then, and they are equal."""
MEMORY_BYTES = 1 << 50
"""For a member that does not say what it has: memory is no limit."""

Directions = dict[tuple[NodeId, NodeId], Direction]


def is_surveyed(servers: Sequence[Member], pairs: Iterable[tuple[NodeId, NodeId]], directions: Directions) -> bool:
    """Whether all that was asked for is measured: every server itself, and these directions between them."""
    speeds = [member.join is not None and member.join.tokens_per_s > 0 for member in servers]
    return all(speeds) and all(pair in directions for pair in pairs)


def surveyed_network(
    servers: Sequence[Member],
    volunteers: Sequence[Member],
    directions: Directions,
    flops_per_s: Callable[[Member], float],
) -> NetworkFile:
    """These servers, in this order, and volunteers, with links between all servers and from volunteers to servers."""
    here = {member.peer for member in (*servers, *volunteers)}
    known = {pair: found for pair, found in directions.items() if pair[0] in here and pair[1] in here}
    between = [known[a.peer, b.peer] for a in servers for b in servers if (a.peer, b.peer) in known]
    rate = median([found.bytes_per_s for found in between]) if between else SERVER_BYTES_PER_S
    trips = [found.round_trip_s for found in between if found.round_trip_s >= 0]
    latency_s = median(trips) / 2 if trips else SERVER_LATENCY_S
    powers = {member.peer: flops_per_s(member) for member in (*servers, *volunteers)}
    measured = [power for power in powers.values() if power > 0]
    typical = median(measured) if measured else FLOPS_PER_S

    own_up: dict[NodeId, float] = {}
    own_down: dict[NodeId, float] = {}
    own_s: dict[NodeId, float] = {}
    """Of each member, its best lines that are known."""
    for (source, target), found in known.items():
        own_up[source] = max(own_up.get(source, 0.0), found.bytes_per_s)
        own_down[target] = max(own_down.get(target, 0.0), found.bytes_per_s)
        if found.round_trip_s >= 0:
            for end in (source, target):
                own_s[end] = min(own_s.get(end, found.round_trip_s), found.round_trip_s)

    def one_way(source: Member, target: Member) -> Link:
        found = known.get((source.peer, target.peer))
        guess_s, guess_rate = latency_s, rate
        if source.role == "volunteer":
            guess_rate = own_up.get(source.peer, HOME_UP_BYTES_PER_S)
            guess_s = own_s.get(source.peer, 2 * HOME_LATENCY_S) / 2
        elif target.role == "volunteer":
            guess_rate = own_down.get(target.peer, HOME_DOWN_BYTES_PER_S)
            guess_s = own_s.get(target.peer, 2 * HOME_LATENCY_S) / 2
        return Link(
            source=source.peer,
            target=target.peer,
            latency_s=guess_s if found is None or found.round_trip_s < 0 else found.round_trip_s / 2,
            bytes_per_s=guess_rate if found is None else found.bytes_per_s,
        )

    links = [one_way(a, b) for a in servers for b in servers if a is not b]
    for volunteer in volunteers:
        for server in servers:
            links += [one_way(volunteer, server), one_way(server, volunteer)]
    ups: dict[str, float] = {}
    downs: dict[str, float] = {}
    for link in links:
        ups[link.source] = max(ups.get(link.source, 0.0), link.bytes_per_s)
        downs[link.target] = max(downs.get(link.target, 0.0), link.bytes_per_s)
    machines = [
        Machine(
            name=member.peer,
            role="server" if member.role == "server" else "volunteer",
            forward_flops_per_s=powers[member.peer] or typical,
            backward_flops_per_s=powers[member.peer] or typical,
            memory_bytes=(member.join.memory_bytes if member.join is not None else 0) or MEMORY_BYTES,
            uplink_bytes_per_s=ups.get(member.peer, SERVER_BYTES_PER_S),
            downlink_bytes_per_s=downs.get(member.peer, SERVER_BYTES_PER_S),
        )
        for member in (*servers, *volunteers)
    ]
    return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links))
