"""`barnraise status`: what a coordinator's API says, for people; `--network` writes what is measured, for plans."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from protocol.errors import BadInputError

DEFAULT_URL = "http://127.0.0.1:8470"
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 256 << 20
"""A status of 16,384 members with their links; more is not one."""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@click.command()
@click.argument("url", default=DEFAULT_URL)
@click.option(
    "--network",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write what is measured of computers and links as a NETWORK.json for `barnraise plan`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the API's answer as it is.")
def status(url: str, network: Path | None, as_json: bool) -> None:
    """Show a run: its step, who takes part, and the path, round trip and speed of every link.

    URL is the coordinator's status API, by default the one of a coordinator on this computer.
    """
    base = url.rstrip("/").removesuffix("/api/status")
    if network is not None:
        found = fetch(f"{base}/api/network")
        network.write_text(json.dumps(found, indent=1) + "\n")
        click.echo(f"{network}: {len(found['machines'])} machines, {len(found['links'])} measured directions")
        return
    found = fetch(f"{base}/api/status")
    click.echo(json.dumps(found, indent=1) if as_json else describe(found))


def fetch(url: str) -> dict[str, Any]:
    """The JSON object at `url`. Raises `BadInputError` with what went wrong."""
    if not url.startswith(("http://", "https://")):
        raise BadInputError(f"{url}: not an address of a coordinator's status API (http://HOST:PORT)")
    try:
        with _opener.open(url, timeout=ANSWER_S) as answer:
            text = answer.read(ANSWER_BYTES_MAX + 1)
    except urllib.error.HTTPError as error:
        with error:
            try:
                reason = json.loads(error.read(4096))["error"]
            except (ValueError, KeyError, TypeError):
                reason = f"the answer is {error.code}"
        raise BadInputError(f"{url}: {reason}") from error
    except (OSError, ValueError) as error:
        raise BadInputError(f"{url}: nobody answers there: {getattr(error, 'reason', error)}") from error
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadInputError(f"{url}: the answer is no status of a coordinator")
    return found


def describe(status: dict[str, Any]) -> str:
    """The lines that people read."""
    run = status["run"]
    loss = "" if run["loss"] is None else f", loss {run['loss']:.3f}"
    speed = "" if run["state"] == "finished" else f", {run['tokens_per_s']:,.0f} tokens/s"
    # The API's number of the newest step counts from 0, people count steps that are done.
    lines = [f"run {run['name']}: {run['state']}, {run['step'] + 1} of {run['target_steps']} steps{loss}{speed}"]
    if run["waiting_for"]:
        lines.append(f"  {run['waiting_for']} (for {run['waiting_s']:.0f} s)")
    names = name_members(status)
    away = status.get("away", [])
    if status["members"] or away:
        lines += ["", f"{'member':24} {'id':8}  {'state':9} waits for"]
    for member in status["members"]:
        where = names[member["id"]]
        lines.append(f"{where:24} {member['id'][:8]}  {member['state']:9} {member['waiting_for']}".rstrip())
    lines += [f"{names[one['id']]:24} {one['id'][:8]}  {'away':9} (for {one['away_s']:.0f} s)" for one in away]
    rows = [
        row
        for member in status["members"]
        for link in member["links"]
        if (row := link_row(names, member, link)) is not None
    ]
    if rows:
        head = f"{'link':50} {'path':8} {'round trip':>10} {'loss':>6} {'Mbit/s':>8} {'back':>8} {'measured':>10}"
        lines += ["", head, *rows]
    elif status["members"]:
        lines += ["", "No link is measured yet: volunteers and servers measure their links when these open."]
    elif run["state"] == "finished":
        lines += ["", "Everybody has left: links are shown while their computers take part."]
    else:
        lines += ["", "Nobody takes part at the moment."]
    return "\n".join(lines)


def name_members(status: dict[str, Any]) -> dict[str, str]:
    """What to call each member: its place where it has one, with a number where several share it."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for member in [*status["members"], *status.get("away", [])]:
        kind = f"stage {member['stage']}" if member["stage"] >= 0 else "no stage"
        name = f"{member['role']} {kind}" if member["role"] == "volunteer" else f"server {member['place']}"
        counts[name] = counts.get(name, 0) + 1
        names[member["id"]] = name if counts[name] == 1 else f"{name} #{counts[name]}"
    return names


def link_row(names: dict[str, str], member: dict[str, Any], link: dict[str, Any]) -> str | None:
    """One link, once: as the volunteer tells it, or the server with the smaller id."""
    peer = link["peer"]
    other_tells = names.get(peer, "").startswith("volunteer")
    if member["role"] == "server" and (other_tells or (peer in names and peer < member["id"])):
        return None
    pair = f"{names[member['id']]} - {names.get(peer, peer[:8])}"
    trip = "-" if link["round_trip_s"] is None else f"{1000 * link['round_trip_s']:.1f} ms"
    loss = "-" if link["loss"] is None else f"{100 * link['loss']:.1f} %"
    rates = [f"{8e-6 * rate:.1f}" if rate else "-" for rate in (link["sent_bytes_per_s"], link["received_bytes_per_s"])]
    age = f"{link['age_s']:.0f} s ago" if any((link["sent_bytes_per_s"], link["received_bytes_per_s"])) else "-"
    return f"{pair:50} {link['path']:8} {trip:>10} {loss:>6} {rates[0]:>8} {rates[1]:>8} {age:>10}"
