"""The command `barnraise demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from node.commands.device_type import DeviceType

_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--steps", type=int, help="Optimizer steps [default: 600].")
@click.option("--seed", type=int, help="Decides weights, data order, and whom --chaos kills [default: 1].")
@click.option("--volunteers", type=click.IntRange(0, 64), default=3, show_default=True, help="Volunteer processes.")
@click.option("--servers", type=click.IntRange(1, 64), help="Servers to start [default: one for each place].")
@click.option("--stages", type=int, help="Pipeline stages [default: 2].")
@click.option("--delay", type=click.Choice(["0", "1"]), help="Delayed parameter update [default: 1].")
@click.option("--data", help="builtin:python, builtin:grammar, or a path [default: builtin:python].")
@click.option("--config", type=_FILE, help="A RUN.toml to take everything else from.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any key of RUN.toml, as in --set stages.count=4 --set routes.skip=0.25; may be repeated.",
)
@click.option(
    "--chaos",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Every N steps kill (SIGKILL) a volunteer that holds work, and start another.",
)
@click.option("--kill-coordinator", type=int, metavar="STEP", help="Kill the coordinator then, and start it again.")
@click.option("--kill-server", type=int, metavar="STEP", help="Kill a server then, and start it again.")
@click.option("--kill-all-volunteers", type=int, metavar="STEP", help="Kill every volunteer then, for good.")
@click.option("--reference", is_flag=True, help="Train the same run in one process, without any of the machinery.")
@click.option(
    "--changes", type=_FILE, metavar="FILE", help="With --reference: what `barnraise run changes --json` printed."
)
@click.option(
    "--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Torch threads of --reference."
)
@click.option(
    "--device",
    type=DeviceType(),
    default="cpu",
    show_default=True,
    help="What volunteers, servers and --reference compute tasks on, as of `barnraise join`.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="One line for each step; otherwise a live view on a terminal, and a line every few steps elsewhere.",
)
@click.option("--summary", type=_FILE, metavar="FILE", help="Write what happened as JSON.")
@click.option("--out", type=_FOLDER, default="demo-out", show_default=True, help="Where the model goes.")
@click.option("--state", type=_FOLDER, help="Keep all state here; the same command goes on where it stopped.")
def demo(delay: str | None, **given: object) -> None:
    """Train a small model on this machine alone: coordinator, servers and volunteers as processes of their own.

    The default run is a 0.9 M-parameter LLaMA on Python's own documentation: learning can be watched, but it is no
    useful model. Nothing leaves this machine.
    """
    from node.demo.options import DemoOptions
    from node.demo.run import run_demo

    options = DemoOptions(delay=None if delay is None else int(delay), **given)  # type: ignore[arg-type]
    try:
        sys.exit(run_demo(options))
    except KeyboardInterrupt:
        click.echo("stopped; all processes are ended", err=True)
        sys.exit(130)
