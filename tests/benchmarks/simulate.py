"""How fast the world that measures is: `python -m tests.benchmarks.simulate [--nodes 100 1000 10000] [--profile]`.

Production machines of a 1.1 B run on home lines (20/200 Mbit/s): a coordinator, two servers a stage for every 128
volunteers that a stage has, volunteers for the rest, everybody there from the beginning. For each size: virtual
seconds, processor seconds of this process (a busy machine must not change the figure), inputs of machines, and inputs a
second; `--profile` prints where the time goes. Bound: 10,000 inputs a second at every size.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time

from coordinator.world.churn import no_churn
from coordinator.world.swarm import Swarm
from node.world.member import Members
from protocol.run.run import BatchSection, DataSection, LimitsSection, RunConfig, StagesSection
from tests.benchmarks.home_lines import MODELS, home_lines

INPUTS_PER_S_MIN = 10_000.0
STAGES = 8
CREW = 128
"""Volunteers for each pair of a front and a back server: 1 Gbit/s carries 50 uplinks of 20 Mbit/s at once."""


def swarm(nodes: int, microbatches: int, seed: int = 1) -> Swarm:
    """A run with so many nodes in all, of which none has begun."""
    pairs = max(1, min(64, round(nodes / STAGES / CREW)))
    network = home_lines(None, servers=2 * pairs * STAGES, volunteers=nodes - 1 - 2 * pairs * STAGES)
    config = RunConfig(
        name="home-lines",
        steps=10**6,
        model=MODELS["1.1 B"],
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=microbatches, samples=1),
        stages=StagesSection(count=STAGES, front_servers=pairs, back_servers=pairs),
        limits=LimitsSection(volunteers_max=4096),
    )
    config.validate()
    names = [machine.name for machine in network.machines[network.servers :]]
    return Swarm(config, network, no_churn(names), seed, Members)


def main() -> int:
    """Prints a row for each size; 1 where the bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--seconds", type=float, default=120.0, help="virtual")
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--profile", action="store_true", help="slower by half; the bound is not looked at")
    arguments = parser.parse_args()
    missed = 0
    for nodes in arguments.nodes:
        run = swarm(nodes, arguments.microbatches)
        profile = cProfile.Profile() if arguments.profile else None
        began, wall = time.process_time(), time.perf_counter()
        if profile is not None:
            profile.runcall(run.run, arguments.seconds)
        else:
            run.run(arguments.seconds)
        took_s, wall_s = time.process_time() - began, time.perf_counter() - wall
        rate = run.world.inputs / took_s
        bad = profile is None and rate < INPUTS_PER_S_MIN
        missed += bad
        print(
            f"{nodes:6d} nodes: {run.world.now:6.0f} virtual s, {took_s:7.1f} processor s ({wall_s:.1f} by the clock), "
            f"{run.world.inputs:9d} inputs, {rate:7.0f} inputs/s, {len(run.steps)} steps{'   MISSED' if bad else ''}",
            flush=True,
        )
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
