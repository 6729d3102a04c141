"""`barnraise simulate RUN.toml NETWORK.json`: the machines that would run the run, in a simulated world."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.commands.written import check_file, write_file
from coordinator.world.churn import load_churn, no_churn
from coordinator.world.figures import figures_of
from coordinator.world.members import members
from coordinator.world.picture import picture
from coordinator.world.swarm import Swarm
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run
from protocol.schedule.profile import load_network

GB = 1e9


@click.command()
@click.argument("run_toml", type=click.Path(path_type=Path), metavar="RUN.toml")
@click.argument("network_json", type=click.Path(path_type=Path), metavar="NETWORK.json")
@click.option("--hours", type=FiniteRange(0.0, 24 * 31, min_open=True), default=1.0, show_default=True)
@click.option(
    "--churn", type=click.Path(path_type=Path), metavar="TRACE.csv",
    help="Who comes and goes: milliseconds,add|remove,name a line. Without it all come at the beginning and stay.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Of all delays that are drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Write the picture to this file.")
def simulate(
    run_toml: Path, network_json: Path, hours: float, churn: Path | None, seed: int, as_json: bool, svg: Path | None
) -> None:
    """Run the production machines of RUN.toml on NETWORK.json in simulated time, and say what they made of it."""
    if svg is not None:  # before hours are simulated for a picture that has no place
        check_file("--svg", svg)
    config, network = load_run(run_toml), load_network(network_json)
    names = [machine.name for machine in network.machines[network.servers :]]
    trace = no_churn(names) if churn is None else load_churn(churn, names)
    if churn is not None and not names:
        raise BadInputError(f"{network_json.name}: has no volunteer whom a trace could move")
    swarm = Swarm(config, network, trace, seed, members())
    began = time.perf_counter()
    swarm.run(hours * 3600.0)
    took_s = time.perf_counter() - began
    figures = figures_of(swarm, seed)
    if svg is not None:
        write_file("--svg", svg, picture(swarm))
    if as_json:
        click.echo(json.dumps(figures))
    else:
        show(figures, took_s)


def show(figures: dict[str, Any], took_s: float) -> None:
    """A table of the stages, and sentences below it."""
    console = Console()
    table = Table(title=f"{figures['run']}: what the volunteers did, as shares of their time", title_justify="left")
    for heading in ("stage", "crew", "computes", "sends", "receives", "waits", "mostly for"):
        table.add_column(heading, justify="left" if heading == "mostly for" else "right")
    for number, stage in enumerate(figures["stages"]):
        doing = dict(stage["doing"])
        shares = [doing.pop(what, 0.0) for what in ("computes", "sends", "receives")]
        waits = max(0.0, 1.0 - sum(shares)) if stage["doing"] else 0.0
        mostly = max(doing, key=lambda what: doing[what], default="")
        row = (f"{stage['volunteers']:.1f}", *(f"{share:.0%}" for share in (*shares, waits)))
        table.add_row(str(number), *row, mostly)
    console.print(table)
    for line in _sentences(figures):
        click.echo(line)
    rate = figures["inputs"] / max(took_s, 1e-9)
    click.echo(f"world      {figures['inputs']:,} inputs of machines in {took_s:.1f} s here: {rate:,.0f} a second")


def _sentences(figures: dict[str, Any]) -> list[str]:
    hours = figures["simulated_s"] / 3600
    lines = [f"time       {figures['steps']} steps in {hours:.2f} hours on {figures['servers']} servers and"]
    lines[0] += f" {figures['volunteers']} volunteers"
    if figures["first_step_s"] is not None:
        lines.append(
            f"speed      {figures['steps_per_hour']:.4g} steps an hour, {figures['tokens_per_s']:,.0f} tokens/s;"
            f" the first step closed after {figures['first_step_s']:.1f} s"
        )
    predicted = figures["predicted"]
    if predicted is not None:
        measured = "" if figures["step_s"] is None else f", simulated {figures['step_s']:.4g} s (median)"
        worst = max(range(len(predicted["stages"])), key=lambda stage: predicted["stages"][stage]["pace_s"])
        binds = predicted["stages"][worst]["binds"]
        lines.append(f"a step     predicted {predicted['step_s']:.4g} s (stage {worst}, its {binds}){measured}")
    moved = figures["volunteer_bytes"]
    lines.append(
        f"lines      a volunteer sends {moved['up_per_hour'] / GB:.2f} GB an hour ({_mostly(moved['up'])}) and"
        f" receives {moved['down_per_hour'] / GB:.2f} ({_mostly(moved['down'])})"
    )
    tasks = figures["tasks"]
    if tasks["share"] is not None:
        lines.append(
            f"work       {tasks['executed']:,} tasks for {tasks['needed']:,} that the closed steps take:"
            f" {tasks['share']:.3f} times"
        )
    churn = figures["churn"]
    if churn["of_best"] is not None:
        lines.append(
            f"churn      {churn['departures']} left; {churn['of_best']:.1%} of the {churn['best_steps']:.1f} steps of"
            " the best assignment at every moment, with changes that cost nothing"
        )
    lines.append(f"run waits  {_mostly(figures['run_waits'], 3)}")
    lines += [
        f"warnings   {each['count']} times by a {each['role']}: {each['event']} (first: {each['first'][:120]})"
        for each in figures["warnings"][:5]
    ]
    return lines


def _mostly(shares: dict[str, float], most: int = 2) -> str:
    return ", ".join(f"{share:.0%} {what}" for what, share in list(shares.items())[:most]) or "nothing"
