"""A run that its operator pauses, changes and lets go on, with real processes, equals one process doing the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.integration.swarm import Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("changes")]

RUN = """
name = "changes"
steps = 10
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
back_servers = 0
collocated = "never"
[optimizer]
warmup_steps = 2
[checkpoint]
every_steps = 0
folder = "FOLDER"
"""
"""One stage that a volunteer computes: nothing happens before it has come. With the delay of one step two are open."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "protocol.cli", *words], capture_output=True, text=True, timeout=240)


def tensors(model: Path) -> dict[str, Any]:
    with safe_open(model / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def test_a_run_is_paused_changed_and_goes_on_as_its_reference(tmp_path: Path) -> None:
    """Paused before anybody computes, it ends the two steps that are open and no more; the change counts from step 2;
    what cannot be changed is said; and the weights are those of `--reference` with the same changes, bit by bit."""
    (tmp_path / "checkpoints").mkdir()
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints"))
    with Swarm(tmp_path, text, server_count=0) as swarm:
        url = ["--url", swarm.links["http"]]
        early = command("run", "pause", *url)
        assert early.returncode == 2 and "edit RUN.toml" in early.stderr
        swarm.node(
            "server-0", "server", swarm.links["server"], "--listen", "127.0.0.1:0", "--checkpoints",
            str(tmp_path / "checkpoints"),
        )  # fmt: skip
        eventually(lambda: swarm.status()["run"]["data_hash"], "the data")
        assert command("run", "pause", *url).returncode == 0
        eventually(lambda: swarm.status()["run"]["state"] == "paused", "the pause")
        swarm.node("volunteer", "join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
        eventually(lambda: swarm.step() >= 1, "the open steps")
        for key, value, says in (
            ("steps", "20", "cannot be changed while the run runs"),
            ("optimizer.learning_rate", "much", "expected a number"),
        ):
            refused = command("run", "set", key, value, *url)
            assert refused.returncode == 2 and says in refused.stderr
        for key, value in (("optimizer.learning_rate", "0.01"), ("optimizer.decay", "wsd")):
            done = command("run", "set", key, value, *url)
            assert done.returncode == 0 and key in done.stdout, done.stderr
        assert swarm.step() == 1, "a paused run opens no step"
        assert command("run", "resume", *url).returncode == 0
        eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
        changes = command("run", "changes", "--json", *url).stdout
    assert [change["from_step"] for change in json.loads(changes)] == [2, 2]
    (tmp_path / "changes.json").write_text(changes)
    exported = command("export", str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert exported.returncode == 0, exported.stderr
    reference = ["demo", "--reference", "--config", str(tmp_path / "RUN.toml")]
    for name, more in (("plain", []), ("changed", ["--changes", str(tmp_path / "changes.json")])):
        done = command(*reference, *more, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "changed" / "model")
    assert tensors(tmp_path / "model") != tensors(tmp_path / "plain" / "model")
