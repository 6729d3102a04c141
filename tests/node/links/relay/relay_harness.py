"""Stations on loopback of which some relay; every task, socket and link ends with the block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from node.links.relay.relay_desk import RelayLimits
from node.links.relay.relayed import Proof, RelayServer
from tests.protocol.drive.harness import Station, admit_all, stations
from tests.protocol.samples import RUN_ID


def proof_of(station: Station, role: str = "server") -> Proof:
    return Proof(station.identity, RUN_ID, role.encode, admit_all)


class Counter:
    """Keeps what was counted."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = {}

    def __call__(self, metric: str, value: float, labels: dict[str, str]) -> None:
        key = metric.removeprefix("barnraise_server_relay_"), labels.get("reason", "")
        if metric.endswith("_total"):
            value += self.values.get(key, 0.0)
        self.values[key] = value


@asynccontextmanager
async def relayed_stations(
    *roles: str, limits: RelayLimits | None = None
) -> AsyncIterator[tuple[list[Station], RelayServer, Counter]]:
    """Stations of these roles; the first one relays."""
    async with stations(*roles) as made:
        counter = Counter()
        server = RelayServer(
            proof_of(made[0], roles[0]), limits or RelayLimits(), rejected=made[0].events.on_rejected, count=counter
        )
        made[0].transport.guests = server
        yield made, server, counter
