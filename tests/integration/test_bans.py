"""V8 with real processes: a banned member's work counts nowhere any more, and it comes in nowhere again.

The member is the ordinary volunteer but for one thing: it does not hear that it is unwanted (`stubborn.py`).
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from node.demo.processes import Children
from protocol.drive.process import free_port
from protocol.trust.membership import JoinLink
from tests.integration.swarm import Daemon, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("bans")]

RUN = """
name = "bans"
steps = 1000000
[model]
layers = 1
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 2
[stages]
count = 1
collocated = "never"
[checkpoint]
every_steps = 0
"""
"""One stage whose servers never compute: every step that closes was computed by volunteers."""


class StubbornChildren(Children):
    """Starts the stubborn volunteer in place of the ordinary one."""

    module = "tests.integration.stubborn"


def order(swarm: Swarm, *words: str) -> str:
    """`barnraise run WORDS` beside the coordinator; what it prints."""
    command = [sys.executable, "-m", "protocol.cli", "run", *words, "--url", swarm.links["http"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def volunteer(swarm: Swarm, children: Children, folder: Path, name: str, link: str) -> Daemon:
    home, port = folder / name, free_port()
    arguments = ["join", link, "--yes", "--no-benchmark", "--no-punch", "--state", str(home)]
    child = children.start(name, home, [*arguments, "--metrics", f"127.0.0.1:{port}"])
    return Daemon(child, f"http://127.0.0.1:{port}/metrics")


def node_of(swarm: Swarm) -> str:
    """The one volunteer's id, as soon as it takes part."""
    members = eventually(
        lambda: [one for one in swarm.status()["members"] if one["role"] == "volunteer"], "a volunteer"
    )
    return str(members[0]["id"])


def hangs_up(server: Daemon, since: int, node: str) -> bool:
    """Whether its log says so, from this place on."""
    return any(line.get("event") == "hang up" and line.get("peer") == node for line in server.log(since))


def refuses_the_banned(server: Daemon, since: int) -> bool:
    """Whether its log says so, from this place on."""
    return any(
        line.get("event") == "peer refused" and "is banned" in line.get("detail", "") for line in server.log(since)
    )


def bans_on_disk(server: Daemon) -> bytes:
    """The list that its next life will begin with; empty: none."""
    (journal,) = server.child.folder.rglob("journal.sqlite")
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as database:
        row = database.execute("SELECT value FROM meta WHERE name = 'bans'").fetchone()
    return b"" if row is None else bytes(row[0])


def has_said(server: Daemon, words: str) -> bool:
    return words in server.child.log_path.read_text()


def test_a_banned_member_is_out_everywhere_at_once_and_stays_out(tmp_path: Path) -> None:
    """Links end, nothing more counts, its membership opens no server, its invite no coordinator; others go on."""
    with Swarm(tmp_path, RUN, server_count=2) as swarm, StubbornChildren() as stubborn, Children() as honest:
        link = order(swarm, "invite")
        assert JoinLink.parse(link).statement.uses == 1
        liar = volunteer(swarm, stubborn, tmp_path, "liar", link)
        eventually(lambda: swarm.step() >= 3, "work of the volunteer")
        node = node_of(swarm)
        logs = {server.name: server.log_length() for server in swarm.servers}

        at_ban, began = swarm.step(), time.monotonic()
        assert order(swarm, "ban", node[:8], "--reason", "it lies").startswith(f"banned: {node}")
        for server in swarm.servers:
            eventually(partial(hangs_up, server, logs[server.name], node), f"{server.name} hanging up")
        took_s, at_end = time.monotonic() - began, swarm.step()
        print(
            f"in force at every server {took_s:.2f} s after `barnraise run ban` began; {at_end - at_ban} steps closed"
        )

        # It knows the servers and has a membership that has not run out: it dials them again and again.
        for server in swarm.servers:
            eventually(partial(refuses_the_banned, server, logs[server.name]), f"{server.name} refusing it")
        assert liar.child.running, "it would not go by itself"
        frozen = swarm.step()
        assert frozen <= at_end + 2, "steps that were accepted whole may close, and no other"

        # A new name with the same invite is refused; so is the lot when somebody else is let in.
        second = volunteer(swarm, honest, tmp_path, "second", link)
        assert second.child.process.wait(60) == 1
        assert "this invite was for 1 node(s)" in second.child.log_tail()
        assert swarm.step() == frozen, "nobody computes, so no step may close"
        volunteer(swarm, honest, tmp_path, "honest", order(swarm, "invite", "--days", "1"))
        eventually(lambda: swarm.step() > frozen + 3, "steps of the honest volunteer")
        invites = order(swarm, "invites")
        assert invites.count("1 of 1") == 2
        assert swarm.status()["banned"] == 1


@pytest.mark.long
def test_a_ban_holds_while_the_coordinator_is_away_and_after_a_server_comes_back(tmp_path: Path) -> None:
    """A server that starts again with the coordinator down has the list on its disk, and its fellow has it too."""
    with Swarm(tmp_path, RUN, server_count=2) as swarm, StubbornChildren() as stubborn:
        liar = volunteer(swarm, stubborn, tmp_path, "liar", swarm.links["volunteer"])
        eventually(lambda: swarm.step() >= 1, "work of the volunteer")
        server = swarm.servers[0]
        known = bans_on_disk(server)
        order(swarm, "ban", node_of(swarm))
        for each in swarm.servers:
            eventually(partial(has_said, each, "is banned"), "a refusal")
        eventually(lambda: bans_on_disk(server) != known, "the list on its disk")
        swarm.kill(swarm.coordinator)
        swarm.kill(server)
        before = server.log_length()
        swarm.again(server)
        eventually(
            lambda: any("is banned" in line.get("detail", "") for line in server.log(before)), "a refusal by the disk"
        )
        assert liar.child.running
