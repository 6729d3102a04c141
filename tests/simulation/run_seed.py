"""Runs one seed of the world from start to end; `python -m tests.simulation.run_seed 17` replays seed 17 aloud."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise

from coordinator.live.records import PlanRow
from node.machine.jobs import PrepareData
from node.machine.stalls import PREPARE_S
from node.volunteer import lookahead
from tests.simulation.checkers import Checker
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.violation import expect
from tests.simulation.weather import Weather

CALM_LIMIT_S = 240.0
"""After the faults stop a run of a few steps must end within this virtual time (L1, D7 of state-and-trust 3.7)."""


GRID_SEEDS = 120_000
"""Three of four seeds above these add up gradients on the grid, as runs do by default; those below mean what they
did."""
OLD_SEEDS = 30_000
"""Every third seed above these keeps copies at buddies; those that once failed are what they were then."""
NO_BOUND = 1 << 20
"""More forwards than anybody has room for."""
SLOWEST_TASK_S = 0.5
"""A backward on the slowest host, with its transfers."""


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
    lost_steps: int = 0
    """Closed ones that were thrown away, by the coordinator's count."""


def run_seed(seed: int, aloud: bool = False, scene: Scene = Scene()) -> Outcome:  # noqa: B008
    """Draws a run and its weather from the seed, runs it to its end, checks everything on the way.

    Args:
        scene: what is so whatever the seed draws.
    Raises:
        SeedFailedError: with the broken invariant and the line that replays it.
    """
    shape = replace(Shape.draw(random.Random(seed)), buddy="always" if seed > OLD_SEEDS and seed % 3 == 0 else "never")
    shape = replace(shape, gradients="gi" if seed > GRID_SEEDS and seed % 4 else "fp32")
    shape = replace(shape, greedy=seed % 2 == 1)
    shape = replace(shape, **scene.run)
    with asking_for_all() if shape.greedy else nullcontext():
        return _run(seed, shape, aloud, scene)


@contextmanager
def asking_for_all() -> Iterator[None]:
    """Volunteers ask for all the forwards that they have memory for, as a member may: servers have to be right with
    these too, and what goes wrong when somebody who holds much is gone shows sooner."""
    modest, lookahead.SPARE = lookahead.SPARE, NO_BOUND
    try:
        yield
    finally:
        lookahead.SPARE = modest


def _run(seed: int, shape: Shape, aloud: bool, scene: Scene) -> Outcome:
    checker = Checker(shape.config(seed), [shape.shards] * shape.stages)
    swarm = Swarm(seed, shape, checker, scene)
    world = swarm.world
    try:
        weather = Weather.draw(swarm)
        world.run(weather.until_s, stop=lambda: swarm.finished)
        calm_s = world.now
        if not swarm.finished:
            weather.calm()
            world.run(world.now + CALM_LIMIT_S, stop=lambda: swarm.finished)
        checker.finish(world)
        _expect_steps(checker, swarm, calm_s)
        assert swarm.finished, "L1: the coordinator never heard of the last step"
        world.run(world.now + 10.0)
    except Exception as error:
        if aloud:
            import traceback

            traceback.print_exc()
            print(*world.log, sep="\n")
            for host in world.hosts.values():
                waiting = getattr(host.machine, "waiting_for", "")
                waiting = waiting if isinstance(waiting, str) else waiting()
                print(f"{host.node}: {'down' if host.machine is None else 'up'} {host.exited} {waiting}")
        raise SeedFailedError(
            f"seed {seed} at {world.now:.3f} s: {type(error).__name__}: {error}\n"
            f"{shape}\nreplay: python -m tests.simulation.run_seed {seed}"
        ) from error
    lost_steps = sum(record.lost_steps for record, _ in swarm.coordinator.records if isinstance(record, PlanRow))
    return Outcome(
        seed, world.digest, world.now, world.steps, checker.accepted_count, checker.sealed_count, weather.happened,
        lost_steps,
    )  # fmt: skip


def _expect_steps(checker: Checker, swarm: Swarm, calm_s: float) -> None:
    """D7: without faults a step completes within three times a lease and the slowest honest task."""
    bound_s = 3 * (max(swarm.config.limits.lease_s, Shape.lease_s) + SLOWEST_TASK_S)
    for host in swarm.servers:
        if host.hangs_for_good:  # somebody has to take its place first, and nobody sees that an idle spare hangs
            bound_s += swarm.config.limits.server_gone_s
            bound_s += PREPARE_S * any(isinstance(job, PrepareData) for job in host.jobs)
    begun_s = max(calm_s, checker.first_plan_s)  # before it there is nothing to compute
    times = [begun_s, *(time for time in checker.done_at if time > begun_s)]
    for earlier, later in pairwise(times):
        expect(later - earlier <= bound_s, "D7", f"no step completed for {later - earlier:.1f} s of calm")


def main(words: list[str]) -> int:
    """`17` replays seed 17 aloud, `1-300` runs many and names those that fail; returns how many failed."""
    failed = 0
    for word in words:
        first, _, last = word.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            try:
                outcome = run_seed(seed, aloud=not last)
            except SeedFailedError as failure:
                failed += 1
                print(failure, flush=True)
            else:
                print(f"seed {outcome.seed}: {outcome.digest} {outcome.machine_steps} inputs", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
