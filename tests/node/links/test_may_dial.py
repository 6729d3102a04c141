"""A volunteer's computer connects to no neighbour of its owner because a coordinator says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.links.may_dial import Neighbourhood
from protocol.base.ids import NodeId

COORDINATOR, SERVER = NodeId("c"), NodeId("s")
EVERYWHERE = ["8.8.8.8", "2606:4700::1", "192.168.1.1", "10.0.0.5", "fd00::1", "169.254.169.254", "fe80::1",
              "127.0.0.1", "::1", "::ffff:127.0.0.1", "0.0.0.0", "224.0.0.1"]  # fmt: skip
PUBLIC, PRIVATE = EVERYWHERE[:2], EVERYWHERE[2:5]


@pytest.mark.parametrize(
    ("coordinator_at", "lan", "allowed"),
    [
        (["8.8.4.4"], False, PUBLIC),
        (["8.8.4.4", "192.168.1.9"], False, PUBLIC),  # whoever makes the link may put a private address into it
        (["8.8.4.4", "127.0.0.1"], False, PUBLIC),
        ([], False, PUBLIC),
        (["8.8.4.4"], True, PUBLIC + PRIVATE),
        (["192.168.1.9", "fd00::9"], False, PUBLIC + PRIVATE),
        (["127.0.0.1", "::1"], False, EVERYWHERE),
    ],
)
def test_where_a_volunteer_connects_to(coordinator_at: list[str], lan: bool, allowed: list[str]) -> None:
    """Public addresses; private ones with a private coordinator or `--lan`; its own with a coordinator on it."""
    transport: Any = SimpleNamespace(may_dial=None)
    Neighbourhood(transport, COORDINATOR, lan=lan)
    assert all(transport.may_dial(COORDINATOR, host) for host in coordinator_at)
    assert [host for host in EVERYWHERE if transport.may_dial(SERVER, host)] == allowed
