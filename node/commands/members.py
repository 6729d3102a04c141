"""`barnraise server LINK` and `barnraise join LINK`. What needs torch is imported only when a command runs."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from platformdirs import user_state_path

from node.commands.amounts import RATE_MBIT_MIN, Amount, WholeNumber, plain
from node.commands.device_type import DevicesType, DeviceType
from node.commands.link_argument import link_argument, parse_link
from node.commands.say import columns, say
from node.compute.devices.choice import HELP as DEVICE_HELP
from node.compute.devices.choice import SEVERAL_HELP, DeviceChoice
from node.owner.consent import Consent, keep_consent, read_consents
from node.owner.limits import (
    GAMES_MEAN,
    OwnerLimits,
    key_named,
    read_limits,
    shown,
    with_value,
    with_values,
    write_limits,
)
from node.owner.words import list_limits
from node.platform.keyboard import forget_typed
from node.platform.places import limits_file, settings_folder
from protocol.base.errors import BadInputError
from protocol.base.loading import loading
from protocol.base.printable import printable
from protocol.drive.addresses import HostPort, MetricsPlace
from protocol.drive.place_argument import PlaceArgument
from protocol.trust.membership import JoinLink

if TYPE_CHECKING:
    from node.process.starting import Starting
    from node.visit.enquiry import Offer
    from protocol.drive.limits import LineLimits

NOBODY_TO_ASK = (
    "nobody can be asked here, since this is no terminal: add --yes if the owner of this computer agrees, or start it "
    "in a terminal once, or with --ask-on-page; the yes is kept"
)
ASKING = "asking the run, and measuring this computer"
ASKING_ONLY = "asking the run"
AWAY = "the run's coordinator cannot be asked now; trying again"
QUESTION = "waiting for your yes, where it was started"
RETRY_S = 30.0
"""Between two questions to a run that does not answer."""
NOTHING_STARTED = "Nothing was started."
ALWAYS = {"idle": "off", "while-not": "off", "battery": "work", "metered": "work"}
"""What --always means."""
ANYWHERE = (("*", 0),)
"""Listen on every interface, at a port that the system chooses."""


def state_folder(given: Path | None, link: JoinLink, name: str = "") -> Path:
    """Where a node keeps its state unless told otherwise: one folder for each run and role, and for each service with a
    name: two that run at once never share one."""
    return given or user_state_path("barnraise") / link.run_id.hex() / (f"{link.role}-{name}" if name else link.role)


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
    help="Ask the home router to forward a port to this computer while it runs, so that others can dial it directly."
    " On Linux alone: elsewhere no router is found.",
)
_METRICS = click.option(
    "--metrics",
    type=MetricsPlace(),
    metavar="HOST:PORT|off",
    help="Where /metrics answers Prometheus. [default: a port of 127.0.0.1, from 8472 on, kept in STATE/metrics.json]",
)

_ANNOUNCE = click.option(
    "--announce", multiple=True, metavar="HOST:PORT", help="An address to tell others instead; may be repeated."
)

threads_option = click.option(
    "--threads",
    type=WholeNumber(1, 256),
    default=1,
    show_default=True,
    help="Processor threads that it computes with.",
)
device_option = click.option("--device", type=DeviceType(), default="auto", show_default=True, help=DEVICE_HELP)
devices_option = click.option(
    "--device", "devices", type=DevicesType(), default="auto", show_default=True, help=SEVERAL_HELP
)


limit_option = click.option(
    "--limit",
    multiple=True,
    metavar="NAME=VALUE",
    help="A limit for this one alone, as in 'hours=sat,sun 00:00-24:00'; see `barnraise limits`. May be repeated.",
)


def _line_options(command: Any) -> Any:
    """The owner's limits of the line, the same for both commands."""
    rate = Amount("Mbit/s", RATE_MBIT_MIN)
    for option in (
        click.option("--quota", type=Amount("GB", 0.1), metavar="GB", help="Gigabytes a month, up and down together."),
        click.option("--limit-down", type=rate, metavar="MBIT/S", help="The most that this node receives, in Mbit/s."),
        click.option("--limit-up", type=rate, metavar="MBIT/S", help="The most that this node sends, in Mbit/s."),
    ):
        command = option(command)
    return command


def auditor_options(command: Any) -> Any:
    """What a machine that only audits has of the server's options."""
    stage = click.option("--stage", type=int, default=-1, metavar="N", help="The stage to audit. [default: any]")
    for option in (
        device_option,
        threads_option,
        stage,
        _LAN,
        _NO_PUNCH,
        _line_options,
        _METRICS,
        _state_option("auditor"),
    ):
        command = option(command)
    return command


@click.command()
@link_argument
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
@threads_option
@device_option
@click.option(
    "--checkpoints",
    type=PlaceArgument(),
    metavar="FOLDER|URL",
    help="The folder that servers share for checkpoints, if RUN.toml names one, or a place in an object store (s3://,"
    " gs://, az://; with the keys in this process's environment): the only place outside --state where the run may"
    " write, and where a server with an empty state finds checkpoints to start from.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="PATH",
    help="A folder or file of this computer that the run may read (text, a tokenizer, weights to start from); may be"
    " repeated. Without it the run reads only what comes with Barnraise and Python.",
)
@click.option("--no-compute", is_flag=True, help="Never compute tasks here, even when no volunteer is left.")
@click.option("--no-relay", is_flag=True, help="Carry no links between other members of the run.")
@click.option(
    "--relay-limit",
    type=Amount("Mbit/s", RATE_MBIT_MIN),
    default=200.0,
    show_default=True,
    metavar="MBIT/S",
    help="The most that it carries for other members, all together and both ways.",
)
@click.option(
    "--relay-quota",
    type=Amount("GB", 0.0),
    default=1000.0,
    show_default=True,
    metavar="GB",
    help="Gigabytes that it carries for them at once; what is used of them grows back evenly within 30 days.",
)
def server(
    link: str | None,
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
    device: DeviceChoice,
    checkpoints: Path | str | None,
    data: tuple[Path, ...],
    no_compute: bool,
    no_relay: bool,
    relay_limit: float,
    relay_quota: float,
) -> None:
    """Serve a stage of the run behind LINK: on a machine that stays up.

    Keeps parameters, optimizer state and the journal in its state folder. Start the same command again after any
    crash; Ctrl-C stops it.

    LINK is a secret: whoever has it can serve. It may also be a file that holds it (the coordinator keeps one:
    server.link), or `-` for standard input; without it BARNRAISE_LINK is read, or you are asked.
    """
    parsed = parse_link(link, "server")
    from node.compute.places import open_place
    from node.data.allowed import Allowed
    from node.links.assemble import WayOptions
    from node.links.relay.relay_desk import RelayLimits
    from node.process.daemon import NodeOptions, run_node
    from protocol.drive.limits import LineLimits

    place = None if checkpoints is None else open_place(checkpoints, "--checkpoints")
    relay = RelayLimits(bytes_per_s=relay_limit * 1e6 / 8, quota_bytes=relay_quota * 1e9)
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
                device=device,
                stage=stage,
                computes=not no_compute,
                checkpoints=place,
                allowed=Allowed(data, () if checkpoints is None else (checkpoints,)),
            )
        )
    )


@click.command()
@link_argument
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
@threads_option
@devices_option
@limit_option
@click.option(
    "--while-not", metavar="PROGRAMS", help=f"Pause while one of these runs: names with commas; {GAMES_MEAN}."
)
@click.option("--always", is_flag=True, help="Work also while somebody uses the computer, on battery, beside games.")
@click.option("--no-page", is_flag=True, help="Serve no page for its owner on this computer.")
@click.option("--ask-on-page", is_flag=True, help="Ask the owner on a page in the browser instead of the terminal.")
@click.option("--yes", is_flag=True, help="You agree: do not ask. Needed where nobody can be asked.")
@click.option("--no-benchmark", is_flag=True, help="Do not measure this machine first.")
def join(
    link: str | None,
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
    devices: tuple[DeviceChoice, ...],
    limit: tuple[str, ...],
    while_not: str | None,
    always: bool,
    no_page: bool,
    ask_on_page: bool,
    yes: bool,
    no_benchmark: bool,
) -> None:
    """Lend this computer to the run behind LINK.

    Measures the machine, says what the run is and what it costs you, and asks; the yes is kept for this run: a start
    without a terminal begins by it, and measures nothing anew. It works only when the computer is not in use
    (`barnraise limits` says when, and how fast). Ctrl-C finishes what is being computed and leaves; a second Ctrl-C
    leaves at once. Nothing that is received is ever run as code.

    LINK may also be a file that holds it, or `-` for standard input; without it BARNRAISE_LINK is read, or you are
    asked.
    """
    parsed = parse_link(link, "volunteer")
    folder = state_folder(state, parsed)
    given = chosen_limits(limit, while_not, always, limit_up, limit_down, quota)
    chosen = with_values(read_limits(limits_file()), given)
    agreed = read_consents(settings_folder()).get(parsed.run_id.hex())
    if not yes and agreed is None and not ask_on_page and not is_terminal():
        raise BadInputError(NOBODY_TO_ASK)
    from node.process.pauses import kept_pause
    from node.process.starting import BEGINNING, Starting

    with ExitStack() as ends, Starting(folder, limits_file(), parsed.run_id.hex()) as starting:
        try:
            if not (yes and no_benchmark) and is_terminal():  # torch alone takes ten seconds to load on a busy computer
                click.echo("Asking the run, and measuring this computer and its line: up to a minute …", err=True)
            if yes and no_benchmark:
                for device in devices:
                    if device.may_be_missing:
                        from node.visit.device_facts import check_device

                        check_device(device)
                if kept_pause(folder) is None:  # nothing is asked first: it will work as soon as it has joined
                    from node.process.device_start import DeviceOptions, DeviceStart

                    ends.callback(DeviceStart.forget_ahead)
                    for device in devices:
                        own = DeviceOptions(threads, device, chosen.low_priority, chosen.gpu_memory_bytes)
                        DeviceStart.load_ahead(own)
                    starting.loads_device = True
            with loading():
                from node.links.assemble import WayOptions
                from node.process.daemon import NodeOptions, run_node

            ways = WayOptions(punch=not no_punch, lan=lan, map_port=map_port)
            offer, speeds, token, port = None, (0.0,) * len(devices), "", 0
            if not (yes and no_benchmark):
                from node.visit.enquiry import enquire
                from node.visit.kept_speed import keep_speeds, kept_speeds

                def tell(sentence: str) -> None:
                    """What is waited for, here and to whoever asks in another terminal."""
                    click.echo(sentence)
                    starting.says = sentence.removesuffix(" …").partition(" Waiting (")[0].rstrip(".")

                line = line_limits(chosen)
                cap = chosen.gpu_memory_bytes
                if agreed is not None and not yes and not is_terminal():
                    # The system has started it, beside a game, on battery or in a pause: until the keeper has looked,
                    # neither the device nor the line may be touched, and nothing there is a reason to give up.
                    ask = partial(enquire, parsed, folder, threads, False, line, ways, (), cap, tell)
                    offer = asked_patiently(ask, starting)
                    speeds = kept_speeds(folder, offer.terms_hashes, devices, threads)
                else:
                    starting.says = ASKING
                    offer = enquire(parsed, folder, threads, not no_benchmark, line, ways, devices, cap, tell)
                    if any(offer.speeds):
                        speeds = offer.speeds
                        keep_speeds(folder, offer.terms_hashes[0], devices, threads, speeds)
                starting.run = offer.run
                say(printable(offer.text, keep="\n"))
                if offer.finished:
                    return
                say(f"Limits: {chosen.describe()}.")
                if not yes and not is_known(agreed, offer):
                    starting.says = QUESTION
                    agrees, token, port = agrees_to(offer, ask_on_page, agreed is not None, given, folder, starting)
                    if not agrees:
                        click.echo(NOTHING_STARTED)
                        sys.exit(0 if starting.left else 1)
                    consent = Consent(run=offer.run, since_unix_s=time.time(), config_hash=offer.terms_hashes[0])
                    keep_consent(settings_folder(), parsed.run_id.hex(), consent)
            starting.says = BEGINNING
            code = run_node(
                NodeOptions(
                    link=parsed,
                    state=folder,
                    listen=listen or (ANYWHERE if map_port else ()),
                    announce=announce,
                    metrics=metrics,
                    overrides=tuple(given.items()),
                    page=not no_page,
                    page_token=token,
                    page_port=port,
                    ways=ways,
                    threads=threads,
                    device=devices[0],
                    tokens_per_s=speeds[0],
                    further=tuple(zip(devices[1:], speeds[1:], strict=True)),
                    measured=offer.measured if offer is not None else (),
                    stage=offer.stage if offer is not None else -1,
                    starting=starting,
                )
            )
        except BaseException as error:
            if not is_interrupt(error):
                raise
            click.echo(f"\nYou have left it before it joined. {NOTHING_STARTED}")
            code = 0 if starting.left else 1
    sys.exit(code)


def asked_patiently(ask: Callable[[], Offer], starting: Starting) -> Offer:
    """What the run offers to one that the system has started: the network may come later, and a coordinator may be
    away. Said once for each reason."""
    from node.visit.survey import NobodyAnswersError

    said = ""
    while True:
        starting.says = ASKING_ONLY
        try:
            return ask()
        except NobodyAnswersError as error:
            if str(error) != said:
                said = str(error)
                click.echo(f"{error}. Trying again every {RETRY_S:.0f} s.", err=True)
            starting.says = AWAY
            time.sleep(RETRY_S)


def is_interrupt(error: BaseException) -> bool:
    """Whether it is a Ctrl-C, be it wrapped by those who ran side by side then."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_interrupt(inner) for inner in error.exceptions)
    return isinstance(error, KeyboardInterrupt | click.Abort)


def is_known(agreed: Consent | None, offer: Offer) -> bool:
    """Whether the owner has said yes to these very terms before."""
    if agreed is None or agreed.config_hash not in offer.terms_hashes:
        return False
    when = datetime.fromtimestamp(agreed.since_unix_s).strftime("%Y-%m-%d")
    say(f"You said yes to this run on {when}; `barnraise consent withdraw {agreed.run}` takes it back.")
    return True


def agrees_to(
    offer: Offer, on_page: bool, changed: bool, given: Mapping[str, str], folder: Path, starting: Starting
) -> tuple[bool, str, int]:
    """Asks for the yes; returns it, and the token and port of the page where it was asked (else nothing). `given`:
    limits of the command line."""
    if on_page:
        return agrees_on_page(offer, given, folder, starting)
    return agrees_in_terminal(changed), "", 0


def agrees_in_terminal(changed: bool) -> bool:
    """Asks. Raises `BadInputError` where nobody can be asked. `changed`: the yes was to other terms."""
    if not is_terminal():
        raise BadInputError(
            f"the run has changed since you said yes to it; {NOBODY_TO_ASK}" if changed else NOBODY_TO_ASK
        )
    try:
        forget_typed()  # an Enter while this computer was measured is no yes to what nobody had read yet
        while True:
            answer = click.prompt("Start? [Y/n/limits]", default="y", show_default=False).strip().lower()
            if answer in ("y", "yes", "n", "no"):
                return bool(answer.startswith("y"))
            if answer.startswith("l"):
                change_limits()
            else:
                say("Say y (start), n (start nothing) or limits (see and change what may be used).")
    except click.Abort:
        click.echo("")
        return False


def agrees_on_page(offer: Offer, given: Mapping[str, str], folder: Path, starting: Starting) -> tuple[bool, str, int]:
    """Asks in the browser, which is opened where there is one; returns the answer, and the page's token and port.
    Below the question stand the limits of all starts: what the command line says for this one is told with it."""
    from node.process.consent_page import ask_on_page
    from node.process.page_gate import kept_place

    def tell(address: str, once: str) -> None:
        starting.says = f"waiting for your yes on {address}"
        click.echo(f"Say yes or no here:\n  {address}")  # whole on a line of its own: people copy it
        screens = ("DISPLAY", "WAYLAND_DISPLAY")
        if sys.platform in ("win32", "darwin") or any(os.environ.get(name) for name in screens):
            with suppress(OSError, webbrowser.Error):  # without a screen it would be a browser in this terminal
                webbrowser.open(once)  # anybody here can read a command line

    text = offer.text
    if given:
        ours = shown(with_values(OwnerLimits(), given))
        text += "\nFor this start, whatever stands below: " + ", ".join(f"{name} {ours[name]}" for name in given)
    answer = ask_on_page(offer.run, printable(text, keep="\n"), limits_file(), tell, kept_place(folder))
    return answer.yes, answer.token, answer.port


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def change_limits() -> None:
    """Asks for limits until an empty line; what is wrong is said, and asked again."""
    click.echo(list_limits(shown(read_limits(limits_file())), columns()))
    say("A name tells what it means, a name and a value set it, as in: up 5 Mbit/s")
    while text := click.prompt("limit and value (empty: done)", default="", show_default=False).strip():
        name, _, value = text.partition(" ")
        try:
            key = key_named(name)
            if value:
                write_limits(limits_file(), with_value(read_limits(limits_file()), name, value))
                say(f"{key.name} = {shown(read_limits(limits_file()))[key.name]}")
            else:
                say(f"{key.meaning} For example: {key.name} {key.example}")
        except BadInputError as error:
            say(str(error))


def chosen_limits(
    limit: tuple[str, ...],
    while_not: str | None = None,
    always: bool = False,
    up: float | None = None,
    down: float | None = None,
    quota: float | None = None,
) -> dict[str, str]:
    """What the command line says of limits, by name. Raises `BadInputError`."""
    given = dict(ALWAYS) if always else {}
    for name, rate in (("up", up), ("down", down)):
        if rate is not None:
            given[name] = f"{plain(rate)} Mbit/s"
    if quota is not None:
        given["quota"] = f"{plain(quota)} GB"
    if while_not is not None:
        given["while-not"] = while_not
    for text in limit:
        name, equals, value = text.partition("=")
        if not equals:
            raise BadInputError(f"--limit: {text!r} is not NAME=VALUE, as in --limit 'hours=mon-fri 18:00-24:00'")
        given[key_named(name).name] = value
    with_values(OwnerLimits(), given)
    return given


def line_limits(limits: OwnerLimits) -> LineLimits:
    """The part that the line's forecast is made with."""
    from protocol.drive.limits import LineLimits

    mbit = [None if rate is None else rate * 8e-6 for rate in (limits.up_bytes_per_s, limits.down_bytes_per_s)]
    return LineLimits(mbit[0], mbit[1], None if limits.quota_bytes is None else limits.quota_bytes / 1e9)
