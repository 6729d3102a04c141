"""Runs one seed of the world from start to end; `python -m tests.simulation.run_seed 17` replays seed 17 aloud."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from coordinator.core import CoordinatorMachine
from tests.simulation.checkers import Checker
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.weather import Weather

CALM_LIMIT_S = 240.0
"""After the faults stop a run of a few steps must end within this virtual time (L1, D7 of state-and-trust 3.7)."""


class SeedFailedError(AssertionError):
    """Something is wrong with a seed; the text says how to replay it."""


@dataclass
class Outcome:
    """What a seed did."""

    seed: int
    digest: str
    virtual_s: float
    machine_steps: int
    accepted: int
    sealed: int
    faults: dict[str, int] = field(default_factory=dict)


def run_seed(seed: int, aloud: bool = False, always: tuple[str, ...] = ()) -> Outcome:
    """Draws a run and its weather from the seed, runs it to its end, checks everything on the way.

    Args:
        always: kinds of weather that happen whatever the seed draws.
    Raises:
        SeedFailedError: with the broken invariant and the line that replays it.
    """
    shape = Shape.draw(random.Random(seed))
    checker = Checker(shape.config(seed), [shape.fronts + shape.backs] * shape.stages)
    swarm = Swarm(seed, shape, checker)
    world = swarm.world
    try:
        weather = Weather.draw(swarm, always)
        world.run(weather._until_s, stop=lambda: swarm.finished)
        if not swarm.finished:
            weather.calm()
            world.run(world.now + CALM_LIMIT_S, stop=lambda: swarm.finished)
        assert isinstance(swarm.coordinator.machine, CoordinatorMachine)
        checker.finish(world)
        assert swarm.finished, "L1: the coordinator never heard of the last step"
        world.run(world.now + 10.0)
    except Exception as error:
        if aloud:
            import traceback

            traceback.print_exc()
            print(*world.log, sep="\n")
            for host in world.hosts.values():
                waiting = getattr(host.machine, "waiting_for", lambda: "")()
                print(f"{host.node}: {'down' if host.machine is None else 'up'} {host.exited} {waiting}")
        raise SeedFailedError(
            f"seed {seed} at {world.now:.3f} s: {type(error).__name__}: {error}\n"
            f"{shape}\nreplay: python -m tests.simulation.run_seed {seed}"
        ) from error
    return Outcome(
        seed, world.digest, world.now, world.steps, checker.accepted_count, checker.sealed_count, weather.happened
    )


if __name__ == "__main__":
    for word in sys.argv[1:]:
        first, _, last = word.partition("-")
        for number in range(int(first), int(last or first) + 1):
            try:
                print(run_seed(number, aloud="-" not in word))
            except SeedFailedError as failure:
                print(failure)
                if "-" not in word:
                    raise
