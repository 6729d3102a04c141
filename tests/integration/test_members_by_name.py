"""What an operator does with members, by the ordinary commands: names them, lets one go, and is told whom not to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm import Swarm, eventually

pytestmark = [pytest.mark.slow]


def run(*words: str) -> tuple[int, str]:
    """Exit code and what `barnraise run …` said."""
    command = [sys.executable, "-m", "protocol.cli", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def volunteers(swarm: Swarm) -> list[dict[str, Any]]:
    return [member for member in swarm.status()["members"] if member["role"] == "volunteer"]


def test_a_member_is_named_and_drained_and_a_server_with_a_place_is_not(tmp_path: Path) -> None:
    """The name stands in every list; whoever is drained ends what it has and its process ends by itself, while steps
    close; a server that holds what nobody else has is refused in a sentence."""
    with Swarm(tmp_path) as swarm:
        url = ("--url", swarm.links["http"])
        lent = swarm.node(
            "volunteer", "join", swarm.links["volunteer"], "--yes", "--always", "--no-benchmark", "--no-page"
        )
        eventually(lambda: any(one["counters"].get("tasks_backward") for one in volunteers(swarm)), "its work")
        (volunteer,) = volunteers(swarm)
        server = next(member["id"] for member in swarm.status()["members"] if member["role"] == "server")
        for node, name in ((volunteer["id"], "anna"), (server, "rack 7")):
            assert run("name", node[:12], name, *url) == (0, f"{node[:8]} is called {name}\n")
        code, said = run("name", server, "anna", *url)
        assert code == 2 and f"{volunteer['id'][:8]} is called anna already" in said, said
        eventually(lambda: "anna" in run("nodes", *url)[1], "the name in the list")
        code, said = run("drain", server, *url)
        assert code == 2 and "whose state nobody else has" in said, said
        before = swarm.step()
        assert run("drain", volunteer["id"], "--reason", "it is late", *url)[0] == 0
        eventually(lambda: not lent.child.running, "its process to end")
        assert lent.child.process.returncode == 0, lent.child.log_tail()
        assert "it is late" in lent.child.log_path.read_text()
        eventually(lambda: not volunteers(swarm), "its link to end")
        eventually(lambda: swarm.step() > before, "further steps")
        assert swarm.status()["run"]["lost_steps"] == 0
