"""Faults for the simulated world: each seed switches some kinds on, for a while; then all is calm (swarm testing).

After the calm begins, everything that is down comes back, and the run must end in bounded time (L1).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import Adopt, Ban, ChangeRun, PauseRun
from coordinator.live.records import PlanRow, StepRow
from protocol.base.ids import NodeId
from protocol.base.machine import AddressesChanged, Effect, LinkMoved, Ordered, Received, Send, Told
from protocol.messages import Committed, PlanChanged, StepOpened
from protocol.run.changes import make_change
from tests.simulation.host import LATENCY_TIMES, Link
from tests.simulation.swarm import COORDINATOR, PLAN, Swarm
from tests.simulation.weather_of_disks import Disks
from tests.simulation.world import Host

KINDS = (
    "volunteer_kill",
    "volunteer_new",
    "link_cut",
    "link_silent",
    "server_kill",
    "server_disk_loss",
    "coordinator_kill",
    "slow_host",
    "latency_spike",
    "all_volunteers_kill",
    "power_cut",
    "link_slow",
    "dial_twice",
    "pause",
    "slow_disk",
    "checkpoint_loss",
    "old_coordinator",
    "liar",
    "server_lost",
    "folder_full",
    "bytes_differ",
    "snapshot_lost",
    "coordinator_away",
    "coordinator_cut",
    "hang",
    "folder_hangs",
    "disk_lied",
    "device_fails",
    "drained",
    "address_moves",
    "server_moved",
    "banned",
)


ASKED_FOR = (
    "hop_kill",
    "unsaid_commit",
    "late_words",
    "crew_hangs",
    "snapshot_bent",
    "orders",
    "database_mislaid",
    "database_old",
    "copy_bent",
    "copy_unfetched",
    "copy_ahead",
    "commit_lost",
    "late_for_final",
    "folder_unmounted",
)
"""Kinds that only a scene brings: no seed draws them. An old database is among them until all mutants have scenes that
catch them with it in the list, where it changes what every seed draws; seed 1003, which stood still with it, ends well.
"""
MICROBATCHES_MOST = 6
"""That an operator makes of a step's two to six."""
OPERATOR_S = 15.0
"""How often somebody looks at the status of a run whose database was put back."""
BANNED_MAX = 3
"""Computers that the operator of one run loses patience with."""
FAILURES_MAX = 2
"""Of one device: after a third in a row it rests for a good part of what a step may take in calm."""
SEEN_GONE_S = (7.0, 9.0)
"""After a link's `silent_s` everybody knows who is gone; before `SERVER_GONE_S` its place is still its own."""
LATE_S = (2.0, 8.0)
"""How long words take that arrive after the run has gone back, which takes some seconds: the servers look first."""


class Weather(Disks):
    """Draws faults for a swarm until `until_s`."""

    def __init__(
        self, swarm: Swarm, kinds: tuple[str, ...], mean_gap_s: float, until_s: float, disk_losses_max: int
    ) -> None:
        self._swarm = swarm
        self._world = swarm.world
        self._rng = swarm.world.rng
        self._kinds = kinds
        self._mean_gap_s = mean_gap_s
        self.until_s = until_s
        self.happened: dict[str, int] = {}
        self._disk_losses = 0
        self._disk_losses_max = disk_losses_max
        self._long_pauses = self._moves = self._bans = 0
        self._ends_pauses = self._losses_of_database = self._final_missed = False
        self._next()

    @staticmethod
    def draw(swarm: Swarm) -> Weather:
        """A random subset of the kinds, and what the swarm's scene asks for."""
        rng, scene = swarm.world.rng, swarm.scene
        kinds = tuple(kind for kind in KINDS if rng.random() < 0.4 or kind in scene.always) or ("volunteer_kill",)
        kinds += tuple(kind for kind in ASKED_FOR if kind in scene.always)
        mean_gap_s, until_s = rng.uniform(*scene.gap_s), rng.uniform(*scene.until_s)
        return Weather(swarm, scene.only or kinds, mean_gap_s, until_s, scene.disk_losses_max)

    def calm(self) -> None:
        """All that is down comes back, all that is slow is quick again, and who lies has gone."""
        self.until_s = 0.0
        world = self._world
        world.latency_s = 0.02
        world.shared.full = False
        for host in self._swarm.servers:
            self._mount(host)
        world.blocked.clear()
        for host in world.hosts.values():
            host.slowness = host.disk_slowness = 1.0
            world.resume(host)
            for lane in () if host.hangs_for_good else list(host.hung):
                world.go_on(host, lane)
            if host.lies:
                world.crash(host)
            elif not host.gone:
                self._start_soon(host, 0.1)
        for link in list(world.links.values()):
            link.slow_s.clear()
            # One that was opened in a spike keeps its latency: with most of them, each step would take half a minute.
            link.latency_s = min(link.latency_s, max(LATENCY_TIMES) * world.latency_s)
            if link.silent:
                world.cut(link)
        self._ends_pauses = "orders" in self._kinds
        self._let_go_on()
        if not any(host.machine is not None and not host.lies for host in self._swarm.volunteers):
            self._swarm.add_volunteer()

    def _next(self) -> None:
        self._world.at(self._rng.expovariate(1.0 / self._mean_gap_s), self._strike)

    def _strike(self) -> None:
        if self._world.now >= self.until_s or self._swarm.finished:
            return
        kind = self._rng.choice(self._kinds)
        strike: Callable[[random.Random], bool] = getattr(self, f"_{kind}")
        if strike(self._rng):
            self.happened[kind] = self.happened.get(kind, 0) + 1
        self._next()

    # ---- the kinds -----------------------------------------------------------------------------------------------

    def _orders(self, rng: random.Random) -> bool:
        """The operator pauses the run, lets it go on, or gives one of its keys another value."""
        machine = self._swarm.coordinator.machine
        if not isinstance(machine, CoordinatorMachine) or machine.placement.plan is None or machine.finished:
            return False
        placement, config = machine.placement, machine.config
        paused = rng.random() < 0.5
        steps = rng.randint(max(2, config.steps - 3), config.steps)
        # What is added up on a grid fits for as many as the run's file says.
        most = config.batch.microbatches if config.wire.gradients == "gi" else MICROBATCHES_MOST
        key, value = rng.choice(
            (
                ("", ""),
                ("steps", str(steps)),
                ("checkpoint.every_steps", str(rng.randint(0, 3))),
                ("optimizer.learning_rate", repr(rng.uniform(1e-4, 1e-2))),
                ("stages.collocated", rng.choice(("always", "when_empty"))),
                ("batch.microbatches", str(rng.randint(1, most))),
                ("limits.snapshot_steps", str(rng.randint(1, 4))),
            )
        )
        if not key:
            self._world.feed(self._swarm.coordinator, Ordered(PauseRun(paused)))
        elif key != "steps" or steps > machine.history.newest_step + 1 + config.batch.delay:
            change = make_change(config, placement.wishes.changes, key, value)
            self._world.feed(self._swarm.coordinator, Ordered(ChangeRun(change)))
        return True

    def _let_go_on(self) -> None:
        """Nobody is left who would end a pause."""
        machine = self._swarm.coordinator.machine
        if not self._ends_pauses or self._swarm.finished:
            return
        if isinstance(machine, CoordinatorMachine) and machine.placement.wishes.paused:
            self._world.feed(self._swarm.coordinator, Ordered(PauseRun(False)))
        self._world.at(1.0, self._let_go_on)

    def _volunteer_kill(self, rng: random.Random) -> bool:
        return self._kill(rng, self._swarm.volunteers, rng.uniform(0.1, 4.0))

    def _all_volunteers_kill(self, rng: random.Random) -> bool:
        if rng.random() < 0.6:
            return False
        for host in self._swarm.volunteers:
            if host.machine is not None:
                self._world.crash(host)
                self._start_soon(host, rng.uniform(1.0, 6.0))
        return True

    def _volunteer_new(self, rng: random.Random) -> bool:
        if len(self._swarm.volunteers) >= 12:
            return False
        self._swarm.add_volunteer()
        return True

    def _server_kill(self, rng: random.Random) -> bool:
        return self._kill(rng, self._swarm.servers, rng.uniform(0.05, 3.0))

    def _hop_kill(self, rng: random.Random) -> bool:
        """Both ends of a hop at once: a back server and the front server after it, with all that was between them."""
        machine = self._swarm.coordinator.machine
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or len(plan.stages) < 2:
            return False
        stage = rng.randrange(len(plan.stages) - 1)
        back, front = rng.choice(plan.stages[stage].backs), rng.choice(plan.stages[stage + 1].fronts)
        for host in (self._world.hosts[back.node], self._world.hosts[front.node]):
            self._world.crash(host, last_words=False)
            self._start_soon(host, rng.uniform(0.1, 0.5))
        return True

    def _late_for_final(self, rng: random.Random) -> bool:
        """A back server of stage 0 is down as a step is opened that only validates; once in a run."""
        world, machine, swarm = self._world, self._swarm.coordinator.machine, self._swarm
        plan = machine.placement.plan if isinstance(machine, CoordinatorMachine) else None
        if plan is None or self._final_missed:
            return False

        def dies(host: Host, moment: str, effect: Effect) -> bool:
            said = effect.message if isinstance(effect, Send) else None
            if not isinstance(said, StepOpened) or said.step < swarm.config.steps or moment != "before":
                return False
            world.kill_at = lambda host, moment, effect: False
            back = world.hosts[rng.choice(plan.stages[0].backs).node]
            if back.node != host.node:
                self._final_missed = True
                world.crash(back)
                self._start_soon(back, rng.uniform(0.3, 1.0))
            return False

        world.kill_at = dies
        return True

    def _unsaid_commit(self, rng: random.Random) -> bool:
        """The next server that has a step's update on its disk dies before it can say so to the ledger."""
        world = self._world

        def dies(host: Host, moment: str, effect: Effect) -> bool:
            said = isinstance(effect, Send) and isinstance(effect.message, Committed) and effect.peer != host.node
            if not said or moment != "before":
                return False
            world.kill_at = lambda host, moment, effect: False
            self._start_soon(host, rng.uniform(0.1, 0.5))
            return True

        world.kill_at = dies
        return True

    def _server_disk_loss(self, rng: random.Random) -> bool:
        if self._disk_losses >= self._disk_losses_max:
            return False
        self._disk_losses += 1
        host = rng.choice(self._swarm.servers)
        if host.machine is None:
            return False
        self._world.crash(host, lose_disk=True)
        self._start_soon(host, rng.uniform(0.1, 2.0))
        return True

    def _coordinator_kill(self, rng: random.Random) -> bool:
        return self._kill(rng, [self._swarm.coordinator], rng.uniform(0.05, 4.0))

    def _power_cut(self, rng: random.Random) -> bool:
        """Every server at once."""
        if rng.random() < 0.8:
            return False
        for host in self._swarm.servers:
            if host.machine is not None:
                self._world.crash(host)
                self._start_soon(host, rng.uniform(0.1, 2.0))
        return True

    def _link_cut(self, rng: random.Random) -> bool:
        links = list(self._world.links.values())
        if links:
            self._world.cut(rng.choice(links))
        return bool(links)

    def _link_silent(self, rng: random.Random) -> bool:
        links = [link for link in self._world.links.values() if not link.silent]
        if links:
            rng.choice(links).silent = True
        return bool(links)

    def _link_slow(self, rng: random.Random) -> bool:
        """One direction of a link takes long: what goes round by others arrives before."""
        links = list(self._world.links.values())
        if not links:
            return False
        link = rng.choice(links)
        sender = rng.choice([link.a, link.b])
        link.slow_s[sender] = late_s = rng.choice([0.1, 0.5, 2.0, 5.0])
        self._world.at(rng.uniform(0.5, 8.0), lambda: self._quick_again(link, sender, late_s))
        return True

    def _quick_again(self, link: Link, sender: NodeId, late_s: float) -> None:
        """By another way, where it took so long that the other end looked for one."""
        link.slow_s.pop(sender, None)
        host = self._world.hosts[link.other(sender)]
        if late_s > 1.0 and link.alive and not link.silent and host.role != "coordinator" and host.machine is not None:
            self._world.feed(host, LinkMoved(sender, late_s))

    def _late_words(self, rng: random.Random) -> bool:
        """A disk is lost while what servers say to each other takes seconds: it arrives after the run has gone back."""
        hosts = [host for host in self._swarm.servers if host.machine is not None]
        if self._disk_losses >= self._disk_losses_max or not hosts:
            return False
        self._disk_losses += 1
        servers = dict.fromkeys(host.node for host in hosts)
        links = [link for link in self._world.links.values() if link.a in servers and link.b in servers]
        for link in links:
            link.slow_s = {node: rng.uniform(*LATE_S) for node in (link.a, link.b)}
        host = rng.choice(hosts)

        def lose() -> None:
            for link in links:
                link.slow_s.clear()
            self._world.crash(host, lose_disk=True)
            self._start_soon(host, 0.05)

        self._world.at(rng.uniform(0.1, 0.5), lose)
        return True

    def _dial_twice(self, rng: random.Random) -> bool:
        """An attempt that was thought lost comes through: the open link is replaced."""
        links = [link for link in self._world.links.values() if "coordinator" not in (link.a, link.b)]
        if not links:
            return False
        link = rng.choice(links)
        host, there = self._world.hosts[link.a], (self._world.hosts[link.b].address,)
        self._world.dial(host, link.b, there)
        if rng.random() < 0.5:
            self._world.dial(host, link.b, there)
        return True

    def _pause(self, rng: random.Random) -> bool:
        """A process is stopped, or a virtual machine suspended, and later goes on as if nothing had been."""
        host = rng.choice([*self._swarm.volunteers, *self._swarm.servers, self._swarm.coordinator])
        long = rng.random() < 0.3 and self._long_pauses < 2
        self._long_pauses += long
        self._world.pause(host, rng.uniform(5.0, 60.0) if long else rng.uniform(0.1, 7.0), rng.random() < 0.5)
        return True

    def _slow_disk(self, rng: random.Random) -> bool:
        host = rng.choice([*self._swarm.servers, self._swarm.coordinator])
        host.disk_slowness = rng.choice([20.0, 100.0, 400.0])
        self._world.at(rng.uniform(0.5, 5.0), lambda: setattr(host, "disk_slowness", 1.0))
        return True

    def _checkpoint_loss(self, rng: random.Random) -> bool:
        """The checkpoint folder loses a file: that checkpoint does not verify any more."""
        files = sorted(name for name in self._world.shared if not name.startswith("manifest"))
        if files:
            del self._world.shared[rng.choice(files)]
            self._world.shared.harmed = True
        return bool(files)

    def _old_coordinator(self, rng: random.Random) -> bool:
        """A coordinator that was thought dead still tells its plan: nobody may follow it."""
        plans = [record.plan for record, _ in self._swarm.coordinator.records if isinstance(record, PlanRow)]
        # One that has never had a plan, or lost it with its disk, has no way to tell: it believes whom it is linked to.
        hosts = [
            host
            for host in (*self._swarm.servers, *self._swarm.volunteers)
            if host.machine is not None and getattr(host.machine, "plan", None) is not None
        ]
        if len(plans) < 2 or not hosts:
            return False
        plan = rng.choice(plans[:-1])
        for host in hosts:
            stage = plan.stage_of(host.node)
            message = PlanChanged(plan=plan, stage=0 if stage is None else stage, reason="an old coordinator")
            if (min(host.node, COORDINATOR), max(host.node, COORDINATOR)) in self._world.links:
                self._world.feed(host, Received(COORDINATOR, message))
        return True

    def _device_fails(self, rng: random.Random) -> bool:
        """The next jobs of a device fail, and leave behind what they had done so far."""
        hosts = [host for host in (*self._swarm.volunteers, *self._swarm.servers) if host.machine is not None]
        if not hosts:
            return False
        host = rng.choice(hosts)
        if host.failures >= FAILURES_MAX:
            return False
        count = rng.randint(1, FAILURES_MAX - host.failures)
        host.failures_due, host.failures = host.failures_due + count, host.failures + count
        host.fails_for = rng.choice(["a fault of the device", "a fault of the device", "out of memory"])
        return True

    def _drained(self, rng: random.Random) -> bool:
        """An owner lets a volunteer finish and go, and is back after a while."""
        hosts = [host for host in self._swarm.volunteers if host.machine is not None and not host.lies]
        if len(hosts) < 2:
            return False
        host = rng.choice(hosts)
        self._world.feed(host, Told("drain"))
        life = host.life

        def back() -> None:
            if host.machine is None and host.life >= life:
                self._start_soon(host, rng.uniform(0.1, 2.0))
            else:
                self._world.at(5.0, back)

        self._world.at(rng.uniform(3.0, 10.0), back)
        return True

    def _address_moves(self, rng: random.Random) -> bool:
        """A server has another address from here on: its links end, and nobody finds it where it was."""
        hosts = [host for host in self._swarm.servers if host.machine is not None and not host.paused]
        if not hosts:
            return False
        host = rng.choice(hosts)
        host.moved += 1
        host.address = f"{host.node}:{1 + host.moved}"
        for link in list(self._world.links.values()):
            if host.node in (link.a, link.b):
                self._world.cut(link)
        self._world.feed(host, AddressesChanged((host.address,)))
        return True

    def _server_moved(self, rng: random.Random) -> bool:
        """A server's disk is put into another computer, under another name; the old one is scrap."""
        well = [host for host in self._swarm.servers if host.machine is not None and not host.hung and host.records]
        here = [host for host in well if not host.harmed and not host.gone and not host.hangs_for_good]
        if not here or self._moves >= 2:
            return False
        self._moves += 1
        host = rng.choice(here)
        host.gone = True
        self._world.crash(host)
        new = self._swarm.prepare_server()
        self._world.move_disk(host, new)
        self._start_soon(new, rng.uniform(*SEEN_GONE_S))
        return True

    def _banned(self, rng: random.Random) -> bool:
        """The operator bans somebody, and somebody else comes."""
        coordinator = self._swarm.coordinator
        hosts = [host for host in self._swarm.volunteers if host.machine is not None]
        if coordinator.machine is None or coordinator.paused or not hosts or self._bans >= BANNED_MAX:
            return False
        self._bans += 1
        host = rng.choice(hosts)
        self._world.feed(coordinator, Ordered(Ban(host.node, "the operator has lost patience")))
        self._swarm.add_volunteer()
        return True

    def _liar(self, rng: random.Random) -> bool:
        """A volunteer that breaks the protocol beside its work."""
        if sum(host.lies for host in self._swarm.volunteers) >= 2:
            return False
        self._swarm.add_liar()
        return True

    def _server_lost(self, rng: random.Random) -> bool:
        """A server and its disk are gone for good, where a spare waits."""
        here = [host for host in self._swarm.servers if not host.gone and not host.hangs_for_good]
        if not self._spares_wait:
            return False
        host = rng.choice(here)
        host.gone = True
        self._world.crash(host, lose_disk=True)
        return True

    def _coordinator_away(self, rng: random.Random) -> bool:
        """For half a minute or more, while servers and volunteers restart; the run must go on."""
        host = self._swarm.coordinator
        machine = host.machine
        if not isinstance(machine, CoordinatorMachine) or machine.placement.plan is None:
            return False
        self._world.crash(host)
        away_s = rng.uniform(20.0, 60.0)
        self._start_soon(host, away_s)
        for number in range(rng.randint(1, 4)):
            hosts = self._swarm.servers if number % 2 == 0 else self._swarm.volunteers
            self._world.at(rng.uniform(0.0, away_s / 2), partial(self._kill, rng, hosts, rng.uniform(0.1, 2.0)))
        return True

    def _database_old(self, rng: random.Random) -> bool:
        """The coordinator dies, and comes back with a copy of its database from before, or with none."""
        host = self._swarm.coordinator
        plans = [number for number, (record, _) in enumerate(host.records) if isinstance(record, PlanRow)]
        if host.machine is None or not plans or rng.random() < 0.5:
            return False
        self._world.crash(host)
        count = rng.choice([0, 0, rng.randint(plans[0], len(host.records)), rng.randint(0, len(host.records))])
        self._world.restore(host, count)
        self._start_soon(host, rng.uniform(0.1, 3.0))
        self._world.at(OPERATOR_S, self._operator)
        return True

    def _operator(self) -> None:
        """Does what the status asks for: who is gone for good cannot be waited for."""
        host = self._swarm.coordinator
        machine = host.machine
        if self._swarm.finished:
            return
        if isinstance(machine, CoordinatorMachine) and not host.paused and "run adopt" in machine.waiting_for:
            self._world.feed(host, Ordered(Adopt()))
        self._world.at(OPERATOR_S, self._operator)

    def _database_mislaid(self, rng: random.Random) -> bool:
        """The coordinator comes back with an empty database, and no server knows by which plan it went: then nobody can
        tell what its ledgers are worth, until the operator finds the newest database."""
        host = self._swarm.coordinator
        steps = [record for record, _ in host.records if isinstance(record, StepRow)]
        if host.machine is None or len(steps) < 2 or self._losses_of_database:
            return False
        self._losses_of_database = True
        self._world.crash(host)
        kept = list(host.records), dict(host.files)
        self._world.restore(host, 0)
        for server in self._swarm.servers:
            self._world.crash(server)
            server.files.pop(PLAN, None)
            self._start_soon(server, rng.uniform(0.1, 1.0))
        self._start_soon(host, 0.1)

        def found() -> None:
            self._world.crash(host)
            self._world.put_back(host, *kept)
            self._start_soon(host, 0.1)

        self._world.at(OPERATOR_S, found)
        return True

    def _coordinator_cut(self, rng: random.Random) -> bool:
        """No way between the coordinator and one server, often the decider; the server and its fellows are well."""
        if self._world.blocked:
            return False
        host = rng.choice([*self._swarm.servers, *self._swarm.servers[:1] * 3])
        pair = frozenset((host.node, COORDINATOR))
        self._world.blocked[pair] = None
        for link in list(self._world.links.values()):
            if {link.a, link.b} == pair:
                self._world.cut(link)
        self._world.at(rng.uniform(15.0, 40.0), lambda: self._world.blocked.pop(pair, None))
        return True

    def _slow_host(self, rng: random.Random) -> bool:
        host = rng.choice([*self._swarm.volunteers, *self._swarm.servers])
        host.slowness = 10.0
        self._world.at(rng.uniform(1.0, 5.0), lambda: setattr(host, "slowness", 1.0))
        return True

    def _latency_spike(self, rng: random.Random) -> bool:
        self._world.latency_s = rng.choice([0.2, 0.5])
        self._world.at(rng.uniform(0.5, 3.0), lambda: setattr(self._world, "latency_s", 0.02))
        return True

    def _kill(self, rng: random.Random, hosts: list[Host], back_after_s: float) -> bool:
        up = [host for host in hosts if host.machine is not None]
        if not up:
            return False
        host = rng.choice(up)
        self._world.crash(host)
        self._start_soon(host, back_after_s)
        return True

    def _start_soon(self, host: Host, delay_s: float) -> None:
        def start() -> None:
            wanted = not host.gone and host.exited != "finished" and not (host.lies and self.until_s == 0.0)
            if host.machine is None and wanted:
                self._world.start(host)

        self._world.at(delay_s, start)
