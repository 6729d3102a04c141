"""`barnraise coordinator RUN.toml`: parses the line, loads the run, starts the daemon."""

from __future__ import annotations

from pathlib import Path

import click
from platformdirs import user_state_path

from protocol.config_file import load_run, run_example
from protocol.drive.addresses import HostPort

_HOST_PORT = HostPort()


def _print_example(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(run_example(), nl=False)
        context.exit()


@click.command()
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN.toml")
@click.option(
    "--listen",
    type=_HOST_PORT,
    multiple=True,
    metavar="HOST:PORT",
    default=("*:8469",),
    show_default=True,
    help="Where servers and volunteers reach this coordinator; * is every interface. May be repeated, say with "
    "port 443.",
)
@click.option(
    "--announce", multiple=True, metavar="HOST:PORT", help="An address for the links instead; may be repeated."
)
@click.option("--http", type=_HOST_PORT, metavar="HOST:PORT", help="The status API [default: 127.0.0.1:8470].")
@click.option("--metrics", type=_HOST_PORT, metavar="HOST:PORT", help="Prometheus metrics [default: 127.0.0.1:8471].")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the key and the database; start again with the same one to go on. [default: by the run's name]",
)
@click.option("--json", "as_json", is_flag=True, help="Log and announce in JSON.")
@click.option(
    "--example", is_flag=True, is_eager=True, expose_value=False, callback=_print_example,
    help="Print a commented RUN.toml and exit.",
)  # fmt: skip
def coordinator(
    run: Path,
    listen: tuple[tuple[str, int], ...],
    announce: tuple[str, ...],
    http: tuple[str, int] | None,
    metrics: tuple[str, int] | None,
    state: Path | None,
    as_json: bool,
) -> None:
    """Run the training job of RUN.toml: admit computers, place servers, keep the record.

    Prints two links, one for servers and one for volunteers. Training goes on while the coordinator is down; start
    the same command again and it continues.
    """
    config = load_run(run)
    from coordinator.daemon import CoordinatorOptions, run_coordinator
    from coordinator.store import StateBrokenError, StateLockedError

    options = CoordinatorOptions(
        state=state or user_state_path("barnraise") / "coordinator" / config.name,
        listen=listen,
        announce=announce,
        http=http,
        metrics=metrics,
        json=as_json,
    )
    try:
        run_coordinator(config, options)
    except (StateLockedError, StateBrokenError) as error:
        raise click.ClickException(str(error)) from error
