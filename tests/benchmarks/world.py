"""How big and how fast the world of the tests is: `python -m tests.benchmarks.world [--nodes 100 1000 10000]`.

Prints, for each size, the nodes, virtual seconds, processor seconds of this process (a busy machine changes them
least), inputs of machines, and inputs a second; `--profile` prints where the time goes, `--seeds` how long 300 seeds
take. Bounds: 10,000 inputs a second at 1,000 and more nodes, whose runs finish; 300 seeds in 180 s on two cores.
What was measured stands in `WORLD.md`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import subprocess
import sys
import time

from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Watcher

SEEDS_LIMIT_S = 180.0
INPUTS_PER_S_MIN, LARGE = 10_000.0, 1_000


def big(nodes: int, profiled: bool) -> bool:
    """A run of two steps on 20 stages, with two servers each and volunteers for the rest; whether a bound is missed."""
    stages = 20
    shape = Shape(
        stages=stages,
        fronts=1,
        backs=1,
        volunteers=nodes - 2 * stages,
        microbatches=32,
        steps=2,
        checkpoint_every=0,
        contribution_tasks=2,
    )
    began = time.process_time()
    swarm = Swarm(1, shape, Watcher())
    profile = cProfile.Profile() if profiled else None
    if profile is not None:
        profile.enable()
    swarm.world.run(600.0, stop=lambda: swarm.finished)
    if profile is not None:
        profile.disable()
    took_s = time.process_time() - began
    rate = swarm.world.steps / took_s
    missed = not swarm.finished or (nodes >= LARGE and not profiled and rate < INPUTS_PER_S_MIN)
    end = "finished" if swarm.finished else "NOT FINISHED"
    print(
        f"{nodes:6d} nodes, {stages} stages: {end} after {swarm.world.now:.1f} virtual s, {took_s:.1f} processor s, "
        f"{swarm.world.steps} inputs, {rate:.0f} inputs/s{'   MISSED' if missed else ''}",
        flush=True,
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    return missed


def seeds() -> bool:
    """The 300 seeds of the tests, on two processes; whether the bound is missed."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tests.simulation.run_seed"]
    processes = [subprocess.Popen([*command, part], stdout=subprocess.PIPE) for part in ("1-150", "151-300")]
    for process in processes:
        process.communicate()
    wall_s = time.perf_counter() - start
    failed = any(process.returncode for process in processes)
    missed = failed or wall_s > SEEDS_LIMIT_S
    print(f"300 seeds: {wall_s:.1f} s (bound {SEEDS_LIMIT_S:g} s){'   MISSED' if missed else ''}", flush=True)
    return missed


def main() -> int:
    """Prints a row for each size; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="*", default=[100, 1000, 10000])
    parser.add_argument("--profile", action="store_true", help="slower by half; the bound of inputs is not looked at")
    parser.add_argument("--seeds", action="store_true")
    options = parser.parse_args()
    missed = [big(nodes, options.profile) for nodes in options.nodes]
    if options.seeds:
        missed.append(seeds())
    return 1 if any(missed) else 0


if __name__ == "__main__":
    sys.exit(main())
