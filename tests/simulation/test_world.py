"""The simulated world: many runs under many weathers, each judged at every step.

A failure prints the seed and the line that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from node.machine.jobs import SetUpServer
from protocol.base.ids import NodeId
from protocol.run.course import PLANNED
from tests.node.setting import make_plan
from tests.seeds import slow_then_long
from tests.simulation.checkers import Checker
from tests.simulation.lanes import Lanes, SharedFolder
from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene
from tests.simulation.swarm import Shape, Swarm
from tests.simulation.weather import Weather
from tests.simulation.world import Host, Watcher, World

ROOT = Path(__file__).parents[2]
ONCE_FAILED = [int(word) for word in (ROOT / "tests/simulation/seeds.txt").read_text().split()]
"""Seeds that have found a bug: each once broke an invariant or hung."""
SOME, MANY = 60, 300
"""Seeds from 1 on that two processes run together. Those that once failed need no run of their own among the first."""


def start(seeds: str, hash_seed: str) -> subprocess.Popen[str]:
    """Runs seeds in a fresh process."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "tests.simulation.run_seed", seeds]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    """The lines that a process prints; it must end well."""
    text, _ = process.communicate()
    assert process.returncode == 0, text
    return text.splitlines()


@pytest.mark.parametrize("seed", [*range(1001, 1015), *ONCE_FAILED[:6]])
def test_no_invariant_breaks_in_any_weather(seed: int) -> None:
    """A run under faults keeps T-I1 to T-I12 and L1 to L3 at every step, and ends as one process would."""
    run_seed(seed)


@pytest.mark.parametrize("seed", slow_then_long(range(2001, 2031), 8))
def test_planned_layouts_compute_what_one_process_computes(seed: int) -> None:
    """Servers measure each other, the planner seats them and cuts the model, under every weather and any course."""
    run_seed(seed, scene=Scene(run={"cut": PLANNED}))


@pytest.mark.parametrize("seed", slow_then_long(range(3001, 3041), 16))
def test_sums_on_the_grid_are_those_of_one_process(seed: int) -> None:
    """What runs do by default: each part is measured by its version's grid, which is served, copied and written with
    the version, under every weather and any course."""
    run_seed(seed, scene=Scene(run={"gradients": "gi"}))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [seed for seed in ONCE_FAILED if seed > SOME])
def test_no_bug_comes_back(seed: int) -> None:
    """A seed that once failed stays mended, also one that is not among the many."""
    run_seed(seed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seeds", "again"),
    [pytest.param(SOME, 4, marks=pytest.mark.slow), pytest.param(MANY, 20, marks=pytest.mark.long)],
)
def test_many_seeds_without_a_violation(seeds: int, again: int) -> None:
    """Two processes run them; a seed that fails is printed with the line that replays it. A third runs the first ones
    under another hash seed: every input of every machine is the same there (D1)."""
    half = seeds // 2
    processes = [start(f"1-{half}", "0"), start(f"{half + 1}-{seeds}", "0"), start(f"1-{again}", "1")]
    first, second, third = [finish(process) for process in processes]
    assert (len(first), len(second)) == (half, half)
    assert third == first[:again]


@pytest.mark.slow
def test_a_seed_is_the_same_in_every_process() -> None:
    """D1: every input of every machine is the same in two fresh processes with different hash seeds."""
    processes = [start("41-43", hash_seed) for hash_seed in ("1", "2")]
    first, second = [finish(process) for process in processes]
    assert first == second and len(first) == 3


@pytest.mark.slow
def test_when_all_is_calm_no_link_is_slow_since_it_was_opened_in_a_latency_spike() -> None:
    """Each of the forty hops of a step would take up to a second, to the end of the run (seed 140060)."""
    shape = Shape()
    swarm = Swarm(1, shape, Checker(shape.config(1), [shape.shards] * shape.stages))
    world, weather = swarm.world, Weather(swarm, ("latency_spike",), mean_gap_s=1e9, until_s=4.0, disk_losses_max=0)
    usual_s, world.latency_s = world.latency_s, 0.5
    world.run(4.0)
    assert max(link.latency_s for link in world.links.values()) > 0.5
    weather.calm()
    assert world.latency_s == usual_s
    assert max(link.latency_s for link in world.links.values()) <= 2 * usual_s
    run_seed(140060)


def test_an_input_of_a_large_world_costs_no_more_than_one_of_a_small_one() -> None:
    """A look at invariants costs as much as a machine knows of others; so there are as many fewer as hosts are more."""
    world = World(1, Watcher())
    every = []
    for number in range(10_000):
        world.add(Host(NodeId(f"v{number}"), "volunteer", lambda host, rng: cast(Any, None), ""))
        every.append(world.checked_every)
    assert set(every[:100]) == {1} and every[-1] == 1000


def test_the_folder_is_what_the_run_says_that_it_is() -> None:
    """Its lanes share one; a run that says otherwise is refused, since servers then go by what they were told of."""
    config = Shape().config(1)
    assert config.checkpoint.shared
    lanes = Lanes({}, {}, SharedFolder())
    own = msgspec.structs.replace(config, checkpoint=msgspec.structs.replace(config.checkpoint, folder="checkpoints"))
    plan = make_plan(stages=1)
    lanes.perform(SetUpServer(config, 259, plan, 0, 0), {})
    with pytest.raises(AssertionError, match="one folder"):
        lanes.perform(SetUpServer(own, 259, plan, 0, 0), {})
