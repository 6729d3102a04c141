"""`barnraise service`, `doctor`, `bugreport`: start with the session, look whether all is well, tell what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from node.commands.link_argument import link_argument, parse_link
from node.commands.members import chosen_limits, devices_option, limit_option, state_folder, threads_option
from node.commands.owner import last_words
from node.commands.say import say, shown_path
from node.compute.devices.choice import DeviceChoice
from node.owner.consent import read_consents
from node.owner.limits import read_limits, shown
from node.owner.words import headline
from node.platform.local_socket import NotRunningError, NotWellError, ask
from node.platform.neighbours import folders_of
from node.platform.places import limits_file, noted_folders, settings_folder
from node.platform.sensors import sensors_here
from node.platform.service import Service
from node.visit.device_facts import DeviceFacts, Question, ask_device, check_device
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig

PACKAGES = ("barnraise", "torch", "numpy", "trio", "aiortc", "aioquic", "msgspec", "pynacl", "psutil", "starlette")
FIRST_WORDS_S = 15.0
"""A busy computer takes some seconds to load Python and trio."""
DISK_BYTES_MIN = 2e9
LINKS = "links"
"""Where the services' join links lie, in the settings folder: by run, and the service's name behind a hyphen."""
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
LOG_LINES = 2000
LINES_BYTES_MAX = 4 << 20
_SECRET = re.compile(
    r"barnraise[:+][^\s\"']{16,}|barnraise-key-\S+|(?<=/enter/)[\w-]+|"
    r"(?i:(?<=token\": \")[^\"]+|(?<=invite\": \")[^\"]+|(?<=credential\": \")[^\"]+)|[A-Za-z0-9+/_=-]{60,}"
)
"""Join links, keys, tokens of the page and of the local socket, and any long run of letters that could be one."""


@click.group()
def service() -> None:
    """Start with the session of this computer's owner, and end with it."""


def _checked_name(context: click.Context, option: click.Parameter, given: str) -> str:
    if given and not _NAME.fullmatch(given):
        raise BadInputError(f"--name: {given!r} cannot be; it takes up to 32 small letters, digits and hyphens")
    return given


_NAMED = click.option(
    "--name",
    default="",
    callback=_checked_name,
    metavar="NAME",
    help="Of a further service, as for a second run: each has its own options, state folder and log.",
)


@service.command()
@link_argument
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="As for `barnraise join`; without it a service with a name has a folder of its own.",
)
@devices_option
@threads_option
@limit_option
@_NAMED
def install(
    link: str | None,
    state: Path | None,
    devices: tuple[DeviceChoice, ...],
    threads: int,
    limit: tuple[str, ...],
    name: str,
) -> None:
    """Lend this computer to the run behind LINK whenever its owner is logged in.

    You must have said yes to the run before, in a terminal: barnraise join LINK. Installed once more, with another link
    or other options, it starts anew with these.
    """
    parsed = parse_link(link, "volunteer")
    run_id = parsed.run_id.hex()
    chosen_limits(limit)
    if run_id not in read_consents(settings_folder()):
        raise BadInputError("service: you have not said yes to this run yet; start `barnraise join` in a terminal once")
    for device in devices:
        if device.may_be_missing:
            check_device(device)
    file = settings_folder() / LINKS / (f"{run_id}-{name}" if name else run_id)
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as out:
        out.write(str(parsed) + "\n")
    home = state_folder(state, parsed, name)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    chosen = ",".join(map(str, devices))
    words = ["join", str(file), "--state", str(home.absolute()), "--device", chosen, "--threads", str(threads)]
    words += [word for text in limit for word in ("--limit", text)]
    here = Service(name=name)
    leave_in_peace(here)
    left_out = here.install(words, [home.absolute(), settings_folder().absolute()])
    undo = f"barnraise service remove{f' --name {name}' if name else ''}"
    say(f"Installed: {here.file}\nIts log: {here.log}\nTo undo: {undo}")
    if left_out:
        say(
            f"It works without {', '.join(left_out)}: this system does not let a user's services have namespaces of "
            "their own."
        )
    say(first_words(home))


def first_words(home: Path) -> str:
    """What the daemon that was just started says of itself, or where to look if it says nothing."""
    deadline = time.monotonic() + FIRST_WORDS_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NotRunningError, NotWellError):
            return f"It says: {headline(ask(home, {'verb': 'status'}))}"
        time.sleep(0.25)
    return f"It has said nothing yet after {FIRST_WORDS_S:.0f} s: look at its log, or at `barnraise service status`."


@service.command()
@_NAMED
def remove(name: str) -> None:
    """Stop it and start it no more. Your yes is kept; `barnraise consent` shows it."""
    here = Service(name=name)
    leave_in_peace(here)
    try:
        here.remove()
    finally:  # also where the system does not answer: the service's file is gone, and nothing reads the secret any more
        for link in links_of(name):
            link.unlink(missing_ok=True)
    click.echo("Removed.")


def links_of(name: str) -> list[Path]:
    """The files of a service's links."""
    links = (settings_folder() / LINKS).glob("*")
    return [link for link in links if link.name.partition("-")[2] == name]  # before it the run's id, without a hyphen


def leave_in_peace(here: Service) -> None:
    """Where the system would end a service's daemon with all that it has begun, it is told to leave, and waited for."""
    for link in links_of(here.name) if here.ends_at_once else ():
        for folder in folders_of(str(link)):
            with contextlib.suppress(NotRunningError, NotWellError):  # then the system ends it as it is
                answer = ask(folder, {"verb": "leave"})
                if "error" not in answer:
                    say(last_words(folder, answer))


@service.command("status")
@_NAMED
def service_status(name: str) -> None:
    """What the system says of it."""
    click.echo(Service(name=name).status())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def doctor(as_json: bool) -> None:
    """Look at everything that lending this computer needs, and say what is wrong. Exit code 1 when something is."""
    rows = examine()
    if as_json:
        shown = [{"what": what, "well": well, "says": " ".join(says.split("\n"))} for what, well, says in rows]
        click.echo(json.dumps(shown, indent=1))
    else:
        for what, well, says in rows:
            sentence, *paths = says.split("\n")
            say(f"{'ok  ' if well else 'BAD '} {what:12} {sentence}")
            for path in paths:  # whole, on a line of its own, whatever the terminal's width: people copy it
                click.echo(f"{'':17} {path}")
    sys.exit(0 if all(well for _, well, _ in rows) else 1)


def examine() -> list[tuple[str, bool, str]]:
    """(what, is it well, what was found) in the order of the questions that people ask. A folder or file that belongs
    to it stands behind a line break."""
    rows = [("computer", True, f"{platform.platform()}, Python {platform.python_version()}")]
    rows += [(f"{name}", found != "missing", found) for name, found in versions().items()]
    rows.append(_tried("limits", lambda: f"{read_limits(limits_file()).describe()}\n{shown_path(limits_file())}"))
    rows.append(
        _tried("consents", lambda: ", ".join(c.run for c in read_consents(settings_folder()).values()) or "none")
    )
    settings = settings_folder()
    disk = settings if settings.exists() else Path.home()
    free_bytes = shutil.disk_usage(disk).free
    rows.append(("disk", free_bytes > DISK_BYTES_MIN, f"{free_bytes / 1e9:.1f} GB free\n{shown_path(disk)}"))
    facts: DeviceFacts | None = None
    try:
        facts = ask_device(Question(RunConfig(), 257, 1, "auto", False))
        why = f" ({facts.why_no_accelerator})" if facts.why_no_accelerator else ""
        rows.append(("device", True, facts.label + why))
    except BadInputError as error:
        rows.append(("device", False, str(error)))
    sensors = sensors_here(settings, lambda: [os.getpid()])
    sensors.device_is(facts.is_accelerator if facts else False, (facts.gpu,) if facts and facts.gpu else ())
    rows += [(f"  {name}", True, says) for name, says in sensors.describe().items()]
    year_ok = 2025 <= time.gmtime().tm_year <= 2100
    rows.append(("clock", year_ok, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())))
    for folder in noted_folders():
        try:
            status = ask(folder, {"verb": "status"})
            rows.append(("daemon", True, f"{headline(status)}\n{shown_path(folder)}"))
        except NotRunningError:
            continue
        except NotWellError as error:
            rows.append(("daemon", False, str(error)))
    return rows


def _tried(what: str, find: Any) -> tuple[str, bool, str]:
    try:
        return what, True, find()
    except BadInputError as error:
        return what, False, str(error)


def versions() -> dict[str, str]:
    """Of what matters, by name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


@click.command()
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False), default=Path("barnraise-bugreport.zip"))
@click.option("--log", "logs", type=click.Path(path_type=Path, dir_okay=False, exists=True), multiple=True,
              help="A log file to take along; may be repeated.")  # fmt: skip
def bugreport(out: Path, logs: tuple[Path, ...]) -> None:
    """Write what helps to find a fault into a zip file: versions, limits, states, logs. No keys, links or tokens."""
    parts = {
        "doctor.txt": "\n".join(
            f"{'ok' if well else 'BAD'} {what}: {' '.join(says.splitlines())}" for what, well, says in examine()
        ),
        "limits.json": json.dumps(_limits(), indent=1),
    }
    for number, folder in enumerate(noted_folders()):
        try:
            parts[f"status-{number}.json"] = json.dumps(ask(folder, {"verb": "status"}), indent=1)
        except NotRunningError:
            continue  # it has ended, or is a server, which says nothing of itself here
        except NotWellError as error:
            parts[f"status-{number}.json"] = json.dumps({"error": str(error)})
    for path in logs:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LINES_BYTES_MAX))
            lines = file.read().decode(errors="replace").splitlines()
        parts[f"log-{path.name}"] = "\n".join(lines[-LOG_LINES:])
    try:
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in parts.items():
                archive.writestr(name, scrubbed(text))
    except OSError as error:
        raise BadInputError(f"{out}: cannot be written: {error.strerror or error}") from None
    say(f"{out}: {', '.join(parts)}. Look into it before you give it away.")


def _limits() -> dict[str, str]:
    try:
        return shown(read_limits(limits_file()))
    except BadInputError as error:
        return {"error": str(error)}


def scrubbed(text: str) -> str:
    """Without what could open a door, and without the owner's folder names."""
    return _SECRET.sub("(hidden)", text).replace(str(Path.home()), "~")
