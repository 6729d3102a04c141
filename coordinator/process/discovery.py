"""Whom Prometheus should scrape, as it asks for it (`http_sd_configs`): `GET /api/sd`.

The coordinator itself, and every server at the host that its link comes from and the port that its reports name. A
server is listed after it has gone, for as long as the coordinator lives: `up == 0` is how Prometheus sees that it is
down. One whose metrics answer on its own loopback is listed only where that is this machine too.

Volunteers are strangers: whoever could put an address on this list would have the operator's Prometheus ask it. They
are listed only in a run that cannot be reached from outside, whose coordinator listens on loopback alone.
"""

from __future__ import annotations

from typing import Any

from coordinator.live.core import CoordinatorMachine
from coordinator.live.roster import Member
from protocol.base.ids import NodeId
from protocol.drive.addresses import host_port, is_loopback
from protocol.link.reach import host_of

TARGETS_MAX = 1000
"""Servers remembered: several times the largest run that one coordinator seats."""


class Discovery:
    """The list of targets, kept over a server's absence.

    Args:
        own: HOST:PORT of the coordinator's own `/metrics`, or nothing where it is off.
        local: whether the coordinator listens on loopback only.
    """

    def __init__(self, machine: CoordinatorMachine, own: str, *, local: bool) -> None:
        self._machine = machine
        self._own = own
        self._local = local
        self._servers: dict[NodeId, tuple[str, dict[str, str]]] = {}

    def look(self) -> None:
        """Notes where the servers that are linked now answer; called with every setting of the gauges."""
        for member in self._machine.roster.servers():
            target = self._target(member)
            if not target:
                continue
            self._servers.pop(member.peer, None)  # to the end: the newest are kept
            self._servers[member.peer] = (target, self._labels(member))
            for same in [peer for peer, (other, _) in self._servers.items() if other == target and peer != member.peer]:
                del self._servers[same]  # another server's old place: one process answers at one port
        while len(self._servers) > TARGETS_MAX:
            del self._servers[next(iter(self._servers))]

    def targets(self) -> list[dict[str, Any]]:
        """In the form of http_sd: `[{"targets": [HOST:PORT], "labels": {…}}]`."""
        found = [(self._own, {"role": "coordinator"})] if self._own else []
        found += sorted(self._servers.values(), key=lambda pair: pair[0])
        if self._local:
            found += [
                (target, self._labels(member))
                for member in self._machine.roster.volunteers()
                if (target := self._target(member))
            ]
        return [{"targets": [target], "labels": labels} for target, labels in found]

    def _target(self, member: Member) -> str:
        """HOST:PORT of a member's metrics, or nothing."""
        counters = member.report.counters if member.report is not None else {}
        host = host_of(member.address)
        port = counters.get("metrics_port", 0.0)
        if is_loopback(host):
            port = port or counters.get("metrics_loopback_port", 0.0)
        return host_port(host, int(port)) if host and 0 < port < 65536 and port == int(port) else ""

    def _labels(self, member: Member) -> dict[str, str]:
        # No label `run`: series carry their own, and Prometheus would rename those.
        labels: dict[str, str] = {"role": member.role}
        slot = self._machine.placement.table.slot_of(member.peer) if member.role == "server" else None
        if slot is not None:
            labels["place"] = self._machine.placement.table.name(slot)
        return labels
