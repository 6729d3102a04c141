"""`barnraise plan schedule FILE`: the order found for a problem, as one JSON object (coordinator/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from coordinator.commands.finite import FiniteRange
from coordinator.planning.order.pipeline_problem import PipelineProblem
from coordinator.planning.order.search import Found, search
from coordinator.planning.problems import load_problem


@click.command("schedule")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
@click.option("--budget-s", type=FiniteRange(min=0), default=2.0, show_default=True, help="Time to search.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search's random choices.")
def plan_schedule(file: Path, as_json: bool, budget_s: float, seed: int) -> None:
    """In what order should every stage run its forwards and backwards?"""
    found = search(load_problem(file, "schedule", PipelineProblem), budget_s, seed)
    if as_json:
        click.echo(json.dumps(answer(found, seed)))
        return
    click.echo(
        f"makespan {found.timeline.makespan_s:g} s, {found.fraction:.1%} of the lower bound"
        f" {found.bound.value_s:g} s ({found.bound.sentence})\n"
        f"{found.policy}; searched {found.search_s:.2f} s, stopped by the {found.stopped}"
    )
    for node, order in enumerate(found.timeline.orders):
        words = " ".join(str(found.timeline.graph.keys[task])[len(str(node)) :] for task in order)
        click.echo(f"stage {node}: {words}")


def answer(found: Found, seed: int) -> dict[str, Any]:
    """The answer in the keys of coordinator/README.md, and what it grew from."""
    timeline = found.timeline
    return {
        "makespan_s": timeline.makespan_s,
        "lower_bound_s": found.bound.value_s,
        "search_s": found.search_s,
        "stopped": found.stopped,
        "seed": seed,
        "policy": found.policy,
        "operations": [
            {
                "node": node,
                "op": key.op.value,
                "microbatch": key.microbatch,
                "position": key.position,
                "segment": key.segment,
                "slice": key.slice,
                "start_s": timeline.start_s[task],
                "end_s": timeline.end_s[task],
            }
            for node, order in enumerate(timeline.orders)
            for task in order
            for key in [timeline.graph.keys[task]]
        ],
    }
