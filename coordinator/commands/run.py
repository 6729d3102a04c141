"""`barnraise plan run RUN.toml NETWORK.json`: the whole plan of a run, before a GPU is spent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import mean

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.commands.placement import listed
from coordinator.commands.written import check_file, write_file
from coordinator.planning.names import short
from coordinator.planning.placement.map_svg import map_svg
from coordinator.planning.placement.run_plan import RunPlan, VolunteerLoad, plan_run
from coordinator.planning.placement.seat_search import WORTH_SHARE
from coordinator.planning.placement.swarm import hops_of
from coordinator.planning.simulator.pictures import svg, terminal
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run
from protocol.schedule.profile import Outlier, load_network

LOADS_SHOWN = 12
ROUTES_SHOWN = 2
SPARES_SHOWN = 6


@click.command("run")
@click.argument("run_toml", type=click.Path(path_type=Path))
@click.argument("network_json", type=click.Path(path_type=Path))
@click.option("--skip", "skip_text", default="0", show_default=True, help="Share of stages skipped: 0.25 or 1/3.")
@click.option("--stages", type=click.IntRange(min=1), help="This many stages instead of the best number.")
@click.option(
    "--shared-uplinks",
    is_flag=True,
    help="Let parallel transfers of a machine share its line while routes are searched.",
)
@click.option("--svg", "svg_path", type=click.Path(path_type=Path), help="Draw map and Gantt: FILE and FILE-gantt.")
@click.option(
    "--budget-s", type=FiniteRange(min=0.0, min_open=True), default=8.0, show_default=True, help="Search time."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the searches.")
def plan_run_command(
    run_toml: Path,
    network_json: Path,
    skip_text: str,
    stages: int | None,
    shared_uplinks: bool,
    svg_path: Path | None,
    budget_s: float,
    seed: int,
) -> None:
    """Plan a run on a measured network: stages, blocks, members, memory, traffic, speed, time to finish, advice."""
    if svg_path is not None:
        check_file("--svg", svg_path)
    config = load_run(run_toml)
    network = load_network(network_json)
    plan = plan_run(
        config,
        network,
        skip=share(skip_text),
        stages=stages,
        seed=seed,
        budget_s=budget_s,
        shared_uplinks=shared_uplinks,
    )
    show(plan)
    given = config.stages
    click.echo(
        f"RUN.toml  its {counted(given.count, 'stage')} of {given.front_servers} front and "
        f"{counted(given.back_servers, 'back server')}\n          "
        f"were not used: the plan chooses {'' if stages is None else 'all but --stages '}itself"
        + (" (--stages N fixes how many)" if stages is None else "")
    )
    if svg_path is not None:
        gantt = svg_path.with_name(f"{svg_path.stem}-gantt{svg_path.suffix or '.svg'}")
        title = f"one step, {plan.simulated_microbatches} microbatches"
        write_file("--svg", svg_path, map_svg(plan))
        write_file("--svg", gantt, svg(plan.timeline, title, row_name="stage", unit="s"))
        Console().print(f"drawn     {svg_path}, {gantt}")


def share(text: str) -> Fraction:
    """0.25, 1/3 or 0.33 as a fraction; decimals with two digits or more snap to thirds, sixths and the like."""
    try:
        exact = Fraction(text.strip())
    except (ValueError, ZeroDivisionError) as error:
        raise BadInputError(f"--skip: {text!r} is not a share like 0.25 or 1/3") from error
    near = exact.limit_denominator(16)
    return near if abs(near - exact) < Fraction(1, 200) else exact


def shortened(outlier: Outlier) -> Outlier:
    """With its machines' names as people read them."""
    return replace(outlier, source=short(outlier.source), target=short(outlier.target))


def counted(number: int, word: str) -> str:
    """`1 stage`, `2 stages`."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def duration(seconds: float) -> str:
    """`24.5 s`, `3.2 minutes`, `7.1 hours` or `12.0 days`."""
    for least, each, name in ((2 * 86_400, 86_400, "days"), (3_600, 3_600, "hours"), (120, 60, "minutes")):
        if seconds >= least:
            return f"{seconds / each:,.1f} {name}"
    return f"{seconds:.3g} s"


def show(plan: RunPlan) -> None:
    """Prints the plan as tables and sentences."""
    console = Console()
    for outlier in plan.network.outliers:
        console.print(f"doubtful  {shortened(outlier)}", markup=False)
    names = [short(machine.name) for machine in plan.network.machines]
    stages, paces = plan.plan.stages, plan.plan.paces
    used = plan.network.servers - len(plan.found.spares)
    title = f"{counted(len(stages), 'stage')} on {used} of {plan.network.servers} servers"
    table = Table(title=title, title_justify="left")
    for heading in ("stage", "blocks", "front | back", "volunteers", "GB", "step s", "waits for"):
        left = heading in ("front | back", "waits for")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "front | back")
    for k, (stage, pace) in enumerate(zip(stages, paces, strict=True)):
        front = " ".join(names[j] for j in stage.front[:4]) + (" …" if len(stage.front) > 4 else "")
        back = " ".join(names[j] for j in stage.back[:4]) + (" …" if len(stage.back) > 4 else "")
        memory = max([load.memory_bytes for load in plan.loads if load.stage == k] + [_server_bytes(plan, k)])
        table.add_row(
            str(k),
            f"{stage.first_block}–{stage.end_block - 1}",
            f"{front} | {back}",
            str(len(stage.volunteers)),
            f"{memory / 1e9:.2f}",
            f"{pace.pace_s:.3g}",
            "servers" if pace.lines_s > pace.pool_s else pace.binds,
        )
    console.print(table)
    console.print("          GB: most that one member holds; step: shortest that the stage allows")
    console.print(f"pace      {_pace_words(plan)}")
    _show_loads(console, plan.loads)
    if plan.found.idle:
        why = Counter(reason for _, reason in plan.found.idle)
        words = ", ".join(f"{number} for their {reason}" for reason, number in sorted(why.items()))
        console.print(
            f"idle      {counted(len(plan.found.idle), 'volunteer')} that cannot finish a microbatch and its gradient\n"
            f"          within a step: {words}"
        )
    if plan.found.spares:
        console.print(f"spare     {counted(len(plan.found.spares), 'server')} that would not make the plan faster:")
        console.print(f"          {listed([names[j] for j in plan.found.spares], SPARES_SHOWN)}", markup=False)
    _show_routes(console, plan, names)
    if plan.sizes.recompute:
        console.print("memory    every block keeps its input only and runs its forward again before its backward")
    fraction = f"{plan.found.fraction_of_bound:.0%} of the bound {plan.found.lower_bound_s:.4g} s"
    console.print(f"step      {plan.step_s:.4g} s, {fraction}; {plan.found.stopped}")
    even = plan.found.even
    console.print(
        f"          {counted(len(even.stages), 'stage')} cut evenly, servers and volunteers in turn: "
        + (f"{even.step_s:.4g} s" if even.feasible else "impossible")
    )
    if even.feasible and even.step_s > plan.step_s >= (1.0 - WORTH_SHARE) * even.step_s:
        console.print(f"          a coordinator begins with those: the cost is true to {WORTH_SHARE:.0%} or so")
    console.print(f"          one microbatch's whole way, there and back: {plan.plan.crossing_s:.3g} s")
    console.print(f"speed     {plan.tokens_per_s:,.0f} tokens per second; all steps in {duration(plan.finish_s)}")
    for advice in plan.advice:
        console.print(
            f"advice    {advice.change} and {counted(advice.stages, 'stage')}: {advice.times:.1f} times as much",
            markup=False,
            highlight=False,
        )
    console.print(
        f"pipeline  {plan.simulated_microbatches} microbatches simulated in {plan.timeline.makespan_s:.4g} s",
        end="\n\n",
    )
    if len(stages) <= 24:
        click.echo(terminal(plan.timeline, width=min(100, console.width) - 5, colour=console.is_terminal))


def _pace_words(plan: RunPlan) -> str:
    found = plan.plan
    stage = found.paces[found.worst].pace_s
    if found.crossing_s / 2 > found.pace_s and plan.sizes.delayed:
        return "one microbatch's way through all stages sets it"
    if found.hops_s and max(found.hops_s) > stage:
        hop = found.hops_s.index(max(found.hops_s))
        return f"the lines between stages {hop} and {hop + 1} set it"
    return f"stage {found.worst} sets it"


def _show_routes(console: Console, plan: RunPlan, names: list[str]) -> None:
    """Where stages are skipped: the way of some microbatches, each whole to one member of a stage."""
    if plan.routes is None or plan.routed is None or plan.placement is None:
        return
    shares = " and shares its lines" if plan.shared_uplinks else ""
    console.print(
        f"routes    {len(plan.routes.routes)} at once, in {plan.routes.makespan_s:.4g} s "
        f"({plan.routes.fraction_of_bound:.0%} of the bound) when each microbatch\n"
        f"          goes whole to one member of a stage{shares}"
    )
    for number, route in enumerate(plan.routes.routes[:ROUTES_SHOWN]):
        for place, hop in enumerate(hops_of(plan.placement, plan.routed, route)):
            head = f"route {number}:" if place == 0 else ""
            way = f"{names[hop.front]} > {names[hop.member]} > {names[hop.back]}"
            console.print(f"          {head:9}{way}", markup=False)


def _server_bytes(plan: RunPlan, stage: int) -> float:
    """What stands on each server of a stage: its shard of weights and moments; activations go to disk when large."""
    own = plan.plan.stages[stage]
    parameters = plan.sizes.parameters[own.end_block] - plan.sizes.parameters[own.first_block]
    return float(plan.sizes.server_held_bytes * parameters) / len(own.servers)


def _show_loads(console: Console, loads: tuple[VolunteerLoad, ...]) -> None:
    if not loads:
        console.print("volunteers  none take part")
        return
    table = Table(title="volunteers", title_justify="left")
    for heading in ("name", "stage", "memory", "GB an hour up", "down"):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for load in loads[:LOADS_SHOWN]:
        table.add_row(
            short(load.name),
            str(load.stage),
            f"{load.memory_bytes / 1e9:.2f} GB",
            f"{load.up_gb_per_hour:.2f}",
            f"{load.down_gb_per_hour:.2f}",
        )
    console.print(table)
    if len(loads) > LOADS_SHOWN:
        console.print(
            f"and {len(loads) - LOADS_SHOWN} more: {mean(load.up_gb_per_hour for load in loads):.2f} GB an hour up "
            f"and {mean(load.down_gb_per_hour for load in loads):.2f} down on average"
        )
