"""How fast the world that measures is: `python -m tests.benchmarks.simulate [--nodes 100 1000 10000] [--profile]`.

Production machines of a 1.1 B run on home lines (20/200 Mbit/s): a coordinator, two servers a stage for every 128
volunteers that a stage has, volunteers for the rest, everybody there from the beginning. For each size: virtual
seconds, processor seconds of this process (a busy machine must not change the figure), inputs of machines, and inputs a
second; `--profile` prints where the time goes. Bound: 10,000 inputs a second at every size.

A model of 10,000 nodes, in which each volunteer has as many links, as much work and as few reports, for nine seconds of
a processor: `--nodes 450 --stages 2 --pairs 10 --microbatches 41 --ping 167 --seconds 600`.
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


def swarm(
    nodes: int, microbatches: int, seed: int = 1, stages: int = STAGES, pairs: int = 0, ping_s: float = 2.0
) -> Swarm:
    """A run with so many nodes in all, of which none has begun. `pairs`: of servers for each stage; 0: by the crew."""
    pairs = pairs or max(1, min(64, round(nodes / stages / CREW)))
    network = home_lines(None, servers=2 * pairs * stages, volunteers=nodes - 1 - 2 * pairs * stages)
    config = RunConfig(
        name="home-lines",
        steps=10**6,
        model=MODELS["1.1 B"],
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=microbatches, samples=1),
        stages=StagesSection(count=stages, front_servers=pairs, back_servers=pairs),
        limits=LimitsSection(volunteers_max=4096, ping_s=ping_s, silent_s=4 * ping_s),
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
    parser.add_argument("--stages", type=int, default=STAGES)
    parser.add_argument("--pairs", type=int, default=0, help="of servers for each stage; 0: one for every 128 of it")
    parser.add_argument("--ping", type=float, default=2.0, help="seconds; volunteers report no more often")
    parser.add_argument("--profile", action="store_true", help="slower by half; the bound is not looked at")
    arguments = parser.parse_args()
    missed = 0
    for nodes in arguments.nodes:
        run = swarm(
            nodes, arguments.microbatches, stages=arguments.stages, pairs=arguments.pairs, ping_s=arguments.ping
        )
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
