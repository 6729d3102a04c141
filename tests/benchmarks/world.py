"""How big and how fast the simulated world is: `python -m tests.benchmarks.world [NODES ...]` (1000 and 5000 without).

Prints, for each size, the nodes, virtual and wall seconds, inputs of machines per second, and the seconds that 300
seeds take. Bounds: 300 seeds in 180 s on two cores; 1,000 nodes finish their run.
"""

from __future__ import annotations

import subprocess
import sys
import time

from tests.simulation.swarm import Shape, Swarm
from tests.simulation.world import Watcher

SEEDS_LIMIT_S = 180.0


def big(nodes: int) -> None:
    """A run of two steps on 20 stages, with two servers each and volunteers for the rest."""
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
    start = time.perf_counter()
    swarm = Swarm(1, shape, Watcher())
    swarm.world.run(600.0, stop=lambda: swarm.finished)
    wall_s = time.perf_counter() - start
    end = "finished" if swarm.finished else "NOT FINISHED"
    print(
        f"{nodes} nodes, {stages} stages: {end} after {swarm.world.now:.1f} virtual s, {wall_s:.1f} wall s, "
        f"{swarm.world.steps} inputs, {swarm.world.steps / wall_s:.0f} inputs/s",
        flush=True,
    )


def seeds() -> None:
    """The 300 seeds of the tests, on two processes."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "tests.simulation.run_seed"]
    processes = [subprocess.Popen([*command, part], stdout=subprocess.PIPE) for part in ("1-150", "151-300")]
    for process in processes:
        process.communicate()
    wall_s = time.perf_counter() - start
    failed = any(process.returncode for process in processes)
    verdict = "FAIL" if failed or wall_s > SEEDS_LIMIT_S else "pass"
    print(f"300 seeds: {wall_s:.1f} s (bound {SEEDS_LIMIT_S:g} s): {verdict}", flush=True)


if __name__ == "__main__":
    for word in sys.argv[1:] or ("1000", "5000"):
        big(int(word))
    seeds()
