"""What planning costs as a swarm grows: `python -m tests.benchmarks.placement_scale [--quick]`.

One line per size: seconds to place, to route, to repair the drop of one volunteer and of one server (the slowest of
several; seconds of one core, so that what else the machine does is left out), what the server's costs to move, and the
peak memory of the process. Exits 1 when 100 servers and 1,000 volunteers take 20 s to place and route, a drop there
takes 1 s to repair, 10,000 volunteers take 90 s to place, or memory passes 2 GB. Up to 3,000 volunteers the drops are
repaired with their routes, beyond in the placement alone.
"""

from __future__ import annotations

import resource
import sys
import time

from coordinator.planning.placement.change import StateBytes, as_it_is, drop
from coordinator.planning.placement.live import LiveSwarm
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.search import PlacementAnswer, search_placement
from coordinator.planning.placement.swarm import member_model, world_of
from coordinator.planning.routes.search import search_routes
from tests.benchmarks.swarms import LAYER_PARAMETERS, seven_billion, swarm

STATE = StateBytes.adamw(LAYER_PARAMETERS, seven_billion().activation_bytes)
SIZES = ((10, 30), (20, 100), (50, 300), (100, 1_000), (100, 3_000), (100, 10_000))


def drops(world: World, found: PlacementAnswer, live: LiveSwarm | None) -> tuple[float, float, float]:
    """Slowest repair of a volunteer's and of a server's drop in seconds, and the most that a server's has to move.

    The servers are the first of each role of the first stages and of the last, the only one of its side among them.
    """
    slowest = {False: 0.0, True: 0.0}
    placement, moved = as_it_is(found.placement), 0.0
    for stage in (*placement.stages[:3], placement.stages[-1]):
        victims = [stage.front[0], stage.back[0], *(world.servers + v for v in stage.volunteers[:2])]
        for machine in victims:
            began = time.process_time()
            if live is not None:
                repair = live.drop(machine).placement
            else:
                repair = drop(placement, frozenset(), machine, STATE)
            server = machine < world.servers
            slowest[server] = max(slowest[server], time.process_time() - began)
            if server:
                moved = max(moved, repair.moved.total_bytes)
    return slowest[False], slowest[True], moved


def main() -> int:
    missed = []
    print(
        f"{'servers':>8s} {'volunteers':>10s} {'stages':>6s} {'left out':>8s} {'routes':>6s} {'place s':>8s} "
        f"{'route s':>8s} {'drop s':>7s} {'server s':>8s} {'moves GB':>8s} {'batch s':>8s} {'recipe s':>8s} "
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
        live = None
        if volunteers <= 3_000:
            began = time.perf_counter()
            routed = member_model(world, found.placement)
            answer = search_routes(routed.model, 0, 4.0)
            route_s = time.perf_counter() - began
            routes, makespan_s = len(answer.routes), answer.makespan_s
            live = LiveSwarm.of(found.placement, routed, answer, STATE)
        drop_s, server_drop_s, moved_bytes = drops(world, found, live)
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{servers:8d} {volunteers:10d} {len(found.placement.stages):6d} {len(found.benched):8d} {routes:6d} "
            f"{place_s:8.2f} {route_s:8.2f} {drop_s:7.3f} {server_drop_s:8.3f} {moved_bytes / 1e9:8.2f} "
            f"{found.batch_s:8.1f} {found.recipe_s:8.1f} {makespan_s:8.1f} {memory_mb:6.0f}",
            flush=True,
        )
        label = f"{servers} servers, {volunteers} volunteers"
        if volunteers == 1_000 and place_s + route_s >= 20:
            missed.append(f"{label}: placed and routed in {place_s + route_s:.1f} s")
        if volunteers == 1_000 and max(drop_s, server_drop_s) >= 1:
            missed.append(f"{label}: a drop took {max(drop_s, server_drop_s):.2f} s")
        if volunteers == 10_000 and place_s >= 90:
            missed.append(f"{label}: placed in {place_s:.1f} s")
        if memory_mb >= 2_000:
            missed.append(f"{label}: {memory_mb:.0f} MB")
    print("\n".join(missed) if missed else "pass")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
