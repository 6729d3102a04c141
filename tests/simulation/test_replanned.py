"""A run that is laid out anew while its processes die: nothing is lost, and the numbers are those of one process."""

from __future__ import annotations

import random
from functools import partial

import pytest

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import ChangeRun
from coordinator.live.records import StepRow
from protocol.base.machine import Ordered
from protocol.run.changes import laid_out_at
from protocol.run.course import PLANNED
from tests.layouts import make_layout
from tests.simulation import arithmetic, lanes
from tests.simulation.arithmetic import Vector, reference
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Host, Watcher

LAYOUTS = ("stages.count=3", "stages.count=1", "stages.count=2")


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 4, 5, 6, 7, 8))])
def test_a_run_that_is_laid_out_anew_under_kills_computes_what_one_process_does(seed: int) -> None:
    """Two layouts are ordered; around each, servers, volunteers, spares and the coordinator are killed and come back.
    Every step that counts has the loss of the reference, told from which steps on the layouts count, and so has the
    last checkpoint; no step is thrown away."""
    lay_out_twice(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_a_run_that_a_planner_has_cut_is_laid_out_anew_in_the_same_way(seed: int) -> None:
    """Whoever starts knows how it was cut before from the first of the layouts."""
    lay_out_twice(seed, PLANNED)


def test_a_checkpoint_that_is_cut_anew_one_number_further_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant, in the same run: the reference has other losses."""

    def recut(whole: Vector, shard_count: int) -> Vector:
        found = arithmetic.recut(whole, shard_count)
        return (*found[1:], found[0])

    monkeypatch.setattr(lanes, "recut", recut)
    with pytest.raises(AssertionError, match="loss"):
        lay_out_twice(3)


def lay_out_twice(seed: int, cut: str = "even") -> None:
    """Runs a seed and looks at all that it came to."""
    rng = random.Random(seed)
    gradients = "gi" if seed % 4 in (1, 2) else "fp32"
    shape = Shape(steps=14, spares=2, checkpoint_every=5, delay=seed % 2, cut=cut, gradients=gradients)
    swarm = Swarm(seed, shape, Watcher())
    world = swarm.world

    def machine() -> CoordinatorMachine | None:
        found = swarm.coordinator.machine
        return found if isinstance(found, CoordinatorMachine) else None

    def closed(step: int) -> bool:
        now = machine()
        return now is not None and now.history.newest_step >= step

    def kill(host: Host) -> None:
        world.crash(host)
        world.at(rng.uniform(0.1, 2.0), lambda: world.start(host) if host.machine is None and not host.exited else None)

    laid_out = 0
    for number, after in enumerate((2, 7)):
        world.run(world.now + 240.0, stop=partial(closed, after))
        now = machine()
        assert now is not None and now.placement.plan is not None
        changes, wanted = now.placement.wishes.changes, LAYOUTS[number]
        if len(now.placement.plan.stages) == int(wanted[-1]):
            wanted = LAYOUTS[2]
        if not now.placement.wishes.lays_out:
            world.feed(swarm.coordinator, Ordered(ChangeRun(make_layout(now.config, changes, [wanted]))))
        for _ in range(4):
            host = rng.choice([*swarm.servers, *swarm.servers, *swarm.volunteers, swarm.coordinator])
            world.at(rng.uniform(0.0, 4.0), partial(kill, host))
        world.run(world.now + 5.0, stop=lambda: swarm.finished)
    world.run(world.now + 400.0, stop=lambda: swarm.finished)
    waits = {host.node: getattr(host.machine, "waiting_for", host.exited) for host in world.hosts.values()}
    waits = {node: wait() if callable(wait) else wait for node, wait in waits.items()}
    assert swarm.finished, f"seed {seed}: the run does not end: {waits}"
    records = [record for record, _ in swarm.coordinator.records]
    now = machine()
    assert now is not None and now.placement.plan is not None
    assert now.history.rollback_count == 0 and now.history.lost_steps == 0
    layouts = {}
    for change in now.placement.wishes.changes:
        config = laid_out_at(now.config, now.placement.wishes.changes, change.from_step)
        layouts[change.from_step] = config, [shape.shards] * config.stages.count
        laid_out += change.from_step > 0
    assert laid_out or seed % 4, f"seed {seed}: no layout has begun"
    right = reference(now.config, [shape.shards] * shape.stages, layouts)
    rows = [record for record in records if isinstance(record, StepRow)]
    assert [(row.step, row.loss) for row in rows] == list(enumerate(right.losses)), "other losses than one process"
    parts = world.shared[f"manifest-{shape.steps}"]
    assert len(parts) == len(now.placement.plan.server_nodes())
    for stage, shard, file, *_ in parts:
        last = shape.steps
        assert world.shared[file] == right.state(last, now.config.version_of(last), stage, shard)
