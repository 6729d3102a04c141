"""What a server says of the memory that its shard takes."""

from __future__ import annotations

from itertools import count

import pytest

from node.machine.jobs import SetUpServer
from node.machine.outbox import Outbox
from node.server.server import ServerMachine
from node.server.tickets import KEY_BYTES
from protocol.base.ids import NodeId
from protocol.base.machine import Log
from tests.node.setting import Effects, make_config, make_plan


def told(free_gb: float, computes: bool = False) -> tuple[ServerMachine, Log]:
    """A server with so much free memory, and what it logs when it knows its shard of 133 M parameters."""
    out = Outbox(NodeId("b1"), count(1000))
    server = ServerMachine(
        NodeId("b1"), make_config(), 259, make_plan(), out, [], NodeId("c"), secret=bytes(KEY_BYTES), incarnation=1,
        memory_bytes=int(free_gb * 1e9), computes=computes,
    )  # fmt: skip
    server.start(0.0)
    (set_up,) = Effects(out).jobs(SetUpServer)
    server.computed(set_up, 133_000_000, 1.0)
    (said,) = (effect for effect in Effects(out).all if isinstance(effect, Log))
    return server, said


@pytest.mark.parametrize("free_gb", [0.0, 1.0, 100.0])
def test_a_server_says_what_its_shard_takes_before_any_of_it_is_taken(free_gb: float) -> None:
    """And alerts where that is more than was free: who is ended for want of memory says nothing any more."""
    server, said = told(free_gb)
    assert 4.0 < said.fields["takes_gb"] < 6.5 and said.fields["own_computing_takes_gb"] == 0
    assert ("more servers a stage" in server.alert()) == (free_gb == 1.0)


@pytest.mark.parametrize("free_gb", [0.0, 1.0, 8.0, 100.0])
def test_a_server_that_computes_says_what_that_takes_of_the_whole_stage(free_gb: float) -> None:
    """A server of two with 242 M parameters of a stage of 484 M took 14 GB where 9.1 were named: half as much again."""
    server, said = told(free_gb, computes=True)
    assert 6.9 < said.fields["own_computing_takes_gb"] < 7.0, "26 bytes for each of a stage's 266 M parameters"
    assert ("--no-compute" in server.alert()) == (free_gb == 8.0)
    assert ("more servers a stage" in server.alert()) == (free_gb == 1.0)
