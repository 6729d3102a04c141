"""`barnraise status`: what a coordinator's API says, for people; `--network` writes what is measured, for plans."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from coordinator.commands.finite import FiniteRange
from coordinator.commands.written import write_file
from protocol.base.errors import BadInputError
from protocol.base.printable import all_printable, wrapped
from protocol.drive.addresses import is_loopback, is_web_address

NOT_RUNNING = 3
"""Exit code: neither a coordinator nor a lent computer runs here."""
STATUS_GROUP = "barnraise.status"
"""Entry points that show what this computer does for others: `(as_json, state folder or None) -> text or None`."""
DEFAULT_URL = "http://127.0.0.1:8470"
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 256 << 20
"""A status of 16,384 members with their links; more is not one."""
WIDTH = 100
"""Columns of the tables, where no terminal has fewer."""
PAIR, FIGURES = 44, 42
"""Columns of a link's two ends, and of what every terminal shows of it; the age of that only where there is room."""
WATCH_S = 2.0
NOT_MEASURED = "No link is measured yet: volunteers and servers measure their links when these open."
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks directly: no proxy of the environment stands between an operator and the coordinator."""


@click.command()
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--network",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what is measured of computers and links as a NETWORK.json for `barnraise plan`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
@click.option(
    "--watch",
    "every_s",
    type=FiniteRange(min=0.1, max=3600.0),
    is_flag=False,
    flag_value=WATCH_S,
    metavar="[SECONDS]",
    help=f"Show it anew every so many seconds ({WATCH_S:g} unless told otherwise), until Ctrl-C.",
)
@click.option("--links", is_flag=True, help="Print the join links again; only on the coordinator's own computer.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, file_okay=False),
    help="Only the lent computer's program that has this state folder.",
)
def status(
    url: str, network: Path | None, as_json: bool, every_s: float | None, links: bool, state: Path | None
) -> None:
    """Show what this computer lends, and a run: its steps, who takes part, path, round trip and speed of every link.

    URL is the coordinator's status API, by default the one of a coordinator on this computer.
    """
    base = url.rstrip("/").removesuffix("/api/status")
    if (every_s is not None) + (network is not None) + as_json + links > 1:
        raise BadInputError("--watch, --network, --json and --links: one at a time")
    if state is not None:
        if every_s is not None or network is not None or links or base != DEFAULT_URL:
            raise BadInputError("--state: only with --json; `barnraise top --state` watches it")
        click.echo(status_of_lent_computers(as_json, state))
        return
    if every_s is not None:
        with contextlib.suppress(KeyboardInterrupt):
            watch(f"{base}/api/status", every_s)
        return
    if network is not None:
        found = fetch(f"{base}/api/network")
        write_file("--network", network, json.dumps(found, indent=1) + "\n")
        click.echo(f"{network}: {len(found['machines'])} machines, {len(found['links'])} measured directions")
        return
    here = status_of_lent_computers() if base == DEFAULT_URL and not (links or as_json) else None
    try:
        found = fetch(f"{base}/api/status")
    except BadInputError as error:
        if base != DEFAULT_URL or links:
            raise
        here = here or status_of_lent_computers(as_json)
        if here is None:
            text = f"no lent computer runs here (`barnraise join LINK` starts one), and {error}"
            click.echo(wrapped(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text, err=True)
            sys.exit(NOT_RUNNING)
        click.echo(here)
        return
    if here is not None:
        click.echo(f"{here}\n")
    if links:
        click.echo(join_links(base, found))
        return
    click.echo(json.dumps(found, indent=1) if as_json else describe(found, columns()))


def columns() -> int:
    """What a line may take here: no more than the terminal has."""
    return min(WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH


def status_of_lent_computers(as_json: bool = False, state: Path | None = None) -> str | None:
    """What volunteers on this computer (or the one of `state`) do, by their own package's word; None where there is
    none."""
    for point in entry_points(group=STATUS_GROUP):
        text: str | None = point.load()(as_json, state)
        if text is not None:
            return text
    return None


def watch(url: str, every_s: float) -> None:
    """Redraws the status in place, on a terminal; elsewhere one follows the other. Never ends by itself.

    A coordinator that is away for a while (training goes on without it) is asked again; the first answer must come.
    """
    text = describe(fetch(url), columns())
    console = Console(highlight=False, markup=False)
    # The last picture stays when it ends; rows that do not fit the screen are cut while it runs.
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            if live is None:
                click.echo(text + "\n")
            else:
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            time.sleep(every_s)
            try:
                text = describe(fetch(url), columns())
            except BadInputError as error:
                text = str(error)


def join_links(url: str, status: dict[str, Any]) -> str:
    """The commands to join with, from the coordinator's own file: links are secrets, so the API does not tell them."""
    path = Path(status.get("links_file") or "")
    if not status.get("links_file") or not is_loopback(urllib.parse.urlsplit(url).hostname or ""):
        raise BadInputError(f"{url}: the join links lie in links.json in the coordinator's --state folder; ask there")
    try:
        papers = json.loads(path.read_text())
        run_id, server, volunteer = papers["run_id"], papers["server"], papers["volunteer"]
    except OSError as error:
        raise BadInputError(f"{path}: {error.strerror or error}; the coordinator's owner can read it there") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}: not a coordinator's links.json") from error
    if run_id != status["run"]["id"]:
        raise BadInputError(f"{path}: the links of another run")
    return (
        f"on each reliable machine:\n  barnraise server '{server}'\n\n"
        f"for everybody who lends a computer:\n  barnraise join '{volunteer}'"
    )


def answer_to(request: urllib.request.Request, patience_s: float, bytes_max: int) -> bytes:
    """What the API answers; one byte too many where it is longer. Raises `BadInputError` with what went wrong."""
    url = request.full_url
    try:
        with opener.open(request, timeout=patience_s) as answer:
            text: bytes = answer.read(bytes_max + 1)
    except urllib.error.HTTPError as error:
        with error:
            try:
                reason = json.loads(error.read(4096))["error"]
            except (ValueError, KeyError, TypeError):
                reason = f"the answer is {error.code}"
        raise BadInputError(f"{url}: {reason}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise BadInputError(f"{url}: nobody answers there: {getattr(why, 'strerror', None) or why}") from error
    return text


def fetch(url: str) -> dict[str, Any]:
    """The JSON object at `url`. Raises `BadInputError` with what went wrong."""
    if not is_web_address(url):
        raise BadInputError(f"{url}: not an address of a coordinator's status API (http://HOST:PORT)")
    text = answer_to(urllib.request.Request(url), ANSWER_S, ANSWER_BYTES_MAX)  # noqa: S310 - the scheme was just looked at
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInputError(f"{url}: the answer is no status of a coordinator")
    shown: dict[str, Any] = all_printable(found)
    return shown


def describe(status: dict[str, Any], width: int = WIDTH) -> str:
    """The lines that people read: sentences are broken between words, rows of tables are cut."""
    run = status["run"]
    loss = "" if run["loss"] is None else f", loss {run['loss']:.3f}"
    speed = "" if run["state"] == "finished" else f", {run['tokens_per_s']:,.0f} tokens/s"
    # The API's number of the newest step counts from 0, people count steps that are done.
    lines = [f"run {run['name']}: {run['state']}, {run['step'] + 1} of {run['target_steps']} steps{loss}{speed}"]
    found = run.get("validation") or {}
    if found.get("loss") is not None and found["perplexity"] is not None:
        lines.append(
            f"  validation {found['loss']:.3f} (perplexity {found['perplexity']:,.1f}) after {found['version']} steps"
        )
    if run["waiting_for"]:
        lines.append(f"  {run['waiting_for']} (for {run['waiting_s']:.0f} s)")
    lines += [f"  alert: {sentence}" for sentence in run.get("alerts", [])]
    counts = {
        outcome: sum(member.get("counters", {}).get(f"audits_{outcome}", 0.0) for member in status["members"])
        for outcome in ("passed", "blamed", "missed")
    }
    if any(counts.values()):
        lines.append(
            f"  audits: {counts['passed']:,.0f} passed, {counts['blamed']:,.0f} found something false,"
            f" {counts['missed']:,.0f} could not be done"
        )
    lines = [wrapped(line, width) for line in lines]
    names = name_members(status)
    away = status.get("away", [])
    if status["members"] or away:
        lines += ["", f"{'member':24} {'id':8}  {'state':9} waits for"]
    for member in status["members"]:
        where = cut(names[member["id"]], 24)
        line = f"{where:24} {member['id'][:8]}  {member['state']:9} {member['waiting_for']}"
        lines.append(cut(line.rstrip(), width))
    for one in away:
        lines.append(f"{cut(names[one['id']], 24):24} {one['id'][:8]}  {'away':9} (for {one['away_s']:.0f} s)")
    volunteers = {member["id"] for member in status["members"] if member["role"] == "volunteer"}
    told = {(member["id"], link["peer"]): link for member in status["members"] for link in member["links"]}
    rows = [
        row
        for member in status["members"]
        for link in member["links"]
        if (row := link_row(names, member, link, told.get((link["peer"], member["id"])), volunteers, width)) is not None
    ]
    if rows:
        lines += ["", row_of("link", "path", "round trip", "loss", "Mbit/s", "back", "measured", width), *rows]
    elif status["members"]:
        lines += ["", wrapped(NOT_MEASURED, width)]
    elif run["state"] == "finished":
        lines += ["", "Everybody has left: links are shown while their computers take part."]
    else:
        lines += ["", "Nobody takes part at the moment."]
    if status.get("links_file"):
        lines += ["", wrapped(f"Join links: barnraise status --links, or {status['links_file']}", width)]
    return "\n".join(lines)


def name_members(status: dict[str, Any]) -> dict[str, str]:
    """What to call each member: its operator's name with its place, or that alone, with a number where several share
    it."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for member in [*status["members"], *status.get("away", [])]:
        kind = f"stage {member['stage']}" if member["stage"] >= 0 else "no stage"
        name = f"{member['role']} {kind}" if member["role"] == "volunteer" else f"server {member['place']}"
        if given := member.get("name"):
            name = f"{given}, {kind if member['role'] == 'volunteer' else member['place']}"
        counts[name] = counts.get(name, 0) + 1
        names[member["id"]] = name if counts[name] == 1 else f"{name} #{counts[name]}"
    return names


def link_row(
    names: dict[str, str],
    member: dict[str, Any],
    link: dict[str, Any],
    other: dict[str, Any] | None,
    volunteers: set[str],
    width: int = WIDTH,
) -> str | None:
    """One link, once: as the volunteer tells it, or the server with the smaller id, or whoever does.

    `other`: what the other end says of it, for what this one does not know; None when it says nothing.
    `volunteers`: their ids.
    """
    peer = link["peer"]
    other_tells = peer in volunteers
    if member["role"] == "server" and other is not None and (other_tells or peer < member["id"]):
        return None
    there = other or {}
    to = names.get(peer, peer[:8])
    if member["role"] == "server":
        to = to.removeprefix("server ")
    one = names[member["id"]] if width >= WIDTH else names[member["id"]].removeprefix("server ")
    to = to if width >= WIDTH else to.removeprefix("server ")
    trip_s, loss = (link[key] if link[key] is not None else there.get(key) for key in ("round_trip_s", "loss"))
    trip = "-" if trip_s is None else f"{1000 * trip_s:.1f} ms"
    lost = "-" if loss is None else f"{100 * loss:.1f} %"
    own = (link["sent_bytes_per_s"], link["received_bytes_per_s"])
    seen = (there.get("received_bytes_per_s", 0.0), there.get("sent_bytes_per_s", 0.0))
    known = [here or its for here, its in zip(own, seen, strict=True)]
    rates = [f"{8e-6 * rate:.1f}" if rate else "-" for rate in known]
    age_s = link["age_s"] if any(own) else there["age_s"] if any(seen) else None
    age = "-" if age_s is None else f"{age_s:.0f} s ago"
    return row_of(f"{one} - {to}", link["path"], trip, lost, rates[0], rates[1], age, width)


def row_of(pair: str, path: str, trip: str, loss: str, rate: str, back: str, age: str, width: int) -> str:
    """One row of the table of links."""
    if width < WIDTH:
        room = width - FIGURES
        return cut(f"{cut(pair, room):{room}} {path:7} {trip:>10} {loss:>6} {rate:>7} {back:>7}", width)
    return f"{cut(pair, PAIR):{PAIR}} {path:7} {trip:>10} {loss:>6} {rate:>8} {back:>8} {age:>11}"


def cut(text: str, width: int) -> str:
    """At most so many characters; what is missing is marked. All of it is in the API's answer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
