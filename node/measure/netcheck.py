"""`barnraise netcheck`: what this computer's line is like, seen from a run, in at most 20 seconds."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import trio

from node.links.assemble import WayOptions
from node.measure.nat import WORDS, Nat, Seen, advice, classify
from node.owner.words import WAYS
from node.process.journal import Journal, JournalError
from node.process.state import NodeState
from node.visit.survey import Reached, Survey, survey
from protocol.base.errors import BadInputError
from protocol.drive.limits import LineLimits
from protocol.drive.stun import StunAsker
from protocol.link.reach import host_of, is_local, is_loopback
from protocol.trust.membership import JoinLink

STUN_SERVERS_MAX = 4
"""Two tell all that can be told; two more in case one is silent."""


@dataclass(frozen=True, slots=True)
class Check:
    """Everything that was found."""

    run: str
    coordinator_s: float
    """To connect to the coordinator and prove who is who."""
    nat: Nat
    seen: tuple[Seen, ...]
    ipv6: bool
    """Whether this computer has a public IPv6 address."""
    servers: tuple[Reached, ...]
    planned: int
    """Servers of the run; 0 while there is no plan."""
    finished: bool
    """The run is over, so no server was looked at."""

    @property
    def reached(self) -> bool:
        """Whether some server was, or there is none to reach."""
        return not self.servers or any(server.path for server in self.servers)


def check(link: JoinLink, folder: Path) -> Check:
    """Visits the run. Raises `BadInputError` when its coordinator cannot be asked."""
    with ExitStack() as stack:
        try:
            journal = Journal(folder)
        except JournalError as error:
            if error.reason != "locked":
                raise BadInputError(str(error)) from error
            # The volunteer of this folder is at work, and its line is what is asked about: look as somebody else.
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="barnraise-netcheck-")))
            journal = Journal(folder)
        stack.callback(journal.close)
        return trio.run(_check, link, NodeState(folder, link, journal))


async def _check(link: JoinLink, state: NodeState) -> Check:
    found = await survey(link, state, LineLimits(), WayOptions(), wait_for_run=False)
    nat, seen = await _ask_stun(stun_servers(link, found))
    planned = sum(len(stage.servers) for stage in found.plan.stages) if found.plan is not None else 0
    return Check(
        run=found.welcome.config.name,
        coordinator_s=found.connect_s,
        nat=nat,
        seen=seen,
        ipv6=_has_public_ipv6(),
        servers=tuple(found.servers),
        planned=planned,
        finished=found.finished,
    )


def stun_servers(link: JoinLink, found: Survey) -> list[tuple[str, int]]:
    """Whom to ask: those that the coordinator names, the coordinator itself, and servers with public addresses.

    One port of each host: a gateway shows what it is only towards different hosts.
    """
    named = found.reach.stun if found.reach is not None else ()
    servers = [address for reached in found.servers for address in _addresses_of(found, reached)]
    hosts: dict[str, int] = {}
    for address in (*named, *link.addresses, *servers):
        host = host_of(address)
        if ":" not in host and not is_local(host):
            hosts.setdefault(host, int(address.rpartition(":")[2]))
    return list(hosts.items())[:STUN_SERVERS_MAX]


def _addresses_of(found: Survey, reached: Reached) -> tuple[str, ...]:
    return found.plan.addresses_of(reached.node) if found.plan is not None else ()


async def _ask_stun(servers: list[tuple[str, int]]) -> tuple[Nat, tuple[Seen, ...]]:
    """One socket asks all; then the first that answered is asked to answer from another port."""
    answers: dict[str, tuple[str, int] | None] = {}
    stranger: bool | None = None
    with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as sock:
        await sock.bind(("0.0.0.0", 0))  # noqa: S104 - which interface leads to a server is the system's business
        port = sock.getsockname()[1]
        asker = StunAsker(sock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asker.run)

            async def ask(host: str, its_port: int) -> None:
                with suppress(OSError):  # a name that does not resolve
                    answers[host] = await asker.ask(host, its_port)

            async with trio.open_nursery() as asking:
                for host, its_port in servers:
                    asking.start_soon(ask, host, its_port)
            for host, its_port in servers:
                if answers.get(host) is not None:
                    stranger = await asker.ask(host, its_port, other_port=True) is not None
                    break
            nursery.cancel_scope.cancel()
    seen = tuple(Seen(f"{host}:{its_port}", answers.get(host)) for host, its_port in servers)
    own = [(host, port) for host in _own_addresses(trio.socket.AF_INET)]
    return classify(own, seen, stranger), seen


def _own_addresses(family: int) -> list[str]:
    entries = [entry for group in psutil.net_if_addrs().values() for entry in group]
    return [entry.address.partition("%")[0] for entry in entries if entry.family == family]


def _has_public_ipv6() -> bool:
    return any(not is_local(host) for host in _own_addresses(trio.socket.AF_INET6))


UDP_WORDS = {
    True: "works",
    False: "does not work",
    None: "was not tested: this run names no server outside this network that could tell",
}


def describe(found: Check) -> str:
    """What a newcomer reads."""
    nat = found.nat
    lines = [
        f"run          {found.run}: its coordinator is reached (TCP, {1000 * found.coordinator_s:.0f} ms)",
        f"NAT          {WORDS[nat.kind]}" + (", behind the carrier's own NAT" if nat.carrier else ""),
        f"UDP          {UDP_WORDS[nat.udp]}" + (f"; from outside this computer is {nat.mapped}" if nat.mapped else ""),
        f"IPv6         {'this computer has a public address' if found.ipv6 else 'no public address'}",
    ]
    if found.finished:
        lines += ["", "The run is finished: nobody is needed any more, and its servers were not looked at."]
        return "\n".join(lines)
    if not found.planned:
        lines += ["", "The run has no plan yet, so there are no servers to look at; try again when it trains."]
        return "\n".join(lines)
    lines += [
        "",
        f"{'server':22} {'path':15} {'linked':>6} {'round trip':>10} {'loss':>6} {'Mbit/s up':>9} {'down':>6}",
    ]
    lines += [_row(server) for server in found.servers]
    if found.planned > len(found.servers):
        lines.append(f"… and {found.planned - len(found.servers)} more servers")
    paths = [server.path for server in found.servers if server.path]
    lines += ["", advice(nat, paths, len(found.servers) - len(paths))]
    return "\n".join(lines)


def _row(server: Reached) -> str:
    # As logs and the run's status page call it, so that two servers of one role can be told apart.
    name = f"stage {server.stage} {server.role} {server.node[:8]}"
    if not server.path:
        return f"{name:22} not reached: {server.problem}"
    figures = server.figures
    trip = up = down = "-"
    if figures is not None:
        trip = f"{1000 * figures.round_trip_s:.1f} ms"
        up, down = (
            f"{8e-6 * rate:.1f}" if rate else "-" for rate in (figures.sent_bytes_per_s, figures.received_bytes_per_s)
        )
    loss = _loss(server)
    lost = "-" if loss is None else f"{100 * loss:.1f} %"
    path = WAYS[server.path].removeprefix("by ")
    return f"{name:22} {path:15} {server.connect_s:>4.1f} s {trip:>10} {lost:>6} {up:>9} {down:>6}"


def _loss(server: Reached) -> float | None:
    """Of the line. Inside one computer there is none: what is lost there, while the speed is measured, are datagrams
    for which a program that had no turn left no room."""
    return None if is_loopback(host_of(server.address)) else server.loss


def to_json(found: Check) -> dict[str, Any]:
    """The same for programs; rates in bytes per second, times in seconds, unknown values null."""
    paths = [server.path for server in found.servers if server.path]
    return {
        "run": found.run,
        "coordinator": {"path": "tcp", "connect_s": found.coordinator_s},
        "nat": {"kind": found.nat.kind, "carrier": found.nat.carrier, "mapped": found.nat.mapped or None},
        "udp": found.nat.udp,
        "ipv6": found.ipv6,
        "stun": [
            {"server": seen.server, "mapped": None if seen.mapped is None else list(seen.mapped)} for seen in found.seen
        ],
        "servers": [
            {
                "node": server.node,
                "stage": server.stage,
                "role": server.role,
                "path": server.path or None,
                "problem": server.problem or None,
                "connect_s": server.connect_s if server.path else None,
                "round_trip_s": None if server.figures is None else server.figures.round_trip_s,
                "loss": _loss(server),
                "up_bytes_per_s": (server.figures.sent_bytes_per_s or None) if server.figures is not None else None,
                "down_bytes_per_s": (
                    (server.figures.received_bytes_per_s or None) if server.figures is not None else None
                ),
            }
            for server in found.servers
        ],
        "planned_servers": found.planned,
        "finished": found.finished,
        "advice": advice(found.nat, paths, len(found.servers) - len(paths)) if found.servers else None,
    }
