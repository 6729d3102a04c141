"""`barnraise netcheck LINK`. What needs the daemon's parts is imported only when the command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from node.commands.link_argument import link_argument, parse_link
from node.commands.members import state_folder
from node.commands.say import say


@click.command()
@link_argument
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help="Folder of the identity to show.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, for scripts and for bug reports.")
def netcheck(link: str | None, state: Path | None, as_json: bool) -> None:
    """Look at this computer's line to the run behind LINK (the volunteers' link), and say what to do about it.

    Shows what kind of NAT is in between, whether UDP and IPv6 work, and for each server the path, round trip, loss
    and speed both ways. Takes up to 20 seconds and up to 4 MB for each server; joins nothing.
    """
    parsed = parse_link(link, "volunteer")
    folder = state_folder(state, parsed)
    from node.measure.netcheck import check, describe, to_json

    found = check(parsed, folder)
    if as_json:
        click.echo(json.dumps(to_json(found), indent=1))
    else:
        say(describe(found))
    sys.exit(0 if found.reached else 1)
