"""`barnraise run …`: what an operator orders of a running coordinator, by its API."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from coordinator.commands.asking import ask, asking, base_of, post
from coordinator.commands.branch import branch
from coordinator.commands.check import check, example
from coordinator.commands.finite import FiniteRange
from coordinator.commands.status import DEFAULT_URL, fetch
from coordinator.commands.trace import trace
from coordinator.commands.void import void_command, voided
from coordinator.commands.written import write_file
from protocol.base.errors import BadInputError
from protocol.base.printable import printable
from protocol.run.changes import AT_BOUNDARY, AT_DECISION, RunChange, in_words
from protocol.trust.credit import open_credit
from protocol.trust.identity import base32, is_node_id
from protocol.trust.membership import JoinLink

PREFIX_MIN = 6
"""Letters of an id that may stand for it, as `barnraise status` shows eight: two of 10,000 members share six by chance
once in 20 runs, and then more are asked for."""

PLANNED_S = 60.0
"""A planner works for 15 s at most, and is ended after 30; then the plan is written."""


@click.group()
def run() -> None:
    """Order something of a running coordinator: how it trains on, who may come, and who must go.

    On the coordinator's own computer these find its admin token by themselves; elsewhere name a copy of links.json.
    """


run.add_command(branch)
run.add_command(check)
run.add_command(example)
run.add_command(trace)
run.add_command(voided)


@run.command()
@click.argument("node")
@click.option("--reason", default="", help="What the banned computer's owner is told.")
@click.option("--lineage", is_flag=True, help="Also ban all who came by the same invite, and close that invite.")
@asking
def ban(node: str, reason: str, lineage: bool, url: str, links: Path | None) -> None:
    """Ban NODE (an id, or its first letters as `barnraise status` shows them).

    Its links end everywhere within seconds, and what it is computing does not count. With a link that works more than
    once it can come again under a new name: `--lineage` ends that too, for all who came by it. Servers, which all come
    by one link, are banned one by one.
    """
    base = base_of(url)
    order = {"node": _whole(base, node), "reason": reason, "lineage": lineage}
    banned = post(base, links, "ban", order)["banned"]
    click.echo(f"banned: {', '.join(banned)}")
    if not lineage:
        click.echo("(whoever has a link that works more than once can come again: barnraise run invites)")


@run.command()
@click.option("--json", "as_json", is_flag=True, help="Whole ids, and everything that is known of each.")
@click.option("--url", default=DEFAULT_URL, show_default=True, metavar="URL", help="The coordinator's status API.")
def nodes(as_json: bool, url: str) -> None:
    """Show who takes part: what each is, where it stands, since when, and what it waits for."""
    members = fetch(f"{base_of(url)}/api/status")["members"]
    if as_json:
        click.echo(json.dumps(members, indent=1))
        return
    click.echo(f"{'node':8}  {'role':9} {'state':9} {'place':20} {'tok/s':>8} {'here':>7}  name: waits for")
    for member in members:
        here_h = f"{member['since_s'] / 3600:.1f} h"
        place = member["place"] if member["role"] == "server" or member["stage"] < 0 else f"stage {member['stage']}"
        click.echo(
            f"{member['id'][:8]}  {member['role']:9} {member['state']:9} {place[:20]:20} {member['tokens_per_s']:8.0f}"
            f" {here_h:>7}  {': '.join(filter(None, (member['name'], member['waiting_for'])))}".rstrip()
        )
    if not members:
        click.echo("nobody is here")


@run.command()
@click.argument("node")
@click.option("--reason", default="", help="What the computer's owner reads in its log.")
@asking
def drain(node: str, reason: str, url: str, links: Path | None) -> None:
    """Let NODE go in peace: it ends what it has, hands in its sums, and its program ends. It may come again.

    A volunteer, or a server that waits as a spare. A server with a place holds what nobody else has, and is refused.
    """
    base = base_of(url)
    node = post(base, links, "drain", {"node": _whole(base, node), "reason": reason})["drained"]
    click.echo(f"{node[:8]} ends what it has and goes; barnraise run nodes shows when it has")


@run.command()
@click.argument("node")
@click.argument("name")
@asking
def name(node: str, name: str, url: str, links: Path | None) -> None:
    """Call NODE (an id, or its first letters) NAME, on every screen and page, now and when it comes again.

    The name stands on the page that strangers read, too. An empty NAME ('') takes it away.
    """
    base = base_of(url)
    found = post(base, links, "name", {"node": _whole(base, node), "name": name})
    click.echo(
        f"{found['node'][:8]} is called {found['name']}" if found["name"] else f"{found['node'][:8]} has no name"
    )


@run.command()
@click.argument("node")
@asking
def unban(node: str, url: str, links: Path | None) -> None:
    """Let NODE (its whole id) come again, by an invite that has a use left for it."""
    if not is_node_id(node):
        raise BadInputError(f"NODE: {node!r} is no node id (52 letters and digits)")
    post(base_of(url), links, "unban", {"node": node})
    click.echo(f"may come again: {node}")


@run.command()
@click.option("--uses", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Computers it lets in.")
@click.option("--role", type=click.Choice(["volunteer", "server", "auditor"]), default="volunteer", show_default=True)
@click.option("--days", type=FiniteRange(0, 3660, min_open=True), default=7.0, show_default=True)
@asking
def invite(uses: int, role: str, days: float, url: str, links: Path | None) -> None:
    """Print a new join link. It lets in one computer, which may come again with it; --uses makes it one for several.

    A link for several computers cannot tell them apart: somebody who was banned may come again by it. Whoever has a
    server's or an auditor's link is trusted: give it to machines of yours.
    """
    made = post(base_of(url), links, "invite", {"role": role, "uses": uses, "days": days})
    # Quoted where a person copies it: zsh and PowerShell read brackets and commas of addresses as their own.
    click.echo(f"'{made['link']}'" if sys.stdout.isatty() else made["link"])


@run.command()
@asking
def invites(url: str, links: Path | None) -> None:
    """Show the invites: how many have come by each, until when it counts, and whether it is closed."""
    rows = ask(base_of(url), links, "invites", None)["invites"]
    click.echo(f"{'invite':26}  {'role':9} {'used':>11}  {'until':16}")
    for row in rows:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["not_after"]))
        state = "closed" if row["closed"] else "over" if row["not_after"] < time.time() else ""
        used = f"{row['used']} of {row['uses']}"
        click.echo(f"{row['invite']:26}  {row['role']:9} {used:>11}  {until:16} {state}".rstrip())


@run.command()
@click.argument("invite")
@asking
def uninvite(invite: str, url: str, links: Path | None) -> None:
    """Close INVITE (as `barnraise run invites` shows it, or a whole join link): nobody joins by it any more."""
    if invite.startswith("barnraise://"):
        invite = base32(JoinLink.parse(invite).statement.nonce)
    post(base_of(url), links, "uninvite", {"invite": invite})
    click.echo("closed; who has come by it stays")


@run.command("set", context_settings={"ignore_unknown_options": True})  # a value below 0 is none
@click.argument("key")
@click.argument("value")
@asking
def set_key(key: str, value: str, url: str, links: Path | None) -> None:
    """Give KEY of the run (as in RUN.toml: optimizer.learning_rate) another VALUE from the next step on.

    Stage 0 decides which step is the next; `barnraise run changes` shows it. For what every server must know before a
    step opens (steps, checkpoint.every_steps, batch.microbatches, data.mixture) the run ends its open steps first. What
    cannot be changed says why, and what to do instead.
    """
    made = post(base_of(url), links, "set", {"key": key, "value": value})
    when = "the next step on, which opens when all servers know" if key in AT_BOUNDARY else "now on"
    if key in AT_DECISION:
        when = "the next step on that is not decided"
    click.echo(f"{made['key']} = {made['value']} from {when}")


@run.command()
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@asking
def replan(settings: tuple[str, ...], url: str, links: Path | None) -> None:
    """Lay the run out anew while it runs: other stages, another cut, other numbers of servers (keys as in RUN.toml).

    As in `run replan stages.count=3 stages.cut="3 6"`. With `stages.cut=planned` or `stages.count=auto` the planner
    says how, for those who are here now, by what their lines and devices have shown; servers stay where they are. The
    run ends its open steps, every server saves, and it goes on from there in the new layout; no step is lost. Where the
    model is cut is part of the result: `run changes` shows from which step on. Servers must share `checkpoint.folder`.
    """
    made = post(base_of(url), links, "replan", {"settings": list(settings)}, PLANNED_S)
    if made["reason"]:
        click.echo(made["reason"])
    said = in_words(RunChange(made["key"], made["value"]))
    click.echo(f"{said}: the run ends its open steps, saves, and goes on so")
    click.echo("(barnraise status tells what it waits for, and shows the plan when it has begun)")


@run.command()
@asking
def pause(url: str, links: Path | None) -> None:
    """Open no further step. Those that are open end; everybody stays, and waits."""
    post(base_of(url), links, "pause", {"paused": True})
    click.echo("paused; barnraise run resume lets it go on")


@run.command()
@asking
def resume(url: str, links: Path | None) -> None:
    """Open steps again after `run pause`."""
    post(base_of(url), links, "pause", {"paused": False})
    click.echo("the run goes on")


@run.command()
@click.argument("step", type=click.IntRange(0, 10**9))
@asking
def rollback(step: int, url: str, links: Path | None) -> None:
    """Send the run back to the checkpoint of STEP (made by so many steps; 0: to its beginning). The steps after it are
    done again.

    What was changed from one of these steps on is undone with them; `run pause` before it leaves time to change
    something. A step that no checkpoint has is refused, with those there are.
    """
    found = post(base_of(url), links, "rollback", {"step": step})
    click.echo(f"the run is back at step {step}; {found['lost_steps']} closed steps are thrown away")


@run.command()
@asking
def adopt(url: str, links: Path | None) -> None:
    """Take over the newest plan that servers show, though some of its servers are missing.

    A coordinator whose database is older than its servers waits for all of them, and `barnraise status` names those
    who are missing. Do this only when they will not come back: what they alone know is given up.
    """
    post(base_of(url), links, "adopt", {})
    click.echo("the newest plan that servers show is taken over; barnraise status shows it")


@run.command()
@click.option("--url", default=DEFAULT_URL, show_default=True, metavar="URL", help="The coordinator's status API.")
@click.option("--json", "as_json", is_flag=True, help="As `barnraise demo --reference --changes FILE` reads them.")
def changes(url: str, as_json: bool) -> None:
    """Show what was changed since the run began, and from which step on (counted from 0).

    Where RUN.toml leaves the layout to the planner, how that settled it stands first, from step 0 on.
    """
    run = fetch(f"{base_of(url)}/api/status")["run"]
    found = run["changes"]
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for change in found:
        came_late = "never: it came when the last step was done"
        never = came_late if run["state"] == "finished" else "from the next step on"
        since = f"from step {change['from_step']}" if change["from_step"] >= 0 else never
        click.echo(f"{in_words(RunChange(change['key'], change['value']))}  {since}")
    if not found:
        click.echo("nothing was changed")


def _whole(base: str, node: str) -> str:
    """The one member whose id begins so. Raises `BadInputError`."""
    if is_node_id(node):
        return node
    status = fetch(f"{base}/api/status")
    known = {str(member["id"]) for member in [*status["members"], *status.get("away", [])]}
    found = sorted(one for one in known if one.startswith(node)) if len(node) >= PREFIX_MIN else []
    if len(found) != 1:
        which = f"{len(found)} members have ids that begin so" if found else "no member's id begins so"
        raise BadInputError(f"NODE: {node!r}: {which}; give at least {PREFIX_MIN} letters, or the whole id")
    return found[0]


@run.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the signed ledger to this file.")
@click.option(
    "--check",
    "checked",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Ask nobody: check the signature of this file, and show it.",
)
@asking
def credit(out: Path | None, checked: Path | None, url: str, links: Path | None) -> None:
    """Show who has given how much: tasks that ledgers accepted, and of them those that audits found right.

    Nothing is credited to who is banned, nor before as many tasks were audited as `[audit] first` of RUN.toml says. The
    coordinator signs the whole ledger: whoever knows its node id can check the file, without asking anybody.
    """
    data = (
        checked.read_bytes() if checked is not None else json.dumps(ask(base_of(url), links, "credit", None)).encode()
    )
    ledger, coordinator = open_credit(data)
    if out is not None:
        write_file("--out", out, json.dumps(json.loads(data), indent=1) + "\n")
    click.echo(f"{'member':9} {'tasks':>9} {'audited':>9} {'credited':>9} {'tokens':>14}")
    for row in ledger.rows:
        line = f"{row.node[:8]:9} {row.tasks:9} {row.audited:9} {row.credited:9} {row.tokens:14} {row.why}"
        click.echo(printable(line.rstrip()))
    click.echo(f"run {ledger.run}, signed by coordinator {coordinator}")


run.add_command(void_command(_whole))
