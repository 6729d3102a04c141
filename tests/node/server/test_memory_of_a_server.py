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


@pytest.mark.parametrize("free_gb", [0.0, 1.0, 100.0])
def test_a_server_says_what_its_shard_takes_before_any_of_it_is_taken(free_gb: float) -> None:
    """And alerts where that is more than was free: who is ended for want of memory says nothing any more."""
    out = Outbox(NodeId("b1"), count(1000))
    server = ServerMachine(
        NodeId("b1"), make_config(), 259, make_plan(), out, [], NodeId("c"), secret=bytes(KEY_BYTES), incarnation=1,
        memory_bytes=int(free_gb * 1e9),
    )  # fmt: skip
    server.start(0.0)
    (set_up,) = Effects(out).jobs(SetUpServer)
    server.computed(set_up, 133_000_000, 1.0)
    said = [effect.fields["takes_gb"] for effect in Effects(out).all if isinstance(effect, Log)]
    assert len(said) == 1 and 4.0 < said[0] < 6.5
    assert ("more servers a stage" in server.alert()) == (free_gb == 1.0)
