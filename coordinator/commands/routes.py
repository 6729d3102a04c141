"""`barnraise plan routes FILE`: which nodes each microbatch visits, as a table for people or JSON for
programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.planning.problems import load_problem
from coordinator.planning.routes.evaluate import operations
from coordinator.planning.routes.model import RouteModel, RoutesProblem
from coordinator.planning.routes.search import RoutesAnswer, search_routes


@click.command("routes")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--budget-s",
    type=FiniteRange(min=0.0, min_open=True),
    help="Search for at most so many seconds; without it the search is counted, repeatable, a few seconds long.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the local search.")
def plan_routes(file: Path, as_json: bool, budget_s: float | None, seed: int) -> None:
    """Find the way of each microbatch through the nodes, skipping and swapping stages as the file allows."""
    model = load_problem(file, "routes", RoutesProblem).model()
    found = search_routes(model, seed, budget_s)
    if as_json:
        click.echo(json.dumps(answer(model, found, seed)))
    else:
        show(model, found)


def answer(model: RouteModel, found: RoutesAnswer, seed: int) -> dict[str, Any]:
    """The JSON object of coordinator/README.md."""
    return {
        "routes": [list(route) for route in found.routes],
        "operations": operations(model, found.routes, found.timed),
        "makespan_s": found.makespan_s,
        "lower_bound_s": found.lower_bound_s,
        "search_s": found.search_s,
        "stopped": found.stopped,
        "seed": seed,
    }


def show(model: RouteModel, found: RoutesAnswer) -> None:
    """Prints the routes as a table and what they cost below it."""
    table = Table(title=f"{len(found.routes)} routes over {model.stages} stages", title_justify="left")
    for heading in ("microbatch", "stages", "nodes", "ends"):
        table.add_column(heading, justify="left" if heading in ("stages", "nodes") else "right")
    for number, (route, end) in enumerate(zip(found.routes, found.timed.ends, strict=True)):
        stages = " ".join(str(model.stage_of_node[node]) for node in route)
        table.add_row(str(number), stages, " ".join(map(str, route)), f"{end:.6g} s")
    console = Console()
    console.print(table)
    console.print(
        f"makespan  {found.makespan_s:.6g} s, {found.fraction_of_bound:.1%} of the bound: no routes take less than "
        f"{found.lower_bound_s:.6g} s"
    )
    console.print(f"search    {found.search_s:.3f} s; {found.stopped}")
