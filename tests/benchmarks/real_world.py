"""The hybrid paper's real-world experiment in shape: `python -m tests.benchmarks.real_world [--layouts]`.

Two sites of three strong GPUs (RTX 4090), six weaker machines at homes (RTX 3080) of which four are unreliable; a LLaMA
of 33 billion parameters. The paper shows its links only as a picture, so these are ours: 10 Gbit/s and 0.2 ms inside a
site, the table's rate and 30 ms between the sites, home lines with the uplink of the table, three times as much down,
and 20 ms to anywhere. Parameters and optimizer state stand in host memory as in the paper (384 GB at a site, 256 GB at
home, so that every layout fits), and travel in bf16.

The first table plays the paper's own three configurations on the event simulator, over the rate between the sites and
the chance that an unreliable machine leaves during a batch (the paper tries 10 to 90 %), and says which wins. What is
modelled: a stage's work and transfers, the pipeline with its fill and drain, aggregation beside the next step (the step
lasts as long as the longer of the two), and for a machine that leaves with chance p: half its work on average, a
time-out of two microbatches until its tasks are in the pool, and its microbatches in flight done again by the others.
Not modelled: what the paper's implementation does besides, and its measured link matrix.

The second table (left out with `--layouts`) is our own search for two, three and four stages over home uplinks and
batch sizes. With a file name as argument the network is written there, for `barnraise plan run`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from pathlib import Path

import msgspec

from coordinator.planning.partition.costs import StagePower
from coordinator.planning.partition.model_costs import CostRules, block_costs
from coordinator.planning.partition.planner import partition
from coordinator.planning.placement.cost import Costs as PlacementCosts
from coordinator.planning.placement.cost import Placement, Stage
from coordinator.planning.placement.problem import World
from coordinator.planning.placement.run_plan import SIMULATED_MICROBATCHES_MAX, plan_run, sizes_of
from coordinator.planning.placement.run_sizes import vocabulary_of
from coordinator.planning.placement.search import PlacementAnswer
from coordinator.planning.placement.swarm import ModelSizes, world_of
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.graph import Costs, StageCosts
from coordinator.planning.simulator.links import Network as SimulatedNetwork
from coordinator.planning.simulator.pipeline import Timeline
from protocol.base.errors import BadInputError
from protocol.run.model_spec import ModelSpec
from protocol.run.run import BatchSection, DataSection, ModelSection, RunConfig, WireSection
from protocol.schedule.profile import Link, Machine, Network, NetworkFile, SiteLink, build_network

STRONG_FLOPS, WEAK_FLOPS = 6e13, 2.5e13
HOMES, HOMES_RELIABLE = 6, 2
BETWEEN_MBIT = (50.0, 200.0, 1000.0)
HOME_UP_MBIT = (50.0, 200.0)
BATCHES = ((64, 1), (64, 8), (64, 64))
LEAVES = (0.0, 0.3, 0.9)
TIMEOUT_MICROBATCHES = 2


def simulated_step(
    config: RunConfig, sizes: ModelSizes, found: PlacementAnswer, seed: int, recompute: bool
) -> tuple[tuple[int, ...], Timeline, int]:
    """Block edges by the AutoPipe partition for a *placement's* powers, and one step on the event simulator.

    This is the hybrid parameter-server paper's own way: a stage's members work side by side on parts of every
    microbatch, so a stage is one node of the simulation, with the transfers of its slowest member half in the forward
    and half in the backward. Large batches are shortened: a step repeats itself.
    """
    details = found.placement.detail()
    spec = ModelSpec.of_run(config.model, vocabulary_of(config.data.tokenizer))
    mean_power = sum(detail.power for detail in details) / len(details)
    layer_flops = sizes.forward_flops + sizes.backward_flops
    blocks = block_costs(spec, CostRules(flops_per_s=mean_power * layer_flops, tokens=sizes.microbatch_tokens))
    count = len(details)
    links = [detail.hop_out_s for detail in details[:-1]]
    microbatches = min(sizes.microbatches, SIMULATED_MICROBATCHES_MAX)
    # Members share the activations in flight, which the placement has counted; here only what stands per
    # layer.
    still = [replace(block, activation_bytes=0.0) for block in blocks]
    largest = max(block.parameter_bytes for block in still)
    for slack in (0.0, largest):  # blocks are coarser than layers: an embedding may need a block's worth of room
        powers = [
            StagePower(
                speed=detail.power / mean_power / detail.visit_share,
                memory_bytes=found.placement.most[k] * sizes.held_bytes + slack,
            )
            for k, detail in enumerate(details)
        ]
        try:
            cut = partition(still, powers, microbatches, links, seed=seed)
            break
        except BadInputError:
            if slack:
                raise
    stage_costs = [
        StageCosts(
            forward_s=cut.forward_s[k] * detail.visit_share + detail.transfer_s / 2,
            backward_input_s=cut.backward_s[k] * detail.visit_share / 2 + detail.transfer_s / 4,
            backward_weight_s=cut.backward_s[k] * detail.visit_share / 2 + detail.transfer_s / 4,
        )
        for k, detail in enumerate(details)
    ]
    best: Timeline | None = None
    for factor in (1, 2, 3):  # long links want more microbatches in flight
        design = Design.of(count, microbatches).order("backward")
        design = design.in_flight(lambda node, factor=factor: factor * (count - node))  # type: ignore[misc]
        timeline = design.timeline(Costs(stage_costs), SimulatedNetwork.line(links))
        if best is None or timeline.makespan_s < best.makespan_s * 0.999:
            best = timeline
    assert best is not None
    return tuple(cut.edges), best, microbatches


def network_file(home_up_mbit: float = 100.0, between_mbit: float = 500.0) -> NetworkFile:
    """The machines and links of the experiment."""
    machines, links = [], []
    for site in ("cloud", "campus"):
        for number in range(3):
            machines.append(
                Machine(
                    name=f"{site}-{number}",
                    role="server",
                    site=site,
                    forward_flops_per_s=STRONG_FLOPS,
                    backward_flops_per_s=STRONG_FLOPS,
                    memory_bytes=384 * 10**9,
                    uplink_bytes_per_s=1.25e9,
                    downlink_bytes_per_s=1.25e9,
                )
            )
    up = home_up_mbit * 1e6 / 8
    for number in range(HOMES):
        machines.append(
            Machine(
                name=f"home-{number}",
                role="server" if number < HOMES_RELIABLE else "volunteer",
                forward_flops_per_s=WEAK_FLOPS,
                backward_flops_per_s=WEAK_FLOPS,
                memory_bytes=256 * 10**9,
                uplink_bytes_per_s=up,
                downlink_bytes_per_s=3 * up,
            )
        )
    servers = [machine for machine in machines if machine.role == "server"]
    for home in machines[6:]:
        for server in servers:
            if (home.name < server.name and server.name.startswith("home")) or not server.name.startswith("home"):
                links.append(Link(source=home.name, target=server.name, latency_s=0.02, bytes_per_s=up))
                links.append(Link(source=server.name, target=home.name, latency_s=0.02, bytes_per_s=3 * up))
            elif home.role == "volunteer":
                links.append(Link(source=home.name, target=server.name, latency_s=0.02, bytes_per_s=up))
    sites = (
        SiteLink(a="cloud", b="cloud", latency_s=0.0002, bytes_per_s=1.25e9),
        SiteLink(a="campus", b="campus", latency_s=0.0002, bytes_per_s=1.25e9),
        SiteLink(a="cloud", b="campus", latency_s=0.03, bytes_per_s=between_mbit * 1e6 / 8),
    )
    return NetworkFile(kind="network", machines=tuple(machines), links=tuple(links), sites=sites)


def run_config(microbatches: int, samples: int) -> RunConfig:
    """LLaMA-33B: 60 layers, hidden 6,656, samples of 512 tokens as in the paper."""
    return RunConfig(
        name="real-world",
        steps=1_000,
        model=ModelSection(layers=60, hidden=6656, heads=52, kv_heads=52, feed_forward=17_920, context=512),
        data=DataSection(tokenizer="bpe:32000"),
        batch=BatchSection(microbatches=microbatches, samples=samples),
        wire=WireSection(activations_up="bf16", activations_down="bf16", gradients="bf16", parameters="bf16"),
    )


LAYOUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((0, 1, 2, 6), (3, 4, 5, 7)),
    3: ((0, 1, 2), (6, 7), (3, 4, 5)),
    4: ((0, 1), (2, 3), (4, 5), (6, 7)),
}
"""The paper's three configurations: servers 0-2 in the cloud, 3-5 on the campus, 6 and 7 at reliable homes.
Two: homes
join the sites. Three: a stage per site and one of homes. Four: the sites are split into three stages."""


def best_of_layout(world: World, stages: int) -> list[Placement]:
    """The paper's layout with the best order and roles: without volunteers, and with the best stage for each of them.

    Best by Eq. 1-2; what the simulator says of the two is another matter, so both are answered.
    """
    costs = PlacementCosts(world)
    best: Placement | None = None
    for members in permutations(LAYOUTS[stages]):
        if members[0] > members[-1]:
            continue  # the same line from its other end
        placement = Placement(costs, [Stage(servers[:1], servers[1:], ()) for servers in members])
        placement = with_best_roles(placement, members)
        best = placement if best is None or placement.score < best.score else best
    assert best is not None, "a layout has an order"
    found = best
    for where in product(range(-1, stages), repeat=world.volunteers):
        chosen = [tuple(v for v, k in enumerate(where) if k == stage) for stage in range(stages)]
        tried = best.replaced({k: Stage(s.front, s.back, chosen[k]) for k, s in enumerate(best.stages)})
        found = tried if tried.score < found.score else found
    return [best, found]


def with_best_roles(placement: Placement, members: Sequence[tuple[int, ...]]) -> Placement:
    """Stage after stage, the best cut of its servers into front and back."""
    for k, servers in enumerate(members):
        for count in range(1, len(servers)):
            for front in combinations(servers, count):
                back = tuple(j for j in servers if j not in front)
                tried = placement.replaced({k: Stage(front, back, ())})
                placement = tried if tried.score < placement.score else placement
    return placement


def simulated_layout_s(config: RunConfig, network: Network, stages: int, leaves: float) -> tuple[float, str]:
    """Seconds of a step of the paper's layout, and what sets them, when each volunteer leaves a batch with chance
    `leaves`.

    Infinite where no memory allows it, with or without recomputing forwards.
    """
    for recompute in (False, True):
        sizes = sizes_of(config, recompute=recompute)
        world = world_of(network, sizes)
        world = replace(world, volunteer_power=world.volunteer_power * (1 - leaves / 2))
        possible = [one for one in best_of_layout(world, stages) if math.isfinite(one.cost_s)]
        if possible:
            return min(simulated_placement_s(config, sizes, one, leaves, recompute) for one in possible)
    return math.inf, "memory"


def simulated_placement_s(
    config: RunConfig, sizes: ModelSizes, placement: Placement, leaves: float, recompute: bool
) -> tuple[float, str]:
    """One placement's step on the simulator: seconds, and what sets them."""
    world = placement.costs.world
    found = PlacementAnswer(placement, placement.cost_s, 0.0, 0.0, "given", (), ())
    _, timeline, simulated = simulated_step(config, sizes, found, 0, recompute)
    pipeline_s = timeline.makespan_s * sizes.microbatches / simulated
    detail = placement.detail()
    again_s = 0.0
    for stage, cost in zip(placement.stages, detail, strict=True):
        share = float(world.volunteer_power[list(stage.volunteers)].sum()) / cost.power
        redone_s = min(sizes.in_flight, sizes.microbatches) * share * cost.work_s
        again_s = max(again_s, leaves * (len(stage.volunteers) * TIMEOUT_MICROBATCHES * cost.total_s + redone_s))
    exchange_s = max(cost.exchange_s for cost in detail)
    step_s = max(pipeline_s + again_s, exchange_s)
    return step_s, "aggregation" if step_s == exchange_s else "pipeline"


def layouts_table() -> None:
    """Which of the paper's layouts wins under which conditions."""
    print("simulated step seconds of the paper's layouts (two / three / four stages), and which is fastest")
    print(
        f"{'between':>9s} {'home up':>9s} {'batch tokens':>12s} " + " ".join(f"{f'{p:.0%} leave':>28s}" for p in LEAVES)
    )
    seen: dict[int, int] = {2: 0, 3: 0, 4: 0}
    by_batch: dict[int, list[bool]] = {}
    by_rate: dict[float, list[bool]] = {}
    why: dict[str, int] = {"aggregation": 0, "pipeline": 0}
    for microbatches, samples in BATCHES:
        for between, home_up in product(BETWEEN_MBIT, HOME_UP_MBIT):
            config = run_config(microbatches, samples)
            network = build_network(network_file(home_up, between))
            cells = []
            for leaves in LEAVES:
                step = {stages: simulated_layout_s(config, network, stages, leaves) for stages in LAYOUTS}
                best = winners({stages: cell[0] for stages, cell in step.items()})
                times = "/".join(f"{step[s][0]:.0f}" if math.isfinite(step[s][0]) else "-" for s in LAYOUTS)
                cells.append(f"{times:>20s} {'='.join(map(str, best)):>7s}")
                for stages in best if len(best) == 1 else ():
                    seen[stages] += 1
                by_batch.setdefault(microbatches * samples * 512, []).append(best == [3])
                by_rate.setdefault(between, []).append(best == [3])
                why[step[best[0]][1]] += 1
            print(
                f"{between:4.0f} Mbit {home_up:4.0f} Mbit {microbatches * samples * 512:12,d} " + " ".join(cells),
                flush=True,
            )
    total = sum(map(len, by_batch.values()))
    print(
        f"alone fastest in {total} conditions: two stages in {seen[2]}, three in {seen[3]}, four in {seen[4]}; "
        "three by batch: "
        + ", ".join(f"{sum(won)} of {len(won)} at {tokens:,d} tokens" for tokens, won in by_batch.items())
    )
    print(
        "three by rate between the sites: "
        + ", ".join(f"{sum(won)} of {len(won)} at {rate:.0f} Mbit/s" for rate, won in by_rate.items())
    )
    print(
        f"the fastest is paced by the pipeline in {why['pipeline']} conditions, by aggregation in {why['aggregation']}"
    )


def winners(step_s: dict[int, float]) -> list[int]:
    """The numbers of stages within 1 % of the fastest."""
    least = min(step_s.values())
    return [stages for stages, seconds in step_s.items() if seconds <= 1.01 * least]


def main() -> int:
    if "--layouts" in sys.argv:
        layouts_table()
        return 0
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(msgspec.to_builtins(network_file()), indent=1) + "\n")
        return 0
    layouts_table()
    print("\nour placements: step seconds by Eq. 1-2 with gradient traffic; in brackets the simulated pipeline alone")
    print(f"{'home up':>9s} {'batch tokens':>12s} " + " ".join(f"{name:>18s}" for name in ("two", "three", "four")))
    for home_up_mbit in (20.0, 100.0, 300.0, 1000.0):
        for microbatches, samples in ((64, 1), (64, 16), (256, 64)):
            config = run_config(microbatches, samples)
            network = build_network(network_file(home_up_mbit))
            cells: dict[int, tuple[float, float]] = {}
            for stages in (2, 3, 4):
                plan = plan_run(config, network, stages=stages, budget_s=2.0)
                scale = microbatches / plan.simulated_microbatches
                cells[stages] = (plan.step_s, plan.timeline.makespan_s * scale)
            text = " ".join(f"{cells[s][0]:9.1f} ({cells[s][1]:6.1f})" for s in (2, 3, 4))
            best = winners({stages: cell[0] for stages, cell in cells.items()})
            tokens = microbatches * samples * 512
            print(f"{home_up_mbit:4.0f} Mbit {tokens:12,d} {text}  {'='.join(map(str, best))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
