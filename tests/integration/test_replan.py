"""A run of real processes is laid out anew while it trains, and equals one process that is told the same change."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from protocol.drive.process import free_port
from tests.integration.swarm import Swarm, eventually
from tests.integration.test_changes import command, tensors

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("replan")]

RUN = """
name = "replan"
steps = 20000
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
microbatches = 2
[stages]
count = 2
back_servers = 0
collocated = "always"
[optimizer]
warmup_steps = 2
[checkpoint]
every_steps = 25
folder = "FOLDER"
"""


def state(swarm: Swarm) -> str:
    """The run's; nothing while the coordinator starts."""
    try:
        return str(swarm.status()["run"]["state"])
    except OSError:
        return ""


def when_known(asked: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str] | None:
    """What a planner was asked, once lines are measured."""
    return None if "no line is measured yet" in asked.stderr else asked


def end_soon(swarm: Swarm, url: list[str]) -> None:
    """The run is to have a few more steps than it has by now; nothing was thrown away."""
    done = command("run", "set", "steps", str(swarm.step() + 20), *url)
    assert done.returncode == 0, done.stderr
    eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
    assert swarm.status()["run"]["lost_steps"] == 0 and swarm.status()["run"]["rollbacks"] == 0


def test_a_run_goes_on_with_three_stages_and_then_with_one_as_its_reference(tmp_path: Path) -> None:
    """Two stages and a spare become three stages; a server dies, and the coordinator, and come back; the three become
    one stage of two servers, ordered after that restart. What cannot be is refused before anybody is held. No step is
    thrown away, no sample lost or doubled; status and history tell the layouts; the weights are those of one process,
    bit by bit, and not those of one without the changes."""
    (tmp_path / "checkpoints").mkdir()
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints"))
    ports = ("--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}")
    more = ("--checkpoints", str(tmp_path / "checkpoints"))
    with Swarm(tmp_path, text, server_count=3, more=more, coordinator=ports) as swarm:
        url = ["--url", swarm.links["http"]]
        eventually(lambda: swarm.step() >= 5, "some steps")
        for words, says in (
            (["stages.count=4"], "take 4 servers, and 3 are here"),
            (["routes.skip=0.5"], "routes.skip: is no part of the layout"),
            (["stages.count=2"], "the run has this layout already"),
            (["stages.cut=9"], "stages.cut: "),
            (["stages.cut=planned", "stages.front_servers=2"], "take 4 servers, and 3 are here"),
        ):
            refused = command("run", "replan", *words, *url)
            assert refused.returncode == 2 and says in refused.stderr, refused.stderr
        began = time.monotonic()
        done = command("run", "replan", "stages.count=3", *url)
        assert done.returncode == 0, done.stderr
        eventually(lambda: len(swarm.status()["stages"]) == 3, "three stages")
        first = swarm.status()["restore_step"]
        eventually(lambda: swarm.step() > first, "a step of three stages")
        print(f"from the order to the first step of the new layout: {time.monotonic() - began:.2f} s")
        assert "laid out anew from step" in swarm.status()["plan"]
        swarm.kill(swarm.servers[1])
        swarm.again(swarm.servers[1])
        swarm.kill(swarm.coordinator)
        swarm.again(swarm.coordinator)
        eventually(lambda: state(swarm) == "training", "everybody to be back")
        eventually(lambda: swarm.step() > first + 5, "more steps")
        done = command("run", "replan", "stages.count=1", "stages.front_servers=2", *url)
        assert done.returncode == 0, done.stderr
        eventually(lambda: len(swarm.status()["stages"]) == 1, "one stage")
        second = swarm.status()["restore_step"]
        end_soon(swarm, url)
        changes = command("run", "changes", "--json", *url).stdout
    assert [(change["key"], change["from_step"]) for change in json.loads(changes)[:2]] == [
        ("stages", first),
        ("stages", second),
    ]
    folders = [str(tmp_path / f"server-{number}") for number in range(3)]
    audited = subprocess.run([sys.executable, "-m", "node.audit", *folders], capture_output=True, text=True)
    assert audited.returncode == 0 and "0 samples lost, 0 doubled" in audited.stdout, audited.stdout + audited.stderr
    (tmp_path / "changes.json").write_text(changes)
    exported = command("export", str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert exported.returncode == 0, exported.stderr
    steps = json.loads(changes)[-1]["value"]
    for name, words in (("plain", ["--steps", steps]), ("changed", ["--changes", str(tmp_path / "changes.json")])):
        done = command(
            "demo", "--reference", "--config", str(tmp_path / "RUN.toml"), *words, "--out", str(tmp_path / name)
        )
        assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "changed" / "model")
    assert tensors(tmp_path / "model") != tensors(tmp_path / "plain" / "model")


def test_a_run_that_the_planner_has_cut_is_cut_by_hand_and_by_the_planner_again(tmp_path: Path) -> None:
    """RUN.toml leaves the cut open. A cut with the embedding alone in stage 0 is ordered; the coordinator dies and
    comes back, and has only the plan to know how the run was cut before; then the planner is asked again, for those
    who are here. The history has all three cuts, and the weights are those of one process that is told them."""
    (tmp_path / "checkpoints").mkdir()
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints")).replace("count = 2", 'count = 2\ncut = "planned"')
    ports = ("--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}")
    more = ("--checkpoints", str(tmp_path / "checkpoints"))
    with Swarm(tmp_path, text, server_count=2, more=more, coordinator=ports) as swarm:
        url = ["--url", swarm.links["http"]]
        eventually(lambda: swarm.step() >= 5, "some steps")
        done = command("run", "replan", "stages.cut=1", *url)
        assert done.returncode == 0, done.stderr
        eventually(lambda: swarm.status()["run"]["cut"] == "1", "the cut by hand")
        first = swarm.status()["restore_step"]
        swarm.kill(swarm.coordinator)
        swarm.again(swarm.coordinator)
        eventually(lambda: state(swarm) == "training", "everybody to be back")
        eventually(lambda: swarm.step() > first + 5, "more steps")
        soon = command("run", "replan", "stages.cut=planned", *url)
        assert soon.returncode == 2 and "no line is measured yet" in soon.stderr, soon.stdout + soon.stderr
        replan = partial(command, "run", "replan", "stages.cut=planned", *url)
        done = eventually(lambda: when_known(replan()), "the lines to be measured")
        assert done.returncode == 0, done.stderr
        assert "planned from what was measured" in done.stdout and "proven bound" in done.stdout, done.stdout
        eventually(lambda: swarm.status()["run"]["cut"] != "1", "the planner's cut")
        second = swarm.status()["restore_step"]
        end_soon(swarm, url)
        changes = command("run", "changes", "--json", *url).stdout
    told = json.loads(changes)
    assert [(change["key"], change["from_step"]) for change in told[:3]] == [
        ("stages", 0), ("stages", first), ("stages", second)
    ]  # fmt: skip
    (tmp_path / "changes.json").write_text(changes)
    exported = command("export", str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert exported.returncode == 0, exported.stderr
    words = ["--config", str(tmp_path / "RUN.toml"), "--changes", str(tmp_path / "changes.json")]
    done = command("demo", "--reference", *words, "--out", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "one" / "model")
