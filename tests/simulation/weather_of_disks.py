"""Faults of disks, folders and lanes: what `weather.py` draws beside kills and broken links."""

from __future__ import annotations

import random
from functools import partial

from coordinator.live.core import CoordinatorMachine
from node.core import NodeMachine
from node.machine.records import ContributionStored, StepCommitted
from protocol.base.machine import Effect, Send
from protocol.messages import Committed, CopyGiven, CopyKept
from tests.simulation.swarm import Swarm
from tests.simulation.world import Host, World

BACK_S = 3.0
"""A buddy that went with its copies is back after this: whoever has the state on its disk has joined long before. So is
a server in whose absence another one is to be back."""

HEARD_S = 0.2
"""By then others have heard what was said, on links of some hundredths of a second."""


def snapshots_of(host: Host) -> list[str]:
    """Snapshot files on a disk."""
    return sorted(name for name in host.files if name.startswith("snapshot-"))


class Disks:
    """What hangs, lies, is lost or full. `Weather` says when."""

    _swarm: Swarm
    _world: World
    _disk_losses: int
    _disk_losses_max: int
    until_s: float

    def _start_soon(self, host: Host, delay_s: float) -> None:
        raise NotImplementedError

    @property
    def _spares_wait(self) -> bool:
        shape = self._swarm.shape
        here = [host for host in self._swarm.servers if not host.gone and not host.hangs_for_good]
        return len(here) > shape.stages * (shape.fronts + shape.backs)

    def _hang(self, rng: random.Random) -> bool:
        """A lane or the disk of a server ends nothing any more, while its links are as good as ever: for good where a
        spare waits, else for a while."""
        here = [host for host in self._swarm.servers if host.machine is not None and not host.hung]
        if not here or rng.random() < 0.5:
            return False
        host, lane = rng.choice(here), rng.choice(["server", "disk", "device"])
        for_good = self._spares_wait and lane != "device"
        self._world.hang(host, lane)
        host.hangs_for_good = for_good
        if not for_good:
            self._world.at(rng.uniform(2.0, 25.0), lambda: self._world.go_on(host, lane))
        return True

    def _crew_hangs(self, rng: random.Random) -> bool:
        """The devices of all volunteers end nothing for a while, and their servers do not compute."""
        for host in self._swarm.volunteers:
            if host.machine is not None and not host.hung:
                self._world.hang(host, "device")
                self._world.at(40.0, partial(self._world.go_on, host, "device"))
        return True

    def _folder_hangs(self, rng: random.Random) -> bool:
        """What all servers write to gives no answer for a while: whoever writes there hangs."""
        if rng.random() < 0.7:
            return False
        seconds = rng.uniform(12.0, 16.0)
        for host in self._swarm.servers:
            if host.machine is not None and not host.hung:
                self._world.hang(host, "server")
                self._world.at(seconds, partial(self._world.go_on, host, "server"))
        return True

    def _folder_full(self, rng: random.Random) -> bool:
        """No checkpoint can be written for a while."""
        if self._world.shared.full:
            return False
        self._world.shared.full = True
        self._world.at(rng.uniform(0.5, 8.0), lambda: setattr(self._world.shared, "full", False))
        return True

    def _folder_unmounted(self, rng: random.Random) -> bool:
        """A spare does not see the folder that all share, until somebody mounts it there."""
        machine = self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        placed = () if plan is None else plan.server_nodes()
        here = [host for host in self._swarm.servers if host.node not in placed and not host.gone and host.mounted]
        if plan is None or not here:
            return False
        host = rng.choice(here)
        self._mount(host, False)
        self._world.at(rng.uniform(20.0, 60.0), partial(self._mount, host))
        return True

    def _mount(self, host: Host, mounted: bool = True) -> None:
        host.mounted = mounted
        if host.lanes is not None:  # it has started
            host.lanes.mounted = mounted

    def _bytes_differ(self, rng: random.Random) -> bool:
        """From here on no file is written twice with the same bytes."""
        salted = self._world.shared.salted
        self._world.shared.salted = True
        return not salted

    def _snapshot_lost(self, rng: random.Random) -> bool:
        """A server dies, and somebody tidies up its folder before it is back."""
        here = [host for host in self._swarm.servers if host.machine is not None and snapshots_of(host)]
        if not here or self._disk_losses >= self._disk_losses_max:
            return False
        self._disk_losses += 1
        host = rng.choice(here)
        self._world.crash(host)
        for name in snapshots_of(host):
            if rng.random() < 0.7:
                del host.files[name]
                host.harmed, host.emptied = True, False
        self._start_soon(host, rng.uniform(0.1, 2.0))
        return True

    def _disk_lied(self, rng: random.Random) -> bool:
        """A server dies, and one of the newest records that its disk had acknowledged is not there."""
        here = [host for host in self._swarm.servers if host.machine is not None and host.records]
        if not here or self._disk_losses >= self._disk_losses_max:
            return False
        host = rng.choice(here)
        self._world.crash(host)
        newest = {type(record): index for index, (record, _) in enumerate(host.records)}
        wanted = self._swarm.scene.loses
        kinds = [kind for kind in newest if not wanted or kind.__name__ in wanted]
        self._start_soon(host, rng.uniform(0.1, 2.0))
        if not kinds:
            return False
        self._disk_losses += 1
        self._world.forget(host, newest[rng.choice(kinds)])
        return True

    def _copy_bent(self, rng: random.Random) -> bool:
        """A server is lost with its disk for ever, and what its buddy has in memory of its shard is not what it was."""
        machine = self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or not self._spares_wait:
            return False
        host = self._world.hosts[rng.choice(plan.server_nodes())]
        buddy = self._world.hosts[plan.buddy_of(host.node) or host.node]
        node = buddy.machine
        if host.gone or not isinstance(node, NodeMachine):
            return False
        stage, shard = plan.stage_of(host.node), plan.shard_of(host.node)
        for place in [place for place in node._roles.copies.named() if place[:2] == (stage, shard)]:
            found = node._roles.copies.piece(*place[:3], 0)
            assert found is not None
            first, *others = buddy.store[found[2].key]
            buddy.store[found[2].key] = (first + 1, *others)
        host.gone = True
        self._world.crash(host, lose_disk=True)
        return True

    def _copy_unfetched(self, rng: random.Random) -> bool:
        """A server hangs until its place is another's. That one asks for the copy, and just then its buddy goes down,
        with all that it has in memory; both are back with their disks whole, and nobody has the place's state but who
        has lost it."""
        world, machine = self._world, self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or not self._spares_wait or any(host.hung for host in self._swarm.servers):
            return False
        host = world.hosts[rng.choice(plan.server_nodes())]
        buddy = plan.buddy_of(host.node)
        if host.machine is None or buddy is None:
            return False
        world.hang(host, "server")

        def dies(dying: Host, moment: str, effect: Effect) -> bool:
            gives = isinstance(effect, Send) and isinstance(effect.message, CopyGiven)
            if dying.node != buddy or moment != "before" or not gives or not self.until_s:
                return False
            world.kill_at = lambda dying, moment, effect: False
            world.at(0.01, lambda: world.crash(host))
            self._start_soon(host, 0.02)
            self._start_soon(dying, rng.uniform(BACK_S, BACK_S + 1.0))
            return True

        world.kill_at = dies
        return True

    def _copy_ahead(self, rng: random.Random) -> bool:
        """A server loses its disk just when its buddy has its newest version, which another server has not made."""
        world, machine = self._world, self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or self._disk_losses >= self._disk_losses_max:
            return False

        def dies(dying: Host, moment: str, effect: Effect) -> bool:
            said = effect.message if isinstance(effect, Send) else None
            if not isinstance(said, CopyKept) or moment != "after" or not self.until_s:
                return False
            assert isinstance(effect, Send)
            host, others = world.hosts[effect.peer], [world.hosts[node].machine for node in plan.server_nodes()]
            versions = [node.server.shard.version for node in others if isinstance(node, NodeMachine) and node.server]
            if host.machine is None or min(versions, default=said.version) >= said.version:
                return False
            world.kill_at = lambda dying, moment, effect: False
            self._disk_losses += 1
            world.at(0.0, lambda: world.crash(host, lose_disk=True))
            self._start_soon(host, 0.05)
            return False

        world.kill_at = dies
        return True

    def _commit_lost(self, rng: random.Random) -> bool:
        """A server that has just committed a step dies, and its disk has lost that, or a part that counts there. A
        fellow of its stage dies, too, before it has committed the step, which so stays open until both are back."""
        world, machine = self._world, self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or self._disk_losses >= self._disk_losses_max:
            return False
        kind = rng.choice((StepCommitted, ContributionStored))

        def dies(dying: Host, moment: str, effect: Effect) -> bool:
            said, stage = effect.message if isinstance(effect, Send) else None, plan.stage_of(dying.node)
            if not isinstance(said, Committed) or stage is None or moment != "after" or not self.until_s:
                return False
            fellows = [world.hosts[each.node] for each in plan.stages[stage].servers if each.node != dying.node]
            machines = [(host, host.machine) for host in fellows if isinstance(host.machine, NodeMachine)]
            behind = [host for host, node in machines if node.server and node.server.shard.version <= said.step]
            if not behind:
                return False
            world.kill_at = lambda dying, moment, effect: False
            world.at(0.0, lambda: world.crash(behind[0]))
            world.at(HEARD_S, lambda: self._forget(dying, kind, said.step))
            self._start_soon(behind[0], BACK_S)
            self._start_soon(dying, HEARD_S + 0.1)
            return False

        world.kill_at = dies
        return True

    def _forget(self, host: Host, kind: type[StepCommitted | ContributionStored], step: int) -> None:
        """The server dies, and its disk has lost its newest record of that kind and step."""
        self._world.crash(host)
        found = [n for n, (r, _) in enumerate(host.records) if isinstance(r, kind) and r.step == step]
        if found:
            self._disk_losses += 1
            self._world.forget(host, found[-1])

    def _snapshot_bent(self, rng: random.Random) -> bool:
        """A server dies, and its disk gives back its snapshots with other numbers in them."""
        here = [host for host in self._swarm.servers if host.machine is not None and snapshots_of(host)]
        if not here or self._disk_losses >= self._disk_losses_max:
            return False
        self._disk_losses += 1
        host = rng.choice(here)
        self._world.crash(host)
        host.harmed, host.emptied = True, False
        for name in snapshots_of(host):
            state = host.files[name]
            host.files[name] = state._replace(weights=(state.weights[0] + 1, *state.weights[1:]))
        self._start_soon(host, rng.uniform(0.1, 2.0))
        return True
