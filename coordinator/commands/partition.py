"""`barnraise plan partition FILE`: where to cut a model, as a table for people or JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.finite import FiniteRange
from coordinator.planning.partition.planner import Partition, PartitionProblem, solve
from coordinator.planning.partition.search import WORK_MAX
from coordinator.planning.partition.slicer import Slices
from coordinator.planning.problems import load_problem

#: With a budget, work is bounded by time alone.
WORK_WITHOUT_END = sys.maxsize


@click.command("partition")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--budget-s",
    type=FiniteRange(min=0.0, min_open=True),
    help="Search for at most so many seconds; without it the search is counted, repeatable, below a second.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For the local search.")
def partition(file: Path, as_json: bool, budget_s: float | None, seed: int) -> None:
    """Cut a model into pipeline stages: which blocks each stage holds, and how many microbatches to halve."""
    problem = load_problem(file, "partition", PartitionProblem)
    started = time.perf_counter()
    if budget_s is None:
        found, slices = solve(problem, seed, WORK_MAX, lambda: False)
    else:
        deadline = started + budget_s
        found, slices = solve(problem, seed, WORK_WITHOUT_END, lambda: time.perf_counter() >= deadline)
    search_s = time.perf_counter() - started
    if as_json:
        click.echo(json.dumps(answer(found, slices, search_s, seed)))
    else:
        show(problem, found, slices, search_s)


def answer(found: Partition, slices: Slices, search_s: float, seed: int) -> dict[str, Any]:
    """The JSON object of coordinator/README.md."""
    return {
        "cuts": found.cuts,
        "master_stage": found.master_stage,
        "slices": {"count": slices.count, "makespan_s": slices.makespan_s},
        "makespan_s": found.makespan_s,
        "lower_bound_s": found.lower_bound_s,
        "search_s": search_s,
        "stopped": found.stopped,
        "seed": seed,
    }


def show(problem: PartitionProblem, found: Partition, slices: Slices, search_s: float) -> None:
    """Prints the stages as a table and what they cost below it."""
    table = Table(title=f"{len(problem.forward_s)} blocks on {problem.stages} stages", title_justify="left")
    for heading in ("stage", "blocks", "forward", "backward", "busy", ""):
        table.add_column(heading, justify="left" if heading in ("blocks", "") else "right")
    for d in range(problem.stages):
        first, end = found.edges[d], found.edges[d + 1]
        busy = problem.microbatches * (found.forward_s[d] + found.backward_s[d])
        table.add_row(
            str(d),
            f"{first}–{end - 1} ({end - first})",
            f"{found.forward_s[d]:.6g} s",
            f"{found.backward_s[d]:.6g} s",
            f"{busy / found.makespan_s:.1%}" if found.makespan_s else "–",
            "master: sets the pace" if d == found.master_stage else "",
        )
    console = Console()
    console.print(table)
    fraction = found.lower_bound_s / found.makespan_s if found.makespan_s else 1.0
    console.print(
        f"step      {found.makespan_s:.6g} s, {fraction:.1%} of the bound: no other cuts take less than "
        f"{found.lower_bound_s:.6g} s"
    )
    if slices.count:
        console.print(f"slices    halve the first {slices.count}: {slices.makespan_s:.6g} s")
    else:
        console.print("slices    halving the first microbatches gains nothing")
    console.print(f"search    {search_s:.3f} s; {found.stopped}")
