"""`barnraise plan placement FILE`: which machines form which stage, as a table for people or JSON for
programs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.planning.placement.problem import PlacementProblem
from coordinator.planning.placement.search import PlacementAnswer, search_placement
from coordinator.planning.problems import load_problem

WEAK_BOUND = 0.9
"""Below this fraction it may be the bound that is far off, so its output says what it leaves out."""


@click.command("placement")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--budget-s",
    type=FiniteRange(min=0.0, min_open=True),
    help="Search for at most so many seconds; without it the search is counted, repeatable, a few seconds long.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the local search.")
def plan_placement(file: Path, as_json: bool, budget_s: float | None, seed: int) -> None:
    """Decide which servers and volunteers form which pipeline stage, in which role, with how many layers."""
    world = load_problem(file, "placement", PlacementProblem).world()
    found = search_placement(world, seed, budget_s)
    if as_json:
        click.echo(json.dumps(answer(found, seed)))
    else:
        show(found)


def answer(found: PlacementAnswer, seed: int) -> dict[str, Any]:
    """The JSON object of coordinator/README.md."""
    placement = found.placement
    return {
        "stages": [
            {
                "servers": list(stage.servers),
                "front": list(stage.front),
                "back": list(stage.back),
                "volunteers": sorted(stage.volunteers),
                "layers": layers,
            }
            for stage, layers in zip(placement.stages, placement.layers(), strict=True)
        ],
        "batch_s": found.batch_s,
        "lower_bound_s": found.lower_bound_s,
        "search_s": found.search_s,
        "stopped": found.stopped,
        "seed": seed,
    }


def show(found: PlacementAnswer) -> None:
    """Prints the stages as a table and what they cost below it."""
    placement = found.placement
    table = Table(title=f"{len(placement.stages)} stages", title_justify="left")
    lists = ("front", "back", "volunteers")
    for heading in ("stage", "layers", *lists, "hops s", "moves s", "work s"):
        table.add_column(heading, justify="left" if heading in lists else "right", no_wrap=heading not in lists)
    for k, (stage, cost) in enumerate(zip(placement.stages, placement.detail(), strict=True)):
        table.add_row(
            str(k),
            str(cost.layers),
            listed(stage.front),
            listed(stage.back),
            listed(sorted(stage.volunteers)),
            f"{cost.hop_in_s + cost.hop_out_s:.3g}",
            f"{cost.transfer_s:.3g}",
            f"{cost.work_s:.3g}",
        )
    console = Console()
    console.print(table)
    console.print("          of a microbatch; hops: between stages, moves: inside one")
    console.print(f"pace      stage {placement.worst} sets it")
    console.print(
        f"batch     {found.batch_s:.6g} s, {bound_words(found)}\n"
        f"          the paper's recipe alone takes {found.recipe_s:.6g} s"
    )
    if found.benched:
        console.print(f"left out  {len(found.benched)} volunteers whose links would slow their stage down")
    console.print(f"search    {found.search_s:.3f} s; {found.stopped}")


def bound_words(found: PlacementAnswer) -> str:
    """What fraction of the proven bound a placement reaches, and what the bound leaves out where it is weak."""
    words = f"{found.fraction_of_bound:.0%} of the bound ({found.lower_bound_s:.4g} s)"
    if found.fraction_of_bound < WEAK_BOUND:
        words += ",\n          which lets all machines work and all bytes take the quickest links"
    return words


def listed(items: Sequence[object], most: int = 12) -> str:
    """The first of them, and how many there are where that is not all."""
    text = " ".join(map(str, items[:most]))
    return text if len(items) <= most else f"{text} … ({len(items)})"
