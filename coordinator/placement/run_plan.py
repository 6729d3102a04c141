"""A whole plan for a run on a measured network: stages, blocks, members, routes, and what they cost whom.

Measure -> place -> partition -> route -> simulate. The placement decides who stands in which stage; the
AutoPipe partition then cuts the model's sub-layer blocks for the power of those stages; the event-driven
simulator plays one step of the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from coordinator.costs import StagePower
from coordinator.model_costs import CostRules, block_costs
from coordinator.partition import partition
from coordinator.placement.cost import Stage, StageCost
from coordinator.placement.search import PlacementAnswer, search_placement
from coordinator.placement.swarm import ModelSizes, SwarmRoutes, member_model, world_of
from coordinator.placement.uplinks import swarm_sharing
from coordinator.routes.search import RoutesAnswer, search_routes, search_shared
from coordinator.schedules.design import Design
from coordinator.simulator.graph import Costs, StageCosts
from coordinator.simulator.links import Network as SimulatedNetwork
from coordinator.simulator.pipeline import Timeline
from protocol.errors import BadInputError
from protocol.model_spec import ModelSpec, blocks_of
from protocol.profile import Network
from protocol.run import RunConfig

ROUTED_MEMBERS_MAX = 4_000
SIMULATED_MICROBATCHES_MAX = 64
VOCABULARY_DEFAULT = 32_000
SKIP_DENOMINATOR_MAX = 64


@dataclass(frozen=True)
class VolunteerLoad:
    """What taking part means for one volunteer."""

    name: str
    stage: int
    memory_bytes: float
    gigabytes_per_hour: float


@dataclass(frozen=True)
class RunPlan:
    """The answer of `plan run`. Blocks of stage k are edges[k] up to edges[k + 1] - 1; times in seconds."""

    network: Network
    sizes: ModelSizes
    recompute: bool
    found: PlacementAnswer
    stages: tuple[Stage, ...]
    costs: tuple[StageCost, ...]
    edges: tuple[int, ...]
    timeline: Timeline
    simulated_microbatches: int
    routed: SwarmRoutes | None
    routes: RoutesAnswer | None
    shared_uplinks: bool
    loads: tuple[VolunteerLoad, ...]
    step_s: float
    tokens_per_s: float
    finish_s: float


def vocabulary_of(tokenizer: str) -> int:
    """The vocabulary as far as the config tells it; a tokenizer file counts as `VOCABULARY_DEFAULT`."""
    if tokenizer == "bytes":
        return 259
    if tokenizer.startswith("bpe:") and tokenizer[4:].isdigit():
        return max(1, int(tokenizer[4:]))
    return VOCABULARY_DEFAULT


def sizes_of(config: RunConfig, recompute: bool = False) -> ModelSizes:
    """A run's model per layer: the two halves of a transformer layer together; the head counts as spread
    evenly.

    With `recompute` a member keeps only each half's input and runs its forward again before the backward.
    """
    spec = ModelSpec.of_run(config.model, vocabulary_of(config.data.tokenizer))
    blocks = blocks_of(spec)
    layers = spec.layers
    value_bytes = 2 if config.wire.activations == "bf16" else 4
    gradient_bytes = 2 if config.wire.gradients == "bf16" else 4
    parameters = sum(block.parameters for block in blocks) / layers
    forward_flops = sum(block.forward_flops for block in blocks) / layers
    backward_flops = sum(block.backward_flops for block in blocks) / layers
    kept_values = sum(block.kept_values for block in blocks) / layers
    if recompute:
        backward_flops += forward_flops
        kept_values = 2.0 * spec.boundary_values
    return ModelSizes(
        layers=layers,
        microbatch_tokens=config.batch.samples * config.model.context,
        microbatches=config.batch.microbatches,
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        held_bytes=8.0 * parameters,
        server_held_bytes=12.0 * parameters,
        kept_bytes=4.0 * kept_values,
        activation_bytes=float(value_bytes * spec.boundary_values),
        gradient_bytes=gradient_bytes * parameters,
        delayed=config.batch.delay == 1,
    )


def skipped_stages(stages: int, skip: Fraction) -> int | None:
    """How many of `stages` a microbatch skips, or None: no whole number, or nothing left beside stage 0."""
    skipped = stages * skip
    return int(skipped) if skipped.denominator == 1 and skipped <= max(0, stages - 2) else None


def plan_run(
    config: RunConfig,
    network: Network,
    *,
    skip: Fraction = Fraction(0),
    stages: int | None = None,
    seed: int = 0,
    budget_s: float = 8.0,
    shared_uplinks: bool = False,
) -> RunPlan:
    """The plan of a run; members recompute forwards only when nothing fits otherwise.

    The placement always counts what volunteers share of their servers' lines. With `shared_uplinks` the routes do as
    well: parallel transfers of a machine share its lines, in the search and in the times of the answer.

    Raises `BadInputError` saying what is missing when there is no plan.
    """
    recompute = False
    sizes = sizes_of(config)
    try:
        found, skip_stages = _placed(network, sizes, skip, stages, seed, 0.6 * budget_s)
    except BadInputError:  # perhaps only for lack of memory
        recompute = True
        sizes = sizes_of(config, recompute)
        found, skip_stages = _placed(network, sizes, skip, stages, seed, 0.6 * budget_s)
    placement = found.placement
    world = placement.costs.world
    members = world.servers + world.volunteers - len(found.benched) - len(found.spares)
    routed = routes = None
    if members <= ROUTED_MEMBERS_MAX:
        routed = member_model(world, placement, skip_stages=skip_stages)
        if shared_uplinks:
            routes = search_shared(routed.model, swarm_sharing(placement, routed), seed, 0.3 * budget_s)
        else:
            routes = search_routes(routed.model, seed, 0.3 * budget_s)
    details = placement.detail()
    edges, timeline, simulated = simulated_step(config, sizes, found, seed, recompute)
    step_s = found.batch_s
    tokens = sizes.microbatches * sizes.microbatch_tokens
    return RunPlan(
        network,
        sizes,
        recompute,
        found,
        tuple(placement.stages),
        tuple(details),
        edges,
        timeline,
        simulated,
        routed,
        routes,
        shared_uplinks,
        tuple(_loads(network, sizes, found)),
        step_s,
        tokens / step_s,
        config.steps * step_s,
    )


def _placed(
    network: Network, sizes: ModelSizes, skip: Fraction, stages: int | None, seed: int, budget_s: float
) -> tuple[PlacementAnswer, int]:
    """The placement and how many stages each microbatch skips."""
    if not 0 <= skip < 1 or skip.denominator > SKIP_DENOMINATOR_MAX:
        raise BadInputError(f"--skip: {float(skip):g} is not a share below 1 like 0.25 or 1/3")
    world = world_of(network, sizes, closed=skip > 0)
    if not skip:
        return search_placement(world, seed, budget_s, stages=stages), 0
    world.check()
    counts = range(world.stages_min, world.stages_max + 1) if stages is None else (stages,)
    possible = [(count, skipped) for count in counts if (skipped := skipped_stages(count, skip))]
    if not possible:
        raise BadInputError(
            f"--skip: {float(skip):g} of the stages is no whole number for any count that {world.servers} servers "
            f"and {world.layers} layers allow ({world.stages_min} to {world.stages_max} stages)"
        )
    best: tuple[PlacementAnswer, int] | None = None
    failure: BadInputError | None = None
    for count, skipped in possible[:6]:
        try:
            found = search_placement(
                replace(world, skip_stages=skipped), seed, budget_s / min(6, len(possible)), stages=count
            )
        except BadInputError as error:
            failure = error
            continue
        if best is None or found.batch_s < best[0].batch_s:
            best = found, skipped
    if best is None:
        assert failure is not None
        raise failure
    return best


def simulated_step(
    config: RunConfig, sizes: ModelSizes, found: PlacementAnswer, seed: int, recompute: bool
) -> tuple[tuple[int, ...], Timeline, int]:
    """Block edges by the AutoPipe partition for the stages' powers, and one step on the event simulator.

    A stage's members work side by side, so a stage is one node of the simulation, with the transfers of its
    slowest member half in the forward and half in the backward. Large batches are shortened: a step repeats
    itself.
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


def _loads(network: Network, sizes: ModelSizes, found: PlacementAnswer) -> list[VolunteerLoad]:
    """Memory and traffic of every volunteer that takes part, in stage order."""
    world = found.placement.costs.world
    loads = []
    for k, (stage, cost) in enumerate(zip(found.placement.stages, found.placement.detail(), strict=True)):
        for volunteer in sorted(stage.volunteers):
            tokens = sizes.microbatch_tokens * float(world.volunteer_power[volunteer]) / cost.power
            tokens *= cost.visit_share
            # Activation in and out, gradient in and out; gradients up and parameters down once per step.
            step_bytes = 4 * tokens * sizes.activation_bytes * sizes.microbatches
            step_bytes += 2 * cost.layers * sizes.gradient_bytes
            kept = min(sizes.in_flight, sizes.microbatches) * tokens * cost.layers * sizes.kept_bytes
            loads.append(
                VolunteerLoad(
                    network.machines[world.servers + volunteer].name,
                    k,
                    cost.layers * sizes.held_bytes + kept,
                    step_bytes * 3600 / found.batch_s / 1e9,
                )
            )
    return loads
