"""What a liar gave to a real run is void: its model is that of one process that never had the liar."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protocol.cli import main
from protocol.trust.voided import open_voided
from tests.integration.postgres import postgres, why_not
from tests.integration.swarm import Swarm, eventually
from tests.integration.test_audits import BadChildren, start
from tests.integration.test_changes import command, tensors

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("changes")]

RUN = """
name = "void"
steps = 120
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
microbatches = 8
[stages]
count = 1
back_servers = 0
collocated = "never"
[checkpoint]
every_steps = 5
folder = "FOLDER"
[audit]
rate = 1e-9
first = 0
"""
"""The server computes when it is told to, and audits nobody; old checkpoints are kept as for a run with audits."""


@pytest.mark.parametrize(
    "record", [pytest.param("in a file", marks=pytest.mark.long), "in PostgreSQL, with who came by the same invite"]
)
def test_a_voided_run_has_the_weights_of_one_that_never_had_the_liar(record: str, tmp_path: Path) -> None:
    """Six steps of its own, then some with a liar whose gradients point uphill; it is voided, hears why, and the
    operator has it signed; somebody unknown, or a server, is refused in a sentence. With --lineage another one by its
    invite goes with it, and keeps no step either."""
    lineage = record != "in a file"
    if lineage and (reason := why_not()):
        print(f"\n\n!!! VOIDING WAS NOT TESTED WITH POSTGRESQL: {reason}\n", file=sys.__stderr__)
        pytest.skip(reason)
    with postgres() if lineage else nullcontext() as cluster:
        _judge(tmp_path, ("--store", cluster.url) if cluster is not None else ())


def _judge(tmp_path: Path, coordinator: tuple[str, ...]) -> None:
    """`coordinator`: further words of its command line; any: somebody else came by the liar's invite."""
    (tmp_path / "checkpoints").mkdir()
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints"))
    with Swarm(tmp_path, text, server_count=0, coordinator=coordinator) as swarm, BadChildren() as bad:
        url = ["--url", swarm.links["http"]]

        def order(*words: str) -> Any:
            done = command("run", *words, *url)
            assert done.returncode == 0, done.stderr
            return done.stdout

        folder = str(tmp_path / "checkpoints")
        swarm.node("server-0", "server", swarm.links["server"], "--listen", "127.0.0.1:0", "--checkpoints", folder)
        eventually(lambda: swarm.status()["run"]["data_hash"], "the data")
        order("set", "stages.collocated", "always")
        eventually(lambda: swarm.step() >= 6, "a checkpoint")
        order("pause")
        link = order("invite", "--uses", "2").strip()
        liar = start(bad, tmp_path, "flips", "flips", "join", link)
        node = eventually(lambda: volunteers(swarm), "the liar")[0]
        out = [liar]
        if coordinator:
            out.append(start(bad, tmp_path, "other", "paced", "join", link))
            eventually(lambda: len(volunteers(swarm)) == 2, "the other one by its invite")
        nodes = {node, *volunteers(swarm)}
        order("set", "stages.collocated", "never")
        order("resume")
        begun = swarm.step()
        eventually(lambda: swarm.step() >= begun + 12, "steps of the liar")
        server = next(m["id"] for m in swarm.status()["members"] if m["role"] == "server")
        for whom, says in ((server, "is a server"), ("a" * 52, "nobody knows since when")):
            refused = command("run", "void", whom, *url)
            assert refused.returncode == 2 and says in refused.stderr, refused.stderr
        order("set", "stages.collocated", "always")
        lineage = ["--lineage"] if coordinator else []
        said = order("void", node[:10], "--reason", "its gradients point uphill", *lineage)
        assert said.startswith("banned: ") and all(one in said for one in nodes) and "done again without" in said, said
        eventually(lambda: not any(one.child.running for one in out), "their end")
        order("voided", "--out", str(tmp_path / "voided.json"))
        eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
        changes = order("changes", "--json")
    found, _ = open_voided((tmp_path / "voided.json").read_bytes())
    (row,) = found.rows
    assert set(row.nodes) == nodes and 0 <= row.restore_step <= row.first_step and row.lost_steps >= 12
    shown = CliRunner().invoke(main, ["run", "voided", "--check", str(tmp_path / "voided.json")])
    assert shown.exit_code == 0 and "point uphill" in shown.output
    forged = json.loads((tmp_path / "voided.json").read_text())
    forged["voided"]["rows"][0]["lost_steps"] = 0
    (tmp_path / "forged.json").write_text(json.dumps(forged))
    refused = command("run", "voided", "--check", str(tmp_path / "forged.json"))
    assert refused.returncode == 2 and "changed after it was signed" in refused.stderr
    (tmp_path / "changes.json").write_text(changes)
    done = command("export", str(tmp_path / "model"), folder)
    assert done.returncode == 0, done.stderr
    reference = ["demo", "--reference", "--config", str(tmp_path / "RUN.toml")]
    done = command(*reference, "--out", str(tmp_path / "plain"))
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "plain" / "model")


def volunteers(swarm: Swarm) -> list[str]:
    return [str(member["id"]) for member in swarm.status()["members"] if member["role"] == "volunteer"]
