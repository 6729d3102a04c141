"""Guidance is neutral (C7): whatever goes first, whoever computes it and whoever dies, the weights are the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import coordinator.live.plan_builder as plan_builder
from protocol.run.run import TUNED
from protocol.schedule.policies import First, Policy, Traversal, Weights
from tests.simulation.checkers import Checker
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.weather import Weather

SHAPE = Shape(stages=2, chunks=2, placement="v", fronts=2, backs=0, volunteers=5, microbatches=6, steps=4, split=True)
WEATHERS = ("volunteer_kill", "link_slow", "server_kill")


def draw_policy(rng: random.Random) -> Policy:
    """Any policy, also what nodes at work do not follow."""
    return Policy(
        first=rng.choice(list(First)),
        forward_unit=rng.randint(1, 4),
        backward_unit=rng.randint(1, 4),
        wait_turn=rng.random() < 0.5,
        warmup=rng.choice([None, 0, 3, 10**6]),
        forward=Traversal(deepest_first=rng.random() < 0.5, interval=rng.choice([0, 0, 2])),
        backward=Traversal(deepest_first=rng.random() < 0.5, interval=rng.choice([0, 0, 2])),
        alive_max=rng.choice([(), (1, 1)]),
        weights=rng.choice(list(Weights)),
    )


def final_weights(seed: int, scene: Scene, shape: Shape = SHAPE) -> list[tuple[int, ...]]:
    """Of every server's shard, when the run with this seed is over."""
    checker = Checker(shape.config(seed), [shape.shards] * shape.stages)
    swarm = Swarm(seed, shape, checker, scene)
    weather = Weather.draw(swarm)
    swarm.world.run(weather.until_s, stop=lambda: swarm.finished)
    weather.calm()
    swarm.world.run(swarm.world.now + 240.0, stop=lambda: swarm.finished)
    assert swarm.finished, "the run came to a stand"
    checker.finish(swarm.world)
    found = []
    for host in swarm.servers:
        lanes = host.lanes
        if lanes is not None and lanes.place is not None and shape.steps in lanes.shard:
            found.append((lanes.place.stage, lanes.place.shard, *lanes.shard[shape.steps][0]))
    return sorted(found)


@pytest.mark.slow
def test_ten_random_policies_and_assignments_end_with_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten policies, each under other weather, so that other volunteers hold other tasks: one set of weights."""
    seed, rng = 7, random.Random(7)
    expected = final_weights(seed, Scene(only=("link_slow",), gap_s=(1e6, 1e6)))  # calm
    assert len(expected) == SHAPE.stages * SHAPE.shards
    for _ in range(10):
        policy = draw_policy(rng)
        monkeypatch.setattr(plan_builder, "order_of", lambda config, policy=policy: policy)
        weather = rng.sample(WEATHERS, rng.randint(1, 3))
        assert final_weights(seed, Scene(only=tuple(weather))) == expected, f"{policy} {weather}"


@pytest.mark.slow
def test_a_planners_order_seats_and_number_in_flight_change_no_weight() -> None:
    """What the planner says when all is left to it, in calm and in storms: the weights of a run that asked nobody."""
    seed, calm = 7, Scene(only=("link_slow",), gap_s=(1e6, 1e6))
    expected = final_weights(seed, calm)
    for scene in (calm, Scene(only=WEATHERS)):
        assert final_weights(seed, scene, replace(SHAPE, order=TUNED)) == expected
