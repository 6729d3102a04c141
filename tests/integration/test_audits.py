"""Audits with real processes and torch: who sends false numbers of a usual size is banned, and the run goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from node.commands.audit import audit
from node.demo.processes import Children
from protocol.cli import main
from protocol.drive.process import free_port
from tests.integration.bad_device import SHARED
from tests.integration.swarm import Daemon, Swarm, eventually

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("audits")]

RUN = """
name = "audits"
steps = 1000000
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 8
[stages]
count = 2
back_servers = 1
[checkpoint]
every_steps = 0
[audit]
first = 1000000
"""
"""Two stages of two servers, which compute when nobody else does and audit all that is brought."""
AUDITED = re.compile(r'^barnraise_server_audits_total\{[^}]*outcome="(\w+)"[^}]*\} (\S+)$', re.MULTILINE)


class BadChildren(Children):
    """Starts volunteers that do a deed: the first word of their arguments."""

    module = "tests.integration.bad_volunteer"


def start(children: Children, folder: Path, name: str, *words: str) -> Daemon:
    home, port = folder / name, free_port()
    arguments = [*words, "--yes", "--always", "--no-benchmark", "--no-punch", "--state", str(home)]
    child = children.start(name, home, [*arguments, "--metrics", f"127.0.0.1:{port}"])
    return Daemon(child, f"http://127.0.0.1:{port}/metrics")


def banned_lines(swarm: Swarm) -> list[dict[str, Any]]:
    return [line for line in swarm.coordinator.log() if line.get("event") == "node banned"]


def off_by(reason: str) -> float:
    """By how much a banned member's gradient was found to differ: a flipped sign gives 2, on a grid a little less."""
    found = re.search(r"its gradient .* is off by (\S+)", reason)
    return 0.0 if found is None else float(found[1])


def audited(swarm: Swarm) -> dict[str, float]:
    """What came of the audits of all ledgers."""
    found: dict[str, float] = {}
    for server in swarm.servers:
        for outcome, count in AUDITED.findall(server.metrics()):
            found[outcome] = found.get(outcome, 0.0) + float(count)
    return found


def test_who_sends_false_numbers_is_banned_and_the_others_go_on(tmp_path: Path) -> None:
    """One flips the sign of its gradients, one makes its outputs and input gradients larger; beside them two honest
    volunteers, whose hundred audits are exact."""
    with Swarm(tmp_path, RUN) as swarm, Children() as children, BadChildren() as bad:
        link = str(swarm.links["volunteer"])
        honest = [start(children, tmp_path, f"honest-{number}", "join", link) for number in range(2)]
        eventually(lambda: swarm.step() >= 0, "the first step")
        eventually(lambda: audited(swarm).get("passed", 0) >= 10, "audits")
        liars = [start(bad, tmp_path, deed, deed, "join", link) for deed in ("flips", "inflates")]
        eventually(lambda: not any(liar.child.running for liar in liars), "the liars' end")
        banned = banned_lines(swarm)
        assert len(banned) == 2, banned
        assert {line["reason"].split()[0] for line in banned} == {"audits:"}
        assert any(off_by(line["reason"]) > 1.0 for line in banned)
        files = sorted(tmp_path.glob("server-*/evidence/*.safetensors"))
        checked = [CliRunner().invoke(audit, ["verify", str(path)]) for path in files]
        assert checked and all(done.exit_code == 0 for done in checked), [done.output for done in checked]
        passed = audited(swarm)["passed"]
        eventually(lambda: audited(swarm)["passed"] >= passed + 100, "a hundred more audits")
        swarm.moves_on()
        assert all(volunteer.child.running for volunteer in honest)
        found = audited(swarm)
        assert len(banned_lines(swarm)) == 2
        print(found)


def test_who_brings_what_another_member_computed_is_banned_and_the_other_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a lease of its own, so its tickets are right: only what audits compute tells that the sum is another's."""
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv(SHARED, str(tmp_path / "shared"))
    with Swarm(tmp_path, RUN.replace("count = 2", "count = 1"), server_count=2) as swarm, BadChildren() as members:
        link = str(swarm.links["volunteer"])
        lender = start(members, tmp_path, "lender", "lends", "join", link)
        eventually(lambda: list((tmp_path / "shared").glob("[0-9]*")), "sums that were computed")
        taker = start(members, tmp_path, "taker", "brings_anothers", "join", link)
        eventually(lambda: not taker.child.running, "the end of who brings them again")
        (banned,) = banned_lines(swarm)
        assert off_by(banned["reason"]) > 0.1
        passed = audited(swarm)["passed"]
        eventually(lambda: audited(swarm)["passed"] >= passed + 10, "more audits of the other")
        swarm.moves_on()
        assert lender.child.running and len(banned_lines(swarm)) == 1


NEVER = RUN.replace("count = 2\n", 'count = 2\ncollocated = "never"\n').replace("microbatches = 8", "microbatches = 4")


def test_machines_of_the_operator_audit_where_servers_compute_nothing(tmp_path: Path) -> None:
    """Without them nothing is audited; with one for each stage a liar is banned, and its evidence is checked again."""
    with Swarm(tmp_path, NEVER) as swarm, Children() as children, BadChildren() as bad:
        link = str(swarm.links["volunteer"])
        honest = [start(children, tmp_path, f"honest-{number}", "join", link) for number in range(2)]
        eventually(lambda: swarm.step() >= 1, "the second step")
        assert not audited(swarm).get("passed")
        papers = ["run", "invite", "--role", "auditor", "--uses", "2", "--url", swarm.links["http"]]
        papers += ["--links", str(swarm.state / "links.json")]
        made = CliRunner().invoke(main, papers)
        assert made.exit_code == 0, made.output
        auditors = [swarm.node(f"auditor-{number}", "audit", made.output.strip(), "--no-punch") for number in range(2)]
        eventually(lambda: audited(swarm).get("passed", 0) >= 10, "audits")
        stages = {member["stage"] for member in swarm.status()["members"] if member["role"] == "auditor"}
        assert stages == {0, 1}
        liar = start(bad, tmp_path, "flips", "flips", "join", link)
        eventually(lambda: not liar.child.running, "the liar's end")
        (banned,) = banned_lines(swarm)
        assert off_by(banned["reason"]) > 1.0
        files = sorted(tmp_path.glob("auditor-*/evidence/*.safetensors"))
        checked = [CliRunner().invoke(audit, ["verify", str(path)]) for path in files]
        assert checked and all(done.exit_code == 0 for done in checked), [done.output for done in checked]
        assert all("signed by auditor" in done.output for done in checked)
        swarm.moves_on()
        assert all(one.child.running for one in (*honest, *auditors))
        assert len(banned_lines(swarm)) == 1
