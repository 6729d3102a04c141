"""`barnraise coordinator RUN.toml`: parses the line, loads the run, starts the daemon."""

from __future__ import annotations

from pathlib import Path

import click
from platformdirs import user_state_path

from coordinator.commands.check import checked
from coordinator.live.signals import Helpers
from coordinator.tracking.trackers import parse_target
from protocol.base.errors import BadInputError
from protocol.base.limits import ADDRESSES_MAX
from protocol.drive.addresses import HostPort, MetricsPlace
from protocol.run.config_file import load_run, run_example
from protocol.trust.membership import check_address

_HOST_PORT = HostPort()
SECRET_BYTES_MAX = 1024
"""Far more than any secret needs; a larger file is another file."""


def _print_example(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(run_example(), nl=False)
        context.exit()


def read_helpers(stun: tuple[str, ...], turn: tuple[str, ...], secret_file: Path | None) -> Helpers:
    """The servers that help nodes behind NATs, with or without `stun:` and `turn:` before them, as others write them.

    Raises `BadInputError`, naming the option.
    """
    stun = tuple(address.removeprefix("stun:") for address in stun)
    turn = tuple(address.removeprefix("turn:") for address in turn)
    for option, addresses in (("--stun", stun), ("--turn", turn)):
        if len(addresses) > ADDRESSES_MAX:
            raise BadInputError(f"{option}: more than {ADDRESSES_MAX} addresses")
        for address in addresses:
            try:
                check_address(address)
            except BadInputError as error:
                raise BadInputError(f"{option}: {error}") from None
    if bool(turn) != (secret_file is not None):
        raise BadInputError("--turn and --turn-secret-file go together")
    secret = b"" if secret_file is None else secret_file.read_bytes().strip()
    if secret_file is not None and not 16 <= len(secret) <= SECRET_BYTES_MAX:
        raise BadInputError(
            f"--turn-secret-file: {secret_file} holds {len(secret)} bytes; use 16 to {SECRET_BYTES_MAX}"
        )
    return Helpers(stun, turn, secret)


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
@click.option(
    "--http",
    type=_HOST_PORT,
    metavar="HOST:PORT",
    help="The live page, the status API and the operator's orders [default: 127.0.0.1:8470].",
)
@click.option(
    "--page",
    type=_HOST_PORT,
    metavar="HOST:PORT",
    help="Show the live page to everybody there, read-only; best behind something that speaks TLS.",
)
@click.option(
    "--metrics",
    type=MetricsPlace(),
    metavar="HOST:PORT|off",
    help="Where /metrics answers Prometheus. [default: 127.0.0.1:8471, or any port of it that is free]",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the key and the database; start again with the same one to go on. "
    f"[default: {user_state_path('barnraise')}/coordinator/NAME, by the run's name]",
)
@click.option(
    "--stun",
    multiple=True,
    metavar="HOST:PORT",
    help="A STUN server that tells nodes behind NATs how they look from outside; may be repeated. [default: this one]",
)
@click.option(
    "--turn",
    multiple=True,
    metavar="HOST:PORT",
    help="A TURN server (coturn with use-auth-secret) that relays where nothing else works; may be repeated.",
)
@click.option(
    "--turn-secret-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The file with the secret that the TURN servers know as static-auth-secret.",
)
@click.option(
    "--store",
    envvar="BARNRAISE_STORE",
    metavar="postgresql://…",
    default="",
    help="Keep the record in PostgreSQL instead of a file of the state folder: then a second coordinator can stand by. "
    "A password belongs into BARNRAISE_STORE or ~/.pgpass: process lists show this line.",
)
@click.option(
    "--standby",
    is_flag=True,
    help="Wait while another coordinator has the run, and take over when it dies. Needs a copy of its file `identity`.",
)
@click.option(
    "--track",
    multiple=True,
    metavar="KIND:FOLDER",
    help="Write loss, validation, rate and so on of every step to FOLDER, too: csv, or (with the extra `trackers`) "
    "tensorboard, wandb (offline) or mlflow. May be repeated.",
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
    page: tuple[str, int] | None,
    metrics: tuple[str, int] | None,
    state: Path | None,
    stun: tuple[str, ...],
    turn: tuple[str, ...],
    turn_secret_file: Path | None,
    store: str,
    standby: bool,
    track: tuple[str, ...],
    as_json: bool,
) -> None:
    """Run the training job of RUN.toml: admit computers, place servers, keep the record.

    Prints two links, one for servers and one for volunteers. Training goes on while the coordinator is down; start
    the same command again and it continues.
    """
    config = load_run(run)
    trackers = tuple(dict.fromkeys(map(parse_target, track)))
    for note in checked(config)[0]:
        click.echo(note, err=True)
    from coordinator.process.daemon import CoordinatorOptions, run_coordinator
    from coordinator.process.database import StateBrokenError, StateLockedError

    helpers = read_helpers(stun, turn, turn_secret_file)
    options = CoordinatorOptions(
        state=state or user_state_path("barnraise") / "coordinator" / config.name,
        listen=listen,
        announce=announce,
        http=http,
        page=page,
        metrics=metrics,
        json=as_json,
        helpers=helpers,
        store=store,
        standby=standby,
        trackers=trackers,
    )
    try:
        run_coordinator(config, options)
    except (StateLockedError, StateBrokenError) as error:
        raise click.ClickException(str(error)) from error
