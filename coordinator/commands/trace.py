"""`barnraise run trace OUT.json`: what everybody did, beside what was predicted."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from coordinator.commands.asking import asking, base_of, post
from coordinator.commands.finite import FiniteRange
from coordinator.world.trace_picture import trace_svg
from coordinator.world.traces import Side, Trace, chrome, link_rows, read_trace, stage_rows
from protocol.base.errors import BadInputError

TRACE_S = 150.0
"""Nodes have 20 s to answer, a prediction 90."""


@click.command()
@click.argument("out", required=False, type=click.Path(path_type=Path), metavar="OUT.json")
@click.option(
    "--seconds", type=FiniteRange(0.0, 3600.0, min_open=True), default=30.0, show_default=True,
    help="How far back; a node keeps its newest 16,384 spans.",
)  # fmt: skip
@click.option("--table", is_flag=True, help="Print predicted beside measured, a row per stage and per kind of way.")
@click.option("--ways", is_flag=True, help="In the table a row per way instead.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw both sides as one picture.")
@asking
def trace(
    out: Path | None, seconds: float, table: bool, ways: bool, svg: Path | None, url: str, links: Path | None
) -> None:  # fmt: skip
    """Ask everybody what he did in the last seconds, and write it to OUT.json for Perfetto (ui.perfetto.dev).

    In the file, `measured` and `predicted` are two processes. Predicted is what the same machines do in simulated time
    on the lines that were measured. Without OUT.json there is the table alone.
    """
    told = post(base_of(url), links, "trace", {"seconds": seconds}, TRACE_S)
    found = read_trace(told)
    if out is not None:
        _save(out, json.dumps(chrome(found)))
    if svg is not None:
        _save(svg, trace_svg(found))
    if table or ways or (out is None and svg is None):
        show(found, each=ways)


def show(found: Trace, *, each: bool) -> None:
    """The tables."""
    console = Console()
    measured, predicted = found.measured, found.predicted
    click.echo(_head(found))
    rows = Table(title="a stage's devices, predicted | measured", title_justify="left")
    for heading in ("stage", "devices", "tasks a step", "forward s", "backward s", "busy", "waits"):
        rows.add_column(heading, justify="right")
    theirs = stage_rows(predicted, found.stages) if predicted is not None else [None] * found.stages
    for real, guess in zip(stage_rows(measured, found.stages), theirs, strict=True):
        rows.add_row(
            str(real.stage),
            str(real.devices),
            _both("{:.1f}", guess.tasks if guess else None, real.tasks),
            _both("{:.3f}", guess.forward_s if guess else None, real.forward_s),
            _both("{:.3f}", guess.backward_s if guess else None, real.backward_s),
            _both("{:.0%}", guess.busy if guess else None, real.busy),
            _both("{:.0%}", guess.wait if guess else None, real.wait),
        )
    console.print(rows)
    guessed = {row.name: row for row in link_rows(predicted, each=each)} if predicted is not None else {}
    lines = Table(title="ways, predicted | measured", title_justify="left")
    for heading in ("way", "count", "MB a step", "Mbit/s while busy", "busy"):
        lines.add_column(heading, justify="left" if heading == "way" else "right")
    for way in link_rows(measured, each=each):
        other = guessed.get(way.name)
        lines.add_row(
            way.name,
            str(way.ways),
            _both("{:.2f}", other.megabytes if other else None, way.megabytes),
            _both("{:.2f}", other.rate * 8e-6 if other else None, way.rate * 8e-6),
            _both("{:.0%}", other.busy if other else None, way.busy),
        )
    console.print(lines)
    for node in measured.nodes:
        if node.lost:
            click.echo(f"{node.label}: {node.lost} older spans of these seconds are gone; ask for fewer seconds")
    if found.no_prediction:
        click.echo(found.no_prediction)


def _head(found: Trace) -> str:
    """One line of the step's time and the bubble."""
    words = [_step("measured", found.measured)]
    if found.predicted is not None:
        words.insert(0, _step("predicted", found.predicted))
        if found.measured.step_s > 0:
            words.append(f"predicted is {found.predicted.step_s / found.measured.step_s - 1:+.1%} off")
    if found.cost_step_s:
        words.append(f"the planner's cost says {found.cost_step_s:.3f} s")
    return f"a step: {'; '.join(words)}"


def _step(name: str, side: Side) -> str:
    if not side.step_s:
        return f"{name}: no two steps closed in these seconds"
    return f"{name} {side.step_s:.3f} s ({len(side.steps) - 1} steps, bubble {side.bubble():.0%})"


def _both(form: str, guess: float | None, real: float) -> str:
    return f"{'–' if guess is None else form.format(guess)} | {form.format(real)}"


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}")
