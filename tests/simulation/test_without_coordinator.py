"""A run does everything but admit newcomers while its coordinator is away, whoever restarts meanwhile."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.checkers import Checker
from tests.simulation.swarm import COORDINATOR, SERVER_GONE_S, Shape, Swarm

SHAPE = Shape(stages=2, volunteers=4, microbatches=4, steps=12, snapshot_steps=2, checkpoint_every=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_ends_without_its_coordinator_though_everybody_restarts(seed: int) -> None:
    """The coordinator dies after two steps and stays away; every server and volunteer is killed once and comes back.
    All steps close, and the coordinator hears of each when it returns."""
    checker = Checker(SHAPE.config(seed), [SHAPE.fronts + SHAPE.backs] * SHAPE.stages)
    swarm = Swarm(seed, SHAPE, checker)
    world = swarm.world
    world.run(60.0, stop=lambda: len(checker.done_at) >= 2)
    world.crash(swarm.coordinator)
    for host in [*swarm.servers, *swarm.volunteers]:
        world.crash(host)
        world.at(0.5, partial(world.start, host))
        world.run(world.now + 4.0)
    world.run(world.now + 120.0, stop=lambda: len(checker.done_at) >= SHAPE.steps)
    assert len(checker.done_at) == SHAPE.steps
    world.start(swarm.coordinator)
    world.run(world.now + 30.0, stop=lambda: swarm.finished)
    assert swarm.finished and [row.step for row in checker.rows] == list(range(SHAPE.steps))
    checker.finish(world)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_decider_that_only_the_coordinator_has_lost_keeps_its_place(seed: int) -> None:
    """No way between the two for three times `server_gone_s`, and a spare idle: training goes on under the same
    ledgers, and the coordinator hears of every step when there is a way again."""
    shape = Shape(stages=2, volunteers=4, microbatches=4, steps=60, checkpoint_every=4, spares=1)
    checker = Checker(shape.config(seed), [shape.fronts + shape.backs] * shape.stages)
    swarm = Swarm(seed, shape, checker)
    world = swarm.world
    world.run(60.0, stop=lambda: len(checker.done_at) >= 3)
    decider = checker.newest_plan.decider
    world.blocked[frozenset((decider, COORDINATOR))] = None
    world.cut(world.links[min(decider, COORDINATOR), max(decider, COORDINATOR)])
    closed = len(checker.done_at)
    world.run(world.now + 3 * SERVER_GONE_S)
    assert len(checker.done_at) > closed + 5 and checker.newest_plan.ledger_generation == 1
    world.blocked.clear()
    world.run(world.now + 120.0, stop=lambda: swarm.finished)
    assert swarm.finished and [row.step for row in checker.rows] == list(range(shape.steps))
    checker.finish(world)
