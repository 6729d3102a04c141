"""`barnraise run void|voided`: what a member gave is undone, with all that others made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from coordinator.commands.asking import ask, asking, base_of, post
from coordinator.commands.written import write_file
from protocol.base.printable import printable
from protocol.trust.voided import open_voided


def void_command(whole: Callable[[str, str], str]) -> click.Command:
    """`whole`: the id that a few letters stand for."""

    @click.command()
    @click.argument("node")
    @click.option("--reason", default="", help="What the banned computer's owner is told.")
    @click.option("--lineage", is_flag=True, help="Also void and ban all who came by the same invite.")
    @click.option("--from-start", is_flag=True, help="Begin the run anew where no checkpoint is old enough.")
    @asking
    def void(node: str, reason: str, lineage: bool, from_start: bool, url: str, links: Path | None) -> None:
        """Ban NODE and train again, without it, all that it may have had a part in.

        The run goes back to the newest kept checkpoint from before NODE came, and does every step since again: what
        others computed on weights that it had changed is void, too. What was set by `run set` meanwhile counts from the
        same steps on. Where no such checkpoint is kept nothing is changed. `run voided` shows what was undone.
        """
        base = base_of(url)
        order: dict[str, Any] = {"node": whole(base, node), "reason": reason, "lineage": lineage}
        done = post(base, links, "void", {**order, "from_start": from_start})
        where = f"step {done['step']}" if done["step"] >= 0 else "its beginning"
        click.echo(f"banned: {', '.join(done['voided'])}")
        click.echo(
            f"it came at step {done['first_step']}; the run is back at {where}, and {done['lost_steps']} closed steps"
            " are done again without it"
        )

    return void


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the signed list to this file.")
@click.option(
    "--check",
    "checked",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Ask nobody: check the signature of this file, and show it.",
)
@asking
def voided(out: Path | None, checked: Path | None, url: str, links: Path | None) -> None:
    """Show whose work was undone, and how far the run went back for it; signed by the coordinator."""
    data = (
        checked.read_bytes() if checked is not None else json.dumps(ask(base_of(url), links, "voided", None)).encode()
    )
    found, coordinator = open_voided(data)
    if out is not None:
        write_file("--out", out, json.dumps(json.loads(data), indent=1) + "\n")
    for row in found.rows:
        where = f"step {row.restore_step}" if row.restore_step >= 0 else "the beginning"
        names = ", ".join(node[:8] for node in row.nodes)
        line = (
            f"{names}  came at step {row.first_step}; back to {where}, {row.lost_steps} steps done again  {row.reason}"
        )
        click.echo(printable(line.rstrip()))
    if not found.rows:
        click.echo("nothing was undone")
    click.echo(f"run {found.run}, signed by coordinator {coordinator}")
