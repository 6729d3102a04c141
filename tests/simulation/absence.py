"""Judges a run whose coordinator is away: it does everything but admit newcomers, whoever has restarted (L1)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from protocol.base.ids import NodeId
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from tests.simulation.violation import expect
from tests.simulation.world import Host, World

RESUMES_S = 8.0
"""Who starts waits five seconds for the coordinator, then goes by its kept plan and dials its fellows."""


class Absence:
    """Watches for steps while the coordinator is down.

    Args:
        begun: whether a host's ledgers have begun under these plan's: one whose have not waits, and rightly so.
    """

    def __init__(self, config: RunConfig, coordinator: NodeId, begun: Callable[[Host, Plan], bool]) -> None:
        self._coordinator = coordinator
        self._begun = begun
        self._servers_compute = config.stages.collocated != "never"
        self._bound_s = 3 * (config.limits.lease_s + 0.5) + RESUMES_S
        """A step of an undisturbed world takes three leases and slowest tasks at most (D7)."""
        self._quiet_since = 0.0
        """When a step was closed last, or something stood in its way."""

    def closed(self, now: float) -> None:
        """A step is over."""
        self._quiet_since = now

    def performed(self, world: World, plan: Plan | None) -> None:
        if plan is None or plan.paused or plan.held or not self._servers_compute or not self._can_train(world, plan):
            self._quiet_since = world.now
            return
        quiet_s = world.now - self._quiet_since
        expect(quiet_s <= self._bound_s, "L1", f"no step for {quiet_s:.0f} s without the coordinator")

    def _can_train(self, world: World, plan: Plan) -> bool:
        """Whether it is the coordinator alone who is missing."""
        if world.hosts[self._coordinator].machine is not None or world.blocked:
            return False
        servers = [world.hosts[node] for node in plan.server_nodes()]
        others = [host for host in world.hosts.values() if host.role == "volunteer" and host.machine is not None]
        if not all(_is_well(host) for host in (*servers, *others)):
            return False
        if any(host.machine is None or host.harmed or not self._begun(host, plan) for host in servers):
            return False
        if any(host.address not in plan.addresses_of(host.node) for host in servers):
            return False
        links = [world.links.get((min(a.node, b.node), max(a.node, b.node))) for a, b in combinations(servers, 2)]
        return not any(link is not None and (link.silent or link.slow_s) for link in links)


def _is_well(host: Host) -> bool:
    return not host.paused and not host.hung and not host.lies and host.slowness == host.disk_slowness == 1.0
