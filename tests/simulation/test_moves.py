"""A volunteer that is moved to another stage: it finishes what it has, and the run loses nothing by it."""

from __future__ import annotations

from typing import Any

import pytest

from node.machine.roles import Roles
from tests.simulation.checkers import Checker
from tests.simulation.run_seed import run_seed
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.violation import ViolationError

SHAPE = Shape(
    stages=2, volunteers=4, microbatches=24, steps=4, contribution_tasks=64, linger_s=30.0, collocated="never",
    checkpoint_every=0,
)  # fmt: skip


def the_last_stage_loses_everybody(seed: int) -> Checker:
    """In the middle of a step, while volunteers of stage 0 have sums that are not sent: one of these is moved."""
    checker = Checker(SHAPE.config(seed), [SHAPE.shards] * SHAPE.stages)
    swarm = Swarm(seed, SHAPE, checker)
    world = swarm.world

    def devices(stage: int) -> list[Any]:
        found = [(host, getattr(host.machine, "volunteer", None)) for host in swarm.volunteers]
        return [(host, device) for host, device in found if device is not None and device.stage == stage]

    def summed() -> bool:
        return len(checker.done_at) >= 1 and all(device.gradients.tasks_in_sums() for _, device in devices(0))

    world.run(120.0, stop=summed)
    for host, _ in devices(1):
        world.crash(host)
    world.run(world.now + 240.0, stop=lambda: swarm.finished)
    assert swarm.finished, "the run came to a stand"
    checker.finish(world)
    return checker


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_is_moved_brings_its_sums_first(seed: int) -> None:
    """The checker looks at everybody who sets up a device for another stage: nothing that it summed up goes with it,
    and no step is lost."""
    assert the_last_stage_loses_everybody(seed).moves >= 1


def test_a_move_that_drops_an_upload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant, in the same runs: whoever is moved goes at once."""
    monkeypatch.setattr(Roles, "_finishes_first", lambda self, device, now: False)
    with pytest.raises(ViolationError, match="C9"):
        list(map(the_last_stage_loses_everybody, (1, 2, 3)))


@pytest.mark.slow
def test_nobody_waits_to_bring_his_sums_to_a_server_that_has_lost_its_place() -> None:
    """Seed 118: another server has the disk of one that is gone for good, and its place; whoever was moved meanwhile
    had sums for the old one, and held the run up for a minute."""
    run_seed(118)
