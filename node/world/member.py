"""Builds a node's machine for the simulated world that measures; found by the entry point `barnraise.world`."""

from __future__ import annotations

import hashlib
from collections import Counter

from node.core import NodeMachine
from node.machine.facts import NodeFacts
from node.server.tickets import KEY_BYTES
from node.world.lanes import Device, Work, WorldLanes
from protocol.base.ids import NodeId
from protocol.run.run import RunConfig
from protocol.trust.membership import Trust
from protocol.world.world import Host


class Members:
    """Makes the machines of one run's nodes.

    Args:
        held_bytes, value_bytes: per parameter on a device, and per value of a graph, as the planners count them.
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary: int,
        run_id: bytes,
        coordinator: NodeId,
        coordinator_key: bytes,
        held_bytes: float,
        value_bytes: float,
    ) -> None:
        self._work = Work(config, vocabulary, held_bytes, value_bytes)
        self._run_id, self._coordinator, self._coordinator_key = run_id, coordinator, coordinator_key

    @property
    def executed(self) -> Counter[int]:
        """Tasks that devices have done, by step."""
        return self._work.executed

    def make(
        self, host: Host, forward_flops_per_s: float, backward_flops_per_s: float, memory_bytes: float
    ) -> tuple[NodeMachine, WorldLanes]:
        """A machine that starts with an empty disk, and the lanes of its device."""
        device = Device(forward_flops_per_s, backward_flops_per_s, memory_bytes)
        # Numbers that a process draws at its start: here from its name and from how often it has started.
        drawn = hashlib.blake2b(f"{host.node} {host.life}".encode(), digest_size=KEY_BYTES).digest()
        facts = NodeFacts(
            role=host.role,
            addresses=(f"{host.node}:1",) if host.role == "server" else (),
            build="simulated",
            tokens_per_s=self._work.tokens_per_s(device),
            memory_bytes=int(memory_bytes),
            incarnation=int.from_bytes(drawn[:6], "big"),
            secret=drawn,
            asks=False,  # the world says of each link that it has ended
        )
        trust = Trust(self._run_id, self._coordinator_key)
        machine = NodeMachine(host.node, facts, self._coordinator, ("coordinator:1",), host.keys, trust)
        return machine, WorldLanes(self._work, device)
