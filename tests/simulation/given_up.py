"""Judges whether servers lose their places with reason: nobody does who is well and whom the others reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.live.gray import AGAIN_S
from coordinator.live.slots import COPIED_SHARE
from protocol.base.ids import NodeId
from protocol.base.machine import Effect, Log
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from tests.simulation.violation import expect
from tests.simulation.world import Host, World

COORDINATOR = NodeId("coordinator")
NEVER = (-9.0, -9.0)
SURELY_LINKED_S = 12.0
"""A server that runs for so long, on links that are as old, has been in its fellows' reports several times."""


@dataclass(frozen=True)
class _Decision:
    """What was so when the coordinator gave somebody up because it hangs. The plan that says so may come much later:
    where a shard is lost all are asked what they can read first, and whoever hung may go on meanwhile."""

    life: int
    """Of the coordinator; a new one decides anew."""
    hung_s: float
    went_on: frozenset[NodeId]


class GivenUp:
    """One for each run; it hears what the coordinator says when it gives somebody up, and the plans that follow."""

    def __init__(self, config: RunConfig) -> None:
        share = COPIED_SHARE if config.checkpoint.buddy == "always" else 1.0
        self._hangs_s = 0.9 * share * config.limits.server_gone_s
        self._decided: dict[NodeId, _Decision] = {}

    def said(self, world: World, host: Host, effect: Effect) -> None:
        """Notes what is so at the moment of a decision."""
        if not (isinstance(effect, Log) and effect.event == "server given up" and "stalled_s" in effect.fields):
            return
        if host.node != COORDINATOR:
            return
        node = NodeId(effect.fields["node"])
        hung_s = world.hung_s(world.hosts[node])
        # Who hangs only now, or did a moment ago, has gone on for long enough beside it to say so.
        soon_s = world.now - hung_s + self._hangs_s
        went_on = [each for each in world.hosts.values() if _began_to_hang(each) >= soon_s]
        went_on += [each for each in world.hosts.values() if _goes_on(world, each)]
        self._decided[node] = _Decision(host.life, hung_s, frozenset(each.node for each in went_on))

    def replaced(self, world: World, before: Sequence[NodeId], plan: Plan) -> None:
        """Nobody loses a place who is well and whom the others reach, whatever became of the coordinator's link."""
        decided, self._decided = self._decided, {}
        here = plan.server_nodes()
        for host in [world.hosts[node] for node in before if node not in here]:
            if host.machine is None or host.paused or world.now - host.started_at < SURELY_LINKED_S:
                continue
            then = decided.get(host.node)
            if then is None or then.life != world.hosts[COORDINATOR].life:
                then = _Decision(0, 0.0, frozenset())
            goes_on = then.went_on.union(node for node in (*before, *here) if _goes_on(world, world.hosts[node]))
            fellows = sum(node in goes_on for node in before if node != host.node)
            able = all(node in goes_on for node in here if node not in before)
            hangs = max(world.hung_s(host), then.hung_s) >= self._hangs_s
            if hangs and (2 * fellows >= len(before) - 1 or able):
                continue
            steady = all(world.steady(host.node, node) for node in before if node != host.node)
            told = all(world.steady(node, COORDINATOR) for node in before if node != host.node)
            expect(not (steady and told), "L1", f"{host.node} is given up, though its fellows reach it")


def _began_to_hang(host: Host) -> float:
    """When its server lane did so last."""
    return host.hung.get("server", host.hung_spans.get("server", NEVER)[0])


def _goes_on(world: World, host: Host) -> bool:
    """Whether its server lane has done what it is given for as long as a coordinator waits for the hanging one then."""
    return "server" not in host.hung and world.now - host.hung_spans.get("server", NEVER)[1] > AGAIN_S
