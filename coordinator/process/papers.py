"""What a coordinator tells its operator when it starts: addresses and links, on the screen and in files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from coordinator.live.core import CoordinatorMachine
from protocol.drive.addresses import is_loopback
from protocol.drive.durable import replace_durably

LINKS = "links.json"
"""A file of the state folder: addresses, links and what else this process was given."""


def write_private(path: Path, text: str) -> None:
    """A file that only its owner may read, whole or not at all."""
    replace_durably(path, text.encode(), 0o600)


def announce(papers: dict[str, Any], *, as_json: bool, machine: CoordinatorMachine) -> None:
    """What an operator needs, on standard output: one JSON line, or some lines for people."""
    if as_json:
        shown = {name: value for name, value in papers.items() if name != "admin_token"}
        click.echo(json.dumps(shown))
    else:
        config = machine.config
        done = machine.history.newest_step + 1
        past = f", {done:,} of them done" if done else ""
        batches = machine.history.batches
        click.echo(f"run {config.name}: {batches.now.steps:,} steps of {batches.tokens(done):,} tokens{past}")
        click.echo(f"  state    {papers['state']}")
        click.echo(f"  page     {papers['page']}")
        click.echo(f"  status   {papers['http']}/api/status")
        click.echo(f"  metrics  {papers['metrics'] or 'off'}")
        click.echo(f"  links    {papers['state']}{os.sep}{LINKS}")
        click.echo("           (barnraise status --links prints them again)")
        click.echo(f"\non each reliable machine:\n  barnraise server '{papers['server']}'")
        click.echo("  (or copy server.link there from the state folder, and name that:")
        click.echo("  no process list shows it then)")
        click.echo(f"\nfor everybody who lends a computer:\n  barnraise join '{papers['volunteer']}'\n")
        if all(is_loopback(address.rpartition(":")[0].strip("[]")) for address in _addresses_of(papers["server"])):
            click.echo("  (these links work on this computer only; --listen and --announce change that)\n")
        if not config.checkpoint.shared:
            click.echo(
                "  (every server keeps its part of a checkpoint to itself; to replace a lost\n"
                "  disk, name a folder that all servers share as checkpoint.folder in RUN.toml,\n"
                "  by its absolute path, or a place in an object store: s3://BUCKET/PREFIX)\n"
            )
    sys.stdout.flush()


def _addresses_of(link: str) -> list[str]:
    return link.partition("://")[2].partition("/")[0].split(",")
