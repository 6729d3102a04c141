"""`barnraise schedule show NAME|FILE.py`: a schedule's picture, and what it costs in time and memory."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import click

from coordinator.planning.schedules import KNOWN, known_design
from coordinator.planning.schedules.design import Design
from coordinator.planning.simulator.graph import Costs
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pictures import chrome_trace, legend, svg, terminal
from coordinator.planning.simulator.report import Report, report
from protocol.base.errors import BadInputError
from protocol.schedule.check import check
from protocol.schedule.text import write

#: A picture of more operations than this would show nothing and take long.
OPERATIONS_MAX = 200_000
#: Of an operation or a link, in units of one's own; so many of them still sum up to a number.
COST_MAX = 1e12
#: Nor would rows of more nodes than this; links between any two of them are a table of their square.
NODES_MAX = 512


@click.command("show")
@click.argument("name", metavar="NAME|FILE.py")
@click.option("--stages", type=int, default=4, show_default=True, help="Nodes of the pipeline.")
@click.option("--microbatches", type=int, default=8, show_default=True, help="Microbatches of the step.")
@click.option("--forward", "forward_s", type=float, default=1.0, show_default=True, help="A node's time for one F.")
@click.option("--backward", "backward_s", type=float, default=2.0, show_default=True, help="A node's time for one B.")
@click.option("--weight-share", type=float, default=0.5, show_default=True, help="Share of B that W is, when split.")
@click.option("--link", "link_s", type=float, default=0.0, show_default=True, help="Latency between any two nodes.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path), help="Write the Gantt chart here.")
@click.option("--trace", "trace_file", type=click.Path(path_type=Path), help="Write a Chrome trace here.")
@click.option("--text", "as_text", is_flag=True, help="Print the schedule's text form instead of its picture.")
def show(
    name: str,
    stages: int,
    microbatches: int,
    forward_s: float,
    backward_s: float,
    weight_share: float,
    link_s: float,
    svg_file: Path | None,
    trace_file: Path | None,
    as_text: bool,
) -> None:
    """Show the order in which nodes work, by a known name or a Python file with design(stages, microbatches).

    The known names are listed when NAME is none of them.
    """
    for key, value in (("--forward", forward_s), ("--backward", backward_s), ("--link", link_s)):
        if not 0 <= value <= COST_MAX:
            raise BadInputError(f"{key}: {value} is not between 0 and {COST_MAX:g}")
    if not 0 <= weight_share <= 1:
        raise BadInputError(f"--weight-share: {weight_share} is not between 0 and 1")
    for key, count in (("--stages", stages), ("--microbatches", microbatches)):
        if count < 1:
            raise BadInputError(f"{key}: {count} is not at least 1")
    if stages > NODES_MAX:
        raise BadInputError(f"--stages: {stages} is more than {NODES_MAX} nodes")
    if stages * microbatches > OPERATIONS_MAX:
        raise BadInputError(f"--microbatches: {stages} x {microbatches} is more than {OPERATIONS_MAX} operations")
    design = _from_file(Path(name), stages, microbatches) if name.endswith(".py") else None
    design = design or known_design(name, stages, microbatches)
    weight_s = backward_s * weight_share
    costs = Costs.equal(design.stages, forward_s, backward_s - weight_s, weight_s, design.chunks)
    try:
        timeline = design.timeline(costs, Network.uniform(design.nodes, link_s))
        schedule = timeline.schedule(design.stages)
    except BadInputError:
        raise
    except Exception as error:  # a rule or a priority of the file's own, asked at every choice
        if not name.endswith(".py"):
            raise
        raise BadInputError(f"{Path(name).name}: {type(error).__name__}: {error}") from error
    check(schedule)
    title = f"{name}, {stages} nodes, {microbatches} microbatches"
    if as_text:
        click.echo(write(schedule), nl=False)
    else:
        click.echo(title)
        width = max(40, min(200, shutil.get_terminal_size((126, 24)).columns - 6))
        colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        click.echo(terminal(timeline, width, colour))
        click.echo(legend(timeline, colour))
        click.echo(summary(report(timeline)))
    if svg_file is not None:
        _save(svg_file, svg(timeline, title))
    if trace_file is not None:
        _save(trace_file, chrome_trace(timeline, title))


def summary(found: Report) -> str:
    """A report in two lines."""
    return (
        f"makespan {found.makespan_s:g}, span {found.span_s:g}, bubbles {found.bubble_ratio:.1%}, peak memory"
        f" {max(found.peaks):g} microbatches\n"
        f"lower bound {found.bound_s:g} ({found.fraction:.1%} reached),"
        f" master stage on node {found.master_node}"
    )


def _from_file(path: Path, stages: int, microbatches: int) -> Design:
    """Runs the operator's own file, here and nowhere else; only the orders it gives ever leave."""
    spec = spec_from_file_location("operators_schedule", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise BadInputError(f"{path}: no such file; known schedules are {', '.join(KNOWN)}")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(f"{path.name}: {type(error).__name__}: {error}") from error
    if not callable(make := getattr(module, "design", None)):
        raise BadInputError(f"{path.name}: has no function design(stages, microbatches)")
    try:
        design = make(stages, microbatches)
    except BadInputError:
        raise
    except Exception as error:
        raise BadInputError(f"{path.name}: design: {type(error).__name__}: {error}") from error
    if not isinstance(design, Design):
        raise BadInputError(f"{path.name}: design gives {type(design).__name__}, not a Design")
    return design


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}")
