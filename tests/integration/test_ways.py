"""Real processes that no TCP connection leads to: they punch, or go through a relay, and the run trains."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest

from tests.integration.swarm import RUN, Daemon, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NOWHERE = ("--announce", "127.0.0.1:1")
"""Where nobody listens: whoever dials it is refused at once."""


def connections(daemon: Daemon) -> dict[str, int]:
    """Open links by path, without those that are 0."""
    found = re.findall(r'^barnraise_transport_connections{path="(\w+)"} (\S+)$', daemon.metrics(), re.MULTILINE)
    return {path: int(float(value)) for path, value in found if float(value)}


def has_punched(daemon: Daemon) -> bool:
    return connections(daemon).get("quic", 0) >= 3


def is_linked_by_a_relay(daemon: Daemon) -> bool:
    return connections(daemon) == {"tcp": 3, "relay": 1}


def is_relayed(daemon: Daemon) -> bool:
    return connections(daemon).get("relay") == 1


def relay_sessions(daemon: Daemon) -> int:
    (found,) = re.findall(r"^barnraise_server_relay_sessions (\S+)$", daemon.metrics(), re.MULTILINE)
    return int(float(found))


def server(swarm: Swarm, number: int, *options: str) -> Daemon:
    daemon = swarm.node(f"server-{number}", "server", swarm.links["server"], "--listen", "127.0.0.1:0", *options)
    swarm.servers.append(daemon)
    return daemon


def test_servers_that_nobody_can_dial_punch_and_train(tmp_path: Path) -> None:
    """Four servers and a volunteer, one computer, no address: every link between them is QUIC on a punched socket."""
    with Swarm(tmp_path, RUN, server_count=0) as swarm:
        for number in range(4):
            server(swarm, number, *NOWHERE)
        volunteer = swarm.node("volunteer", "join", swarm.links["volunteer"], "--yes", "--always", "--no-benchmark")
        swarm.moves_on()
        for daemon in swarm.servers:
            eventually(partial(has_punched, daemon), f"{daemon.name} punched")
            assert set(connections(daemon)) == {"tcp", "quic"}
        eventually(lambda: connections(volunteer) == {"tcp": 1, "quic": 2}, "the volunteer's links")
        swarm.moves_on()


@pytest.mark.long
def test_without_udp_they_go_through_a_relay_and_then_through_the_next(tmp_path: Path) -> None:
    """Two servers can be dialled, two cannot; these two are linked by one of the others. That one is killed."""
    with Swarm(tmp_path, RUN, server_count=0) as swarm:
        relays = [server(swarm, number, "--no-punch") for number in range(2)]
        hidden = [server(swarm, number, "--no-punch", *NOWHERE) for number in (2, 3)]
        swarm.moves_on()
        for daemon in hidden:
            eventually(partial(is_linked_by_a_relay, daemon), f"{daemon.name} relayed")
        sessions = [relay_sessions(relay) for relay in relays]
        assert sorted(sessions) == [0, 1], sessions
        used = sessions.index(1)
        swarm.kill(relays[used])
        began = time.monotonic()
        eventually(lambda: relay_sessions(relays[1 - used]) == 1, "the other relay to carry")
        for daemon in hidden:
            eventually(partial(is_relayed, daemon), f"{daemon.name} relayed again")
        assert time.monotonic() - began < 30.0  # it takes one or two seconds; machines are busy
        swarm.again(relays[used])
        swarm.moves_on()
