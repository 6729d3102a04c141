"""An operator who changes the run in every weather: all servers know before a step opens, and the run ends as asked."""

from __future__ import annotations

import random
from functools import partial

import pytest

from coordinator.live.core import CoordinatorMachine
from coordinator.live.orders import ChangeRun
from coordinator.live.records import StepRow
from coordinator.process.ordering import why_too_late
from node.core import NodeMachine
from protocol.base.machine import Ordered
from protocol.run.batches import Batches
from protocol.run.changes import make_change
from tests.simulation.checkers import Checker
from tests.simulation.host import Host
from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm

KEY = "batch.microbatches"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3001, 3009))
def test_a_run_that_is_changed_in_any_weather_ends_as_its_operator_asked(seed: int) -> None:
    """Pauses, another number of steps or microbatches, other checkpoints, computing servers, while processes die and
    disks are lost: no step opens before every server has what it needs to know, nothing is lost or doubled, and the run
    ends."""
    run_seed(seed, scene=Scene(always=("orders",), gap_s=(0.1, 0.5)))


@pytest.mark.slow
@pytest.mark.parametrize("first", [3003, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (3010, 3020, 3030))])
def test_a_run_whose_operator_gives_many_orders_ends_as_he_asked(first: int) -> None:
    """Among kills of everybody. Every change of the timing draws other orders; they are drawn as often as all faults
    together, and of seven runs one must have two."""
    kills = (*["orders"] * 4, "volunteer_kill", "server_kill", "coordinator_kill", "link_cut")
    scene = Scene(only=kills, gap_s=(0.1, 0.3), run={"steps": 12})
    assert any(run_seed(seed, scene=scene).faults.get("orders", 0) >= 2 for seed in range(first, first + 7))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [40, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(41, 49))])
def test_steps_get_more_microbatches_and_fewer_while_everybody_is_killed(seed: int) -> None:
    """Every version is that of one process that does the same, no sample is used twice or left out, and the steps
    before a change have the number that they had, however late somebody asks for it."""
    rng = random.Random(seed)
    shape = Shape(steps=12, spares=1, delay=seed % 2, checkpoint_every=3 * (seed % 3))
    checker = Checker(shape.config(seed), [shape.shards] * shape.stages)
    swarm = Swarm(seed, shape, checker)
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

    wanted = [shape.microbatches + 3, 1, shape.microbatches]
    for after, count in zip((1, 4, 7), wanted, strict=True):
        world.run(world.now + 240.0, stop=partial(closed, after))
        now = machine()
        assert now is not None and now.placement.plan is not None
        change = make_change(now.config, now.placement.wishes.changes, KEY, str(count))
        world.feed(swarm.coordinator, Ordered(ChangeRun(change)))
        for _ in range(4):
            host = rng.choice([*swarm.servers, *swarm.servers, *swarm.volunteers, swarm.coordinator])
            world.at(rng.uniform(0.0, 3.0), partial(kill, host))
        world.run(world.now + 4.0, stop=lambda: swarm.finished)
    world.run(world.now + 400.0, stop=lambda: swarm.finished)
    waits = {host.node: getattr(host.machine, "waiting_for", host.exited) for host in world.hosts.values()}
    waits = {node: wait() if callable(wait) else wait for node, wait in waits.items()}
    assert swarm.finished, f"seed {seed}: the run does not end: {waits}"
    checker.finish(world)
    now = machine()
    assert now is not None
    batches = Batches.of(swarm.config, now.placement.wishes.changes)
    assert {count for _, count in batches.counts} == {shape.microbatches, *wanted}, batches.counts
    rows = {record.step: record for record, _ in swarm.coordinator.records if isinstance(record, StepRow)}
    assert [rows[step].tokens for step in range(12)] == [batches.tokens(step) for step in range(12)]
    assert now.history.tokens == batches.tokens_before(12)


def test_no_order_is_taken_while_the_final_weights_are_validated() -> None:
    """Behind the last step no boundary comes: more steps, ordered then, were taken and forgotten without a word. Here
    nobody is left to validate when the last step is done, until somebody comes again."""
    shape = Shape(steps=5, delay=1, validate_every=1, collocated="never")
    checker = Checker(shape.config(7), [shape.shards] * shape.stages)
    swarm = Swarm(7, shape, checker)

    def machine() -> CoordinatorMachine:
        assert isinstance(swarm.coordinator.machine, CoordinatorMachine)
        return swarm.coordinator.machine

    swarm.world.run(400.0, stop=lambda: machine().history.newest_step == shape.steps - 3)
    assert why_too_late(machine()) == ""

    def validates_at_last() -> bool:
        servers = [host.machine.server for host in swarm.servers if isinstance(host.machine, NodeMachine)]
        return any(server is not None and server.counters().get("opened", -1.0) >= shape.steps for server in servers)

    swarm.world.run(400.0, stop=validates_at_last)
    assert validates_at_last()
    for host in swarm.volunteers:
        swarm.world.crash(host)
    swarm.world.run(swarm.world.now + 30.0, stop=lambda: bool(why_too_late(machine())))
    assert not machine().finished, "the last versions are still to be validated"
    assert why_too_late(machine()).startswith("all 5 steps are done")
    for host in swarm.volunteers:
        swarm.world.start(host)
    swarm.world.run(swarm.world.now + 400.0, stop=lambda: swarm.finished)
    assert swarm.finished
