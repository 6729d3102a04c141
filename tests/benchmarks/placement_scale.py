"""What planning costs as a swarm grows: `python -m tests.benchmarks.placement_scale [--quick]`.

One line per size: seconds to place, to route, what a running coordinator thinks about a drop (seconds of one core, so
that what else the machine does is left out), and the peak memory of the process. Exits 1 when 100 servers and 1,000
volunteers take 20 s to place and route, a drop there takes 1 s, 10,000 volunteers take 90 s to place, or memory passes
2 GB.
"""

from __future__ import annotations

import random
import resource
import sys
import time

from coordinator.live.stage_choice import Power, Standing, assign, balance, fill
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import member_model, world_of
from coordinator.planning.routes.search import search_routes
from protocol.base.ids import NodeId
from tests.benchmarks.swarms import seven_billion, swarm

SIZES = ((10, 30), (20, 100), (50, 300), (100, 1_000), (100, 3_000), (100, 10_000))


def look_s(volunteers: int) -> float:
    """Seconds in which a running coordinator finds the place of a newcomer, one for a stage that lost its last, and the
    move that helps the slowest stage: what a drop costs it, of 16 stages."""
    rng = random.Random(volunteers)
    needed = [True] * 16
    standing = Standing(
        16,
        [
            Power(NodeId(f"v{n}"), rng.randrange(1, 16), tuple(rng.uniform(0.2, 2.0) for _ in needed), n)
            for n in range(volunteers)
        ],
    )
    began = time.process_time()
    assign(needed, standing, (1.0,) * 16, -1, volunteers)
    fill(needed, standing)
    standing.add(Power(NodeId("new"), 0, (0.1,) * 16, volunteers))
    balance(needed, standing, volunteers + 1)
    return time.process_time() - began


def main() -> int:
    missed = []
    print(
        f"{'servers':>8s} {'volunteers':>10s} {'stages':>6s} {'left out':>8s} {'routes':>6s} {'place s':>8s} "
        f"{'route s':>8s} {'drop s':>7s} {'batch s':>8s} {'recipe s':>8s} "
        f"{'makespan':>8s} {'MB':>6s}"
    )
    for servers, volunteers in SIZES[:4] if "--quick" in sys.argv else SIZES:
        network = swarm(servers, volunteers)
        began = time.perf_counter()
        world = world_of(network, seven_billion())
        found = search_placement(world, 0, budget_s=8.0 if volunteers <= 1_000 else 40.0)
        place_s = time.perf_counter() - began
        route_s = makespan_s = 0.0
        routes = 0
        if volunteers <= 3_000:
            began = time.perf_counter()
            routed = member_model(world, found.placement)
            answer = search_routes(routed.model, 0, 4.0)
            route_s = time.perf_counter() - began
            routes, makespan_s = len(answer.routes), answer.makespan_s
        drop_s = look_s(volunteers)
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{servers:8d} {volunteers:10d} {len(found.placement.stages):6d} {len(found.benched):8d} {routes:6d} "
            f"{place_s:8.2f} {route_s:8.2f} {drop_s:7.3f} "
            f"{found.batch_s:8.1f} {found.recipe_s:8.1f} {makespan_s:8.1f} {memory_mb:6.0f}",
            flush=True,
        )
        label = f"{servers} servers, {volunteers} volunteers"
        if volunteers == 1_000 and place_s + route_s >= 20:
            missed.append(f"{label}: placed and routed in {place_s + route_s:.1f} s")
        if volunteers == 1_000 and drop_s >= 1:
            missed.append(f"{label}: a drop took {drop_s:.2f} s")
        if volunteers == 10_000 and place_s >= 90:
            missed.append(f"{label}: placed in {place_s:.1f} s")
        if memory_mb >= 2_000:
            missed.append(f"{label}: {memory_mb:.0f} MB")
    print("\n".join(missed) if missed else "pass")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
