"""A run that its operator pauses, changes and lets go on, with real processes, equals one process doing the same."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from node.audit import audit
from tests.integration.swarm import Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("changes")]

RUN = """
name = "changes"
steps = 120
[model]
layers = 1
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "DATA"
tokenizer = "prepared"
mixture = "one=1 two=0"
[batch]
microbatches = 3
[stages]
count = 1
back_servers = 0
collocated = "never"
[optimizer]
warmup_steps = 2
[checkpoint]
every_steps = 5
folder = "FOLDER"
"""
"""One stage whose server computes when it is told to: nothing happens before. With the delay of one step two are
open."""


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "protocol.cli", *words], capture_output=True, text=True, timeout=240)


def tensors(model: Path) -> dict[str, Any]:
    with safe_open(model / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def settled(swarm: Swarm) -> bool:
    """Nothing is open any more: two looks, a second apart, see the same step."""
    before = swarm.step()
    time.sleep(1.0)
    return swarm.step() == before


def test_a_run_is_paused_changed_sent_back_and_goes_on_as_its_reference(tmp_path: Path) -> None:
    """Paused while nobody computes, it ends the two steps that are open and no more; the change counts from step 2;
    what cannot be changed is said; its steps, checkpoints and mixture change at the end of a step,
    with nothing thrown away; sent back to a checkpoint, and no other step, it does the steps after it again; the
    weights are those of `--reference` with the same changes, bit by bit, and a tracker has each step once."""
    (tmp_path / "checkpoints").mkdir()
    data = tmp_path / "data"
    for name, words in (("one", "a short tale of the sea. "), ("two", "10 PRINT 20 GOTO ")):
        (tmp_path / f"{name}.txt").write_text(words * 400)
    sources = [f"{name}={tmp_path / name}.txt" for name in ("one", "two")]
    assert command("data", "prepare", *sources, "--out", str(data)).returncode == 0
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints")).replace("DATA", str(data))
    with Swarm(tmp_path, text, server_count=0, coordinator=("--track", f"csv:{tmp_path / 'csv'}")) as swarm:
        url = ["--url", swarm.links["http"]]
        early = command("run", "pause", *url)
        assert early.returncode == 2 and "edit RUN.toml" in early.stderr
        swarm.node(
            "server-0", "server", swarm.links["server"], "--listen", "127.0.0.1:0", "--checkpoints",
            str(tmp_path / "checkpoints"), "--data", str(data),
        )  # fmt: skip
        eventually(lambda: swarm.status()["run"]["data_hash"], "the data")
        assert command("run", "pause", *url).returncode == 0
        eventually(lambda: swarm.status()["run"]["state"] == "paused", "the pause")
        assert swarm.step() == -1, "nobody computes"
        assert command("run", "set", "stages.collocated", "always", *url).returncode == 0
        eventually(lambda: swarm.step() >= 1, "the open steps")
        for key, value, says in (
            ("batch.microbatches", "4", "4, and at most 3 are possible"),
            ("batch.microbatches", "0", "0 is not between 1 and 65536"),
            ("batch.microbatches", "-1", "-1 is not between 1 and 65536"),
            ("batch.microbatches", "some", "expected a whole number"),
            ("batch.samples", "4", "`barnraise run branch` begins another run"),
            ("steps", "1", "step 2 is done"),
            ("data.mixture", "one=0 two=0", "the weights sum to zero"),
            ("data.mixture", "three=1", "the run's file names one, two"),
            ("optimizer.learning_rate", "much", "expected a number"),
        ):
            refused = command("run", "set", key, value, *url)
            assert refused.returncode == 2 and says in refused.stderr
        for key, value in (
            ("optimizer.learning_rate", "0.01"), ("optimizer.decay", "wsd"), ("data.mixture", "one=1 two=1"),
            ("batch.microbatches", "1"), ("limits.lease_s", "30"),
        ):  # fmt: skip
            done = command("run", "set", key, value, *url)
            assert done.returncode == 0 and key in done.stdout, done.stderr
        assert swarm.step() == 1, "a paused run opens no step"
        assert command("run", "resume", *url).returncode == 0
        eventually(lambda: swarm.step() >= 6, "a checkpoint")
        assert command("run", "set", "optimizer.clip_norm", "0.01", *url).returncode == 0
        assert command("run", "pause", *url).returncode == 0
        eventually(lambda: settled(swarm), "the open steps")
        newest = swarm.step()
        refused = command("run", "rollback", "4", *url)
        assert refused.returncode == 2 and "no checkpoint has step 4; there" in refused.stderr, refused.stderr
        assert swarm.step() == newest
        back = [int(word) for word in re.findall(r"\d+", refused.stderr.partition("of step")[2])][-3:][0]
        done = command("run", "rollback", str(back), *url)
        assert done.returncode == 0 and f"back at step {back}; {newest + 1 - back} closed steps" in done.stdout, (
            done.stderr
        )
        lost = swarm.status()["run"]["lost_steps"]
        assert lost == newest + 1 - back and swarm.step() == back - 1
        assert command("run", "set", "optimizer.learning_rate", "0.005", *url).returncode == 0
        assert command("run", "resume", *url).returncode == 0
        eventually(lambda: swarm.step() >= 39, "the fortieth step")
        wanted = (
            ("optimizer.learning_rate", "0.004"), ("steps", "180"), ("checkpoint.every_steps", "30"),
            ("batch.microbatches", "3"), ("data.mixture", "one=0 two=1"),
        )  # fmt: skip
        done = command("run", "set", *wanted[0], *url)
        assert done.returncode == 0 and "the next step on that is not decided" in done.stdout, done.stderr
        for key, value in wanted[1:]:
            done = command("run", "set", key, value, *url)
            assert done.returncode == 0 and "opens when all servers know" in done.stdout, done.stderr
        eventually(lambda: swarm.step() >= 70, "the seventieth step")
        assert command("run", "set", "batch.microbatches", "2", *url).returncode == 0
        eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
        # It looks for new steps every two seconds: a head and 180 lines.
        eventually(lambda: (tmp_path / "csv" / "changes.csv").read_text().count("\n") == 181, "the tracker")
        assert swarm.status()["run"]["lost_steps"] == lost, "no step is thrown away for a change"
        changes = command("run", "changes", "--json", *url).stdout
    known = [(change["key"], change["from_step"]) for change in json.loads(changes)]
    keys = ["optimizer.learning_rate", "optimizer.decay", "data.mixture", "batch.microbatches", "limits.lease_s"]
    assert known[:6] == [("stages.collocated", 0), *((key, 2) for key in keys)], known
    later = known[6:]
    if later[0][0] == "optimizer.clip_norm":  # what was changed after the checkpoint is undone, else it stays
        assert 2 < later[0][1] < back
        later = later[1:]
    assert later[0] == ("optimizer.learning_rate", back), known
    assert [key for key, _ in later[1:]] == [*(key for key, _ in wanted), "batch.microbatches"]
    steps = [step for _, step in later]
    assert steps == sorted(steps) and steps[1] >= 40 and steps[-1] < 180, known
    print(
        f"changed at step {steps[1]} (rate) and {steps[2]} (steps, checkpoints, mixture) of a run sent back to {back}"
    )
    with (tmp_path / "csv" / "changes.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines] == list(range(180)), "each step once"
    counts = [3, *(int(each["value"]) for each in json.loads(changes) if each["key"] == "batch.microbatches")]
    firsts = [0, *(step for key, step in known if key == "batch.microbatches"), 180]
    assert counts == [3, 1, 3, 2]
    tokens = [0.0, *(float(line["tokens"]) for line in lines)]
    for count, first, end in zip(counts, firsts, firsts[1:], strict=False):
        assert {tokens[step + 1] - tokens[step] for step in range(first, end)} == {count * 2 * 16.0}, (first, end)
    found = audit([tmp_path / "server-0"])
    assert found.clean and found.steps == 180, found.findings[:3]
    (tmp_path / "changes.json").write_text(changes)
    exported = command("export", str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert exported.returncode == 0, exported.stderr
    reference = ["demo", "--reference", "--config", str(tmp_path / "RUN.toml")]
    for name, more in (("plain", []), ("changed", ["--changes", str(tmp_path / "changes.json")])):
        done = command(*reference, *more, "--out", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "changed" / "model")
    assert tensors(tmp_path / "model") != tensors(tmp_path / "plain" / "model")
