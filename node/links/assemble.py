"""Puts a node's ways together: connector, puncher, and on a server the relay for others, as its owner wishes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from node.links.callee import Surroundings
from node.links.connector import Connector
from node.links.may_dial import Neighbourhood
from node.links.punch.helper_frames import SERVERS_MAX, StunServer, TurnServer
from node.links.punch.punched import IceServers, Puncher, PunchOptions
from node.links.relay.relay_desk import RelayLimits
from node.links.relay.relayed import Proof, RelayServer
from node.links.router.port_mapping import keep_mapping
from node.links.whereabouts import OwnPlaces, Whereabouts
from node.platform.pairs import CAN_PASS_SOCKETS
from protocol.base.ids import NodeId
from protocol.drive.transport import Transport
from protocol.link.reach import host_of, is_local, is_loopback, split
from protocol.trust.membership import JoinLink


@dataclass(frozen=True)
class WayOptions:
    """What the owner decides about ways."""

    punch: bool = True
    """Open a way through NATs by UDP where TCP does not lead to a peer."""
    lan: bool = False
    """Peers in private networks may be sent packets, though the run's coordinator is elsewhere."""
    relay: RelayLimits | None = field(default_factory=RelayLimits)
    """What a server carries between other members of the run; None: nothing."""
    map_port: bool = False
    """The home router may be asked to forward the port that we listen at."""


def assemble(
    nursery: trio.Nursery,
    *,
    transport: Transport,
    proof: Proof,
    link: JoinLink,
    role: str,
    options: WayOptions,
    surroundings: Surroundings,
    give_up: Callable[[NodeId, str], None],
    record: Callable[..., None],
    rejected: Callable[[str, str, str], None],
    count_relayed: Callable[[str, float, dict[str, str]], None],
    places: OwnPlaces | None = None,
) -> Connector:
    """The connector of a node, running below `nursery`; see `Connector` and `RelayServer` for the callbacks.

    `places`: None where this node is not dialled, so that there is nothing to follow.
    """
    if role == "volunteer":
        Neighbourhood(transport, link.coordinator, lan=options.lan)
    puncher = None
    if options.punch and CAN_PASS_SOCKETS:
        puncher = Puncher(
            nursery,
            identity=proof.identity,
            run_id=proof.run_id,
            generation=lambda: surroundings.generation,
            servers=lambda: ice_servers(surroundings),
            options=punch_options(link, options),
            limits=transport.limits,
        )
    connector = Connector(
        nursery,
        transport=transport,
        proof=proof,
        coordinator=link.coordinator,
        surroundings=surroundings,
        puncher=puncher,
        give_up=give_up,
        record=record,
    )
    nursery.start_soon(connector.run)
    if role == "server" and options.relay is not None:
        transport.guests = RelayServer(proof, options.relay, rejected=rejected, count=count_relayed)
    if places is not None:
        whereabouts = Whereabouts(connector, places)
        nursery.start_soon(whereabouts.watch)
        if options.map_port:

            def on_change(outside: tuple[str, int] | None) -> None:
                record("barnraise_node_port_forwarded", float(outside is not None))
                whereabouts.forwarded(outside)

            nursery.start_soon(keep_mapping, "tcp", places.forwarded_port, on_change)
    return connector


def punch_options(link: JoinLink, options: WayOptions) -> PunchOptions:
    """A run whose coordinator is in a private network, or on this computer, is one of that network."""
    hosts = [host_of(address) for address in link.addresses]
    return PunchOptions(
        lan=options.lan or all(is_local(host) for host in hosts),
        loopback=all(is_loopback(host) for host in hosts),
    )


def ice_servers(here: Surroundings) -> IceServers:
    """Those that the coordinator named last; TURN by TCP, too, for networks that let no UDP through.

    Where it named none, two public servers of the plan are asked how we look from outside: they answer at their ports.
    Only IPv4 is asked that way, and each question that cannot be answered would be waited for.
    """
    public = [_without_ipv6(split(addresses)[0])[:1] for addresses in here.relays.values()]
    asked = _without_ipv6(here.stun) or [address for addresses in public for address in addresses][:2]
    stun = tuple(StunServer(host_of(address), int(address.rpartition(":")[2])) for address in asked[:SERVERS_MAX])
    turn = tuple(
        TurnServer(host_of(address), int(address.rpartition(":")[2]), here.username, here.password, tcp)
        for address in here.turn[: SERVERS_MAX // 2]
        for tcp in (False, True)
    )
    return IceServers(stun, turn)


def _without_ipv6(addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if ":" not in host_of(address)]
