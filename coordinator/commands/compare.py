"""`barnraise plan compare NETWORK.json`: the ways to route, side by side, on equal microbatch counts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.commands.run import share, shortened
from coordinator.planning.placement.run_plan import sizes_of, skipped_stages
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import member_model, world_of
from coordinator.planning.routes.astar import Planner
from coordinator.planning.routes.baselines import (
    delay_blind,
    fixed_chains,
    full_length,
    greedy_full,
    no_collisions,
    online_router,
)
from coordinator.planning.routes.bounds import lower_bound, unplanned_bound
from coordinator.planning.routes.evaluate import Evaluator
from coordinator.planning.routes.model import RouteModel
from coordinator.planning.routes.search import search_routes
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run
from protocol.run.run import RunConfig
from protocol.schedule.profile import load_network

ONLINE_RUNS = 10
MEMBERS_MAX = 400


@dataclass(frozen=True)
class Compared:
    """One way to route: its makespan and the bound of its own rules (with or without skipping)."""

    name: str
    skips: bool
    makespan_s: float
    bound_s: float


@click.command("compare")
@click.argument("network_json", type=click.Path(path_type=Path))
@click.option("--run", "run_toml", type=click.Path(path_type=Path), help="The model; the demo's without it.")
@click.option("--stages", type=click.IntRange(min=2), help="This many stages. [default: the fewest that fit.]")
@click.option("--skip", "skip_text", default="0.25", show_default=True, help="Share of stages skipped: 0.25 or 1/3.")
@click.option(
    "--budget-s", type=FiniteRange(min=0.0, min_open=True), default=8.0, show_default=True, help="Search time."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the searches.")
def plan_compare(
    network_json: Path, run_toml: Path | None, stages: int | None, skip_text: str, budget_s: float, seed: int
) -> None:
    """Compare the planner's routes with fixed chains, greedy, delay-blind, collision-blind and online
    routing.
    """
    network = load_network(network_json)
    sizes = sizes_of(load_run(run_toml) if run_toml is not None else RunConfig())
    skip = share(skip_text)
    world = world_of(network, sizes, closed=True)
    world.check()
    if stages is None:
        counts = [
            n for n in range(max(2, world.stages_min), world.stages_max + 1) if skipped_stages(n, skip) is not None
        ]
        if not counts:
            raise BadInputError(
                f"--skip: {skip_text} of the stages is no whole number for {max(2, world.stages_min)} to "
                f"{world.stages_max} stages"
            )
        stages = counts[0]
    skipped = skipped_stages(stages, skip)
    if skipped is None:
        raise BadInputError(f"--skip: {skip_text} of {stages} stages is no whole number")
    placement = search_placement(world, seed, 0.3 * budget_s, stages=stages).placement
    model = member_model(world, placement, skip_stages=skipped).model
    if model.nodes > MEMBERS_MAX:
        raise BadInputError(f"machines: {model.nodes} members take part; at most {MEMBERS_MAX} are compared")
    console = Console()
    for outlier in network.outliers:
        console.print(f"doubtful  {shortened(outlier)}", markup=False)
    rows = compare(model, seed, 0.6 * budget_s)
    table = Table(
        title=f"{sum(model.sends)} microbatches, {stages} stages, {model.nodes} members", title_justify="left"
    )
    for heading in ("way", "skips", "makespan", "of the bound", "against chains"):
        table.add_column(heading, justify="left" if heading in ("way", "skips") else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(skipped) if row.skips else "–",
            f"{row.makespan_s:.4g} s",
            f"{row.bound_s / row.makespan_s:.0%}",
            f"{row.makespan_s / rows[0].makespan_s:.2f}",
        )
    console.print(table)


def compare(model: RouteModel, seed: int, budget_s: float) -> list[Compared]:
    """All ways on one skipping model, the chains first; the full-length ones on `full_length(model)`."""
    full = full_length(model)
    judge, judge_full = Evaluator(model), Evaluator(full)
    bound_full = lower_bound(full, Planner(full))
    bound = lower_bound(model, Planner(model))
    searched_full = search_routes(full, seed, budget_s / 2)
    searched = search_routes(model, seed, budget_s / 2)
    online = sum(online_router(full, seed + number) for number in range(ONLINE_RUNS)) / ONLINE_RUNS
    rows = [
        Compared("fixed chains (DT-FM)", False, max(judge_full.ends(fixed_chains(full))), bound_full),
        Compared("online router (SWARM)", False, online, unplanned_bound(full, Planner(full))),
        Compared("greedy full length", False, max(judge_full.ends(greedy_full(full))), bound_full),
        Compared("planned full length", False, searched_full.makespan_s, max(bound_full, searched_full.lower_bound_s)),
    ]
    if model.route_stages < model.stages:
        rows += [
            Compared("skipping, delay-blind", True, max(judge.ends(delay_blind(model, seed))), bound),
            Compared("skipping, collision-blind", True, max(judge.ends(no_collisions(model, seed))), bound),
            Compared("skipping, planned", True, searched.makespan_s, max(bound, searched.lower_bound_s)),
        ]
    return rows
