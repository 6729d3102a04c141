"""Faults for the simulated world: each seed switches some kinds on, for a while; then all is calm (swarm testing).

After the calm begins, everything that is down comes back, and the run must end in bounded time (L1).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.swarm import Swarm
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
)


class Weather:
    """Draws faults for a swarm until `until_s`."""

    def __init__(self, swarm: Swarm, kinds: tuple[str, ...], mean_gap_s: float, until_s: float) -> None:
        self._swarm = swarm
        self._world = swarm.world
        self._rng = swarm.world.rng
        self._kinds = kinds
        self._mean_gap_s = mean_gap_s
        self._until_s = until_s
        self.happened: dict[str, int] = {}
        self._disk_losses = 0
        self._next()

    @staticmethod
    def draw(swarm: Swarm) -> Weather:
        rng = swarm.world.rng
        kinds = tuple(kind for kind in KINDS if rng.random() < 0.45) or ("volunteer_kill",)
        return Weather(swarm, kinds, mean_gap_s=rng.uniform(0.15, 1.5), until_s=rng.uniform(4.0, 20.0))

    def calm(self) -> None:
        """All that is down comes back, all that is slow is quick again."""
        self._until_s = 0.0
        world = self._world
        world.latency_s = 0.02
        for host in world.hosts.values():
            host.slowness = 1.0
            self._start_soon(host, 0.1)
        for link in list(world.links.values()):
            if link.silent:
                world.cut(link)
        if not any(host.machine is not None for host in self._swarm.volunteers):
            self._swarm.add_volunteer()

    def _next(self) -> None:
        self._world.at(self._rng.expovariate(1.0 / self._mean_gap_s), self._strike)

    def _strike(self) -> None:
        if self._world.now >= self._until_s or self._swarm.finished:
            return
        kind = self._rng.choice(self._kinds)
        strike: Callable[[random.Random], bool] = getattr(self, f"_{kind}")
        if strike(self._rng):
            self.happened[kind] = self.happened.get(kind, 0) + 1
        self._next()

    # ---- the kinds -----------------------------------------------------------------------------------------------

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

    def _server_disk_loss(self, rng: random.Random) -> bool:
        if self._disk_losses >= 2:
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
            if host.machine is None and host.exited != "finished":
                self._world.start(host)

        self._world.at(delay_s, start)
