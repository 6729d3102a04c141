"""`barnraise server LINK` and `barnraise join LINK`. What needs torch is imported only when a command runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from platformdirs import user_state_path

from protocol.drive.addresses import HostPort
from protocol.drive.limits import LineLimits
from protocol.errors import BadInputError
from protocol.membership import JoinLink

ANYWHERE = (("*", 0),)
"""Listen on every interface, at a port that the system chooses."""
RATE_MBIT_MIN = 1.0
"""Slower than this a record of 64 KiB takes longer than half a second, and links would time out in each other's way."""


def parse_link(text: str, role: str) -> JoinLink:
    """The link of the command line; raises `BadInputError` when it is damaged or for the other kind of node."""
    link = JoinLink.parse(text)
    if link.role != role:
        command = "barnraise server" if link.role == "server" else "barnraise join"
        raise BadInputError(
            f"join link: this one is for {link.role}s (`{command}`); here the one for {role}s is needed, which the "
            "coordinator prints beside it"
        )
    return link


def state_folder(given: Path | None, link: JoinLink) -> Path:
    """Where a node keeps its state unless told otherwise: one folder for each run and role."""
    return given or user_state_path("barnraise") / link.run_id.hex() / link.role


def _state_option(role: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--state",
        type=click.Path(path_type=Path, file_okay=False),
        help=f"Folder for identity and state; one a process. [default: {user_state_path('barnraise')}/RUN-ID/{role}]",
    )


_NO_PUNCH = click.option(
    "--no-punch", is_flag=True, help="Use TCP only: open no way through NATs and firewalls by UDP."
)
_LAN = click.option(
    "--lan", is_flag=True, help="Peers with private addresses are in this network: try to reach them there, by UDP."
)
_MAP_PORT = click.option(
    "--map-port",
    is_flag=True,
    help="Ask the home router to forward a port to this computer while it runs, so that others can dial it directly.",
)
_METRICS = click.option("--metrics", type=HostPort(), metavar="HOST:PORT", help="Serve /metrics for Prometheus there.")

_ANNOUNCE = click.option(
    "--announce", multiple=True, metavar="HOST:PORT", help="An address to tell others instead; may be repeated."
)


def _line_options(command: Any) -> Any:
    """The owner's limits of the line, the same for both commands."""
    rate = click.FloatRange(RATE_MBIT_MIN)
    for option in (
        click.option(
            "--quota", type=click.FloatRange(0.1), metavar="GB", help="Gigabytes a month, up and down together."
        ),
        click.option("--limit-down", type=rate, metavar="MBIT/S", help="The most that this node receives, in Mbit/s."),
        click.option("--limit-up", type=rate, metavar="MBIT/S", help="The most that this node sends, in Mbit/s."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("link")
@_state_option("server")
@click.option(
    "--listen",
    type=HostPort(),
    multiple=True,
    metavar="HOST:PORT",
    default=("*:0",),
    show_default=True,
    help="Where other nodes reach this server; * is every interface. May be repeated, say with port 443, which most "
    "firewalls let pass. A port chosen by the system is kept for the next start.",
)
@_ANNOUNCE
@_METRICS
@_line_options
@_NO_PUNCH
@_LAN
@_MAP_PORT
@click.option("--stage", type=int, default=-1, metavar="N", help="The stage this server would like to hold.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Threads of torch.")
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where a server with an empty state finds the run's checkpoints to start from.",
)
@click.option("--no-compute", is_flag=True, help="Never compute tasks here, even when no volunteer is left.")
@click.option("--no-relay", is_flag=True, help="Carry no links between other members of the run.")
@click.option(
    "--relay-limit",
    type=click.FloatRange(RATE_MBIT_MIN),
    default=200.0,
    show_default=True,
    metavar="MBIT/S",
    help="The most that it carries for other members, all together and both ways.",
)
@click.option(
    "--relay-quota",
    type=click.FloatRange(0.0),
    default=1000.0,
    show_default=True,
    metavar="GB",
    help="Gigabytes that it carries for them until it is started again.",
)
def server(
    link: str,
    state: Path | None,
    listen: tuple[tuple[str, int], ...],
    announce: tuple[str, ...],
    metrics: tuple[str, int] | None,
    limit_up: float | None,
    limit_down: float | None,
    quota: float | None,
    no_punch: bool,
    lan: bool,
    map_port: bool,
    stage: int,
    threads: int,
    checkpoints: Path | None,
    no_compute: bool,
    no_relay: bool,
    relay_limit: float,
    relay_quota: float,
) -> None:
    """Serve a stage of the run behind LINK: on a machine that stays up.

    Keeps parameters, optimizer state and the journal in its state folder. Start the same command again after any
    crash; Ctrl-C stops it.
    """
    parsed = parse_link(link, "server")
    from node.daemon import NodeOptions, run_node
    from node.links.assemble import WayOptions
    from node.links.relay_desk import RelayLimits

    relay = RelayLimits(bytes_per_s=relay_limit * 1e6 / 8, total_bytes=relay_quota * 1e9)
    sys.exit(
        run_node(
            NodeOptions(
                link=parsed,
                state=state_folder(state, parsed),
                listen=listen,
                announce=announce,
                metrics=metrics,
                limits=LineLimits(limit_up, limit_down, quota),
                ways=WayOptions(punch=not no_punch, lan=lan, relay=None if no_relay else relay, map_port=map_port),
                threads=threads,
                stage=stage,
                computes=not no_compute,
                checkpoints=checkpoints,
            )
        )
    )


@click.command()
@click.argument("link")
@_state_option("volunteer")
@click.option(
    "--listen",
    type=HostPort(),
    multiple=True,
    metavar="HOST:PORT",
    help="Where servers may dial this computer, if its router lets them; may be repeated. Not needed.",
)
@_ANNOUNCE
@_METRICS
@_line_options
@_NO_PUNCH
@_LAN
@_MAP_PORT
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Threads of torch.")
@click.option("--yes", is_flag=True, help="Do not ask before starting.")
@click.option("--no-benchmark", is_flag=True, help="Do not measure this machine first.")
def join(
    link: str,
    state: Path | None,
    listen: tuple[tuple[str, int], ...],
    announce: tuple[str, ...],
    metrics: tuple[str, int] | None,
    limit_up: float | None,
    limit_down: float | None,
    quota: float | None,
    no_punch: bool,
    lan: bool,
    map_port: bool,
    threads: int,
    yes: bool,
    no_benchmark: bool,
) -> None:
    """Lend this computer to the run behind LINK.

    Measures the machine, says what the run is and what it costs you, and asks. Ctrl-C finishes what is being
    computed and leaves; a second Ctrl-C leaves at once. Nothing that is received is ever run as code.
    """
    parsed = parse_link(link, "volunteer")
    folder = state_folder(state, parsed)
    from node.daemon import NodeOptions, run_node
    from node.links.assemble import WayOptions

    ways = WayOptions(punch=not no_punch, lan=lan, map_port=map_port)
    offer = None
    if not (yes and no_benchmark):
        from node.enquiry import enquire

        offer = enquire(parsed, folder, threads, not no_benchmark, LineLimits(limit_up, limit_down, quota), ways)
        click.echo(offer.text)
        if offer.finished:
            return
        if not yes and sys.stdin.isatty() and not click.confirm("Start?", default=True):
            click.echo("Nothing was started.")
            return
    sys.exit(
        run_node(
            NodeOptions(
                link=parsed,
                state=folder,
                listen=listen or (ANYWHERE if map_port else ()),
                announce=announce,
                metrics=metrics,
                limits=LineLimits(limit_up, limit_down, quota),
                ways=ways,
                threads=threads,
                tokens_per_s=offer.tokens_per_s if offer is not None else 0.0,
                measured=offer.measured if offer is not None else (),
                stage=offer.stage if offer is not None else -1,
            )
        )
    )
