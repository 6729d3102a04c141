"""Whether what is planned for home lines is better than what is cut evenly, when both run:
`python -m tests.benchmarks.home_cuts [NETWORK ...] [--steps 12] [--jobs 2]`.

The networks of `tests.benchmarks.home_lines` (16 servers, 200 volunteers; `equal` ones at 20/200 Mbit/s, or drawn
from a seed), the run of `tests.benchmarks.home_runs` (1.1 billion parameters, 256 microbatches of 2,048 tokens, the
default forms). In each network the machines of production run it twice in simulated time: in eight even stages, and
in as many stages, of such sizes and with such guidance as the coordinator's planner says (`stages.count = "auto"`,
`stages.cut = "planned"`). A row a network: stages, what the planner's cost says of a step with the volunteers where
they are at the end, when the first step was closed, what each of the others took in the mean, and how many volunteers
did no work, or have no stage; then the ratio of the two, and what the planner took of a processor. 1 where the
planned run is slower than the even one by more than chance, the planner took longer than twenty seconds, or a
volunteer has no stage.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import msgspec

from coordinator.world.churn import no_churn
from coordinator.world.predicted import predicted
from coordinator.world.swarm import Swarm
from node.world.member import Members
from protocol.run.run import RunConfig
from tests.benchmarks.home_lines import SERVERS, VOLUNTEERS, home_lines
from tests.benchmarks.home_runs import Row, config_of, line_s

NETWORKS = ("equal", *map(str, range(10)))
PLANNED_S = 20.0
MORE_MAX = 0.05
"""The first steps decide who is where when the next begin: in network 4 the planner finds the even cut, and twelve
steps of it, which differ in nothing but when servers came, took 1.05 times as long. (Two steps: 1.35.)"""


@dataclass(frozen=True)
class Arm:
    """What came out of one run."""

    stages: int
    planned_s: float
    """What the planner took, of a processor."""
    cost_s: float
    """A step by the planner's cost, with the volunteers where they are at the end."""
    first_s: float
    later_s: float
    without_stage: int
    without_work: int

    def __str__(self) -> str:
        return (
            f"{self.stages:>3} {self.cost_s:>8.1f} {self.first_s:>8.1f} {self.later_s:>8.1f} {self.without_work:>5}"
            f" {self.without_stage:>5}"
        )


def config(steps: int, is_planned: bool) -> RunConfig:
    """The run, as a file would ask for it."""
    even = config_of(Row("", "1.1 B", VOLUNTEERS, steps))
    if not is_planned:
        return even
    return msgspec.structs.replace(even, stages=msgspec.structs.replace(even.stages, count=0, cut="planned"))


def measure(network_name: str, steps: int, is_planned: bool) -> Arm:
    """Runs it to its end, or for eight times what the lines would need."""
    network = home_lines(None if network_name == "equal" else int(network_name), SERVERS, VOLUNTEERS)
    names = [machine.name for machine in network.machines[network.servers :]]
    began = time.process_time()
    swarm = Swarm(config(steps, is_planned), network, no_churn(names), 1, Members)
    planned_s = time.process_time() - began
    swarm.run(8 * steps * line_s(config(steps, False), VOLUNTEERS))
    closed, plan = swarm.steps, predicted(swarm)
    machines = [host.machine for host in swarm.volunteers.values() if host.machine is not None]
    stages = [getattr(machine, "stage", -1) for machine in machines]
    counters = [
        volunteer.counters() for volunteer in (getattr(each, "volunteer", None) for each in machines) if volunteer
    ]
    worked = sum(each["microbatches"] > 0.0 for each in counters)
    whole = len(closed) == steps
    return Arm(
        swarm.config.stages.count,
        planned_s,
        plan.step_s if plan is not None else float("inf"),
        closed[0].at_s if closed else float("inf"),
        (closed[-1].at_s - closed[0].at_s) / (steps - 1) if whole else float("inf"),
        sum(stage < 0 for stage in stages),
        VOLUNTEERS - worked,
    )


def main() -> int:
    """Prints a row for each network; 1 where a demand is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="`equal`, or the seeds of random ones")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=1)
    words = parser.parse_args()
    missed = 0
    print("         even                                       planned")
    print("network  stages cost   first    later  idle benched  stages cost   first    later  idle benched  of even")
    with ProcessPoolExecutor(words.jobs) as pool:
        arms = [
            [pool.submit(measure, name, words.steps, is_planned) for is_planned in (False, True)]
            for name in words.networks
        ]
        for name, pair in zip(words.networks, arms, strict=True):
            even, planned = (each.result() for each in pair)
            ratio = planned.later_s / even.later_s
            bad = ratio > 1 + MORE_MAX or planned.planned_s > PLANNED_S or planned.without_stage > 0
            missed += bad
            said = f"{ratio:>8.2f} {planned.planned_s:>5.1f} s{'   MISSED' if bad else ''}"
            print(f"{name:8} {even}   {planned} {said}", flush=True)
    print("all as demanded" if not missed else f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
