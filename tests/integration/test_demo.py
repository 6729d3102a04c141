"""The demo, small: real processes over real sockets end with the losses and weights of one process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN = """
name = "tiny"
steps = 40
[model]
layers = 2
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 32
[data]
source = "builtin:grammar"
[optimizer]
learning_rate = 1e-3
[checkpoint]
every_steps = 5
[limits]
snapshot_steps = 4
"""


def demo(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Runs `barnraise demo` on the tiny run; returns its summary."""
    (tmp_path / "RUN.toml").write_text(RUN)
    name = "reference" if "--reference" in arguments else "demo"
    summary = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", "protocol.cli", "demo", "--config", str(tmp_path / "RUN.toml"), "--plain"]
    command += ["--summary", str(summary), "--out", str(tmp_path / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def distance(one: str, other: str) -> float:
    """Relative L2 distance of two exported models."""
    left, right = (load_file(Path(folder) / "model.safetensors") for folder in (one, other))
    assert left.keys() == right.keys()
    difference = sum(float(((left[name] - right[name]) ** 2).sum()) for name in left)
    return math.sqrt(difference / sum(float((right[name] ** 2).sum()) for name in right))


@pytest.mark.parametrize("delay", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_kills_of_everybody_change_nothing(tmp_path: Path, delay: str) -> None:
    """Volunteers, the coordinator and a server die by SIGKILL: every loss to 1e-4, the weights to 1e-5, no sample
    lost or doubled; at the end all volunteers die and the servers compute alone."""
    arguments = ("--chaos", "4", "--kill-coordinator", "5", "--kill-server", "7", "--kill-all-volunteers", "24")
    found = demo(tmp_path, *arguments, "--delay", delay)
    expected = demo(tmp_path, "--reference", "--delay", delay)
    assert found["steps"] == expected["steps"] == 40
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert distance(found["model"], expected["model"]) < 1e-5
    assert (found["samples_lost"], found["samples_doubled"]) == (0, 0)
    assert found["kills"] >= 5
    assert {"activation", "gradient", "weights", "control"} <= {kind for kind, count in found["bytes"].items() if count}
    assert found.keys() == expected.keys()


@pytest.mark.long
def test_a_run_whose_cut_is_planned_has_the_weights_of_one_process(tmp_path: Path) -> None:
    """Servers measure each other and themselves, a planner cuts the model and seats them; one is a spare; volunteers,
    the coordinator and a server die. The weights are to the last bit those of one process with the cut that the summary
    names: what a planner chooses is part of the run, and its sentence can be followed. (Mostly it cuts unevenly; where
    what was measured makes the even cut as good, it says so.)"""
    planned = ("--stages", "3", "--servers", "7", "--set", "stages.cut=planned", "--steps", "60")
    kept = ("--state", str(tmp_path / "state"))
    found = demo(tmp_path, *planned, *kept, "--chaos", "5", "--kill-coordinator", "4", "--kill-server", "8")
    assert found["stages"] == 3 and (found["cut"] == "even" or len(found["cut"].split()) == 2), found["cut"]
    assert "planned from what was measured" in (tmp_path / "state" / "coordinator" / "log").read_text()
    cut = f"stages.cut={found['cut']}"
    expected = demo(tmp_path, "--reference", "--stages", "3", "--set", cut, "--steps", "60")
    weights = [(Path(model) / "model.safetensors").read_bytes() for model in (found["model"], expected["model"])]
    assert weights[0] == weights[1]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert (found["samples_lost"], found["samples_doubled"]) == (0, 0) and found["kills"] >= 3


@pytest.mark.long
def test_differences_up_come_to_the_weights_of_one_process(tmp_path: Path) -> None:
    """Four stages of servers that are front and back in one, in segments too; volunteers and a server die. The weights
    are to the last bit those of one process, which rounds what crosses the wire in the same way."""
    form = ("--stages", "4", "--set", "wire.activations_up=d4", "--set", "stages.back_servers=0", "--steps", "24")
    for further in ((), ("--set", "batch.segments=2", "--set", "audit.rate=0")):
        found = demo(tmp_path, *form, *further, "--chaos", "5", "--kill-server", "8")
        expected = demo(tmp_path, "--reference", *form, *further)
        weights = [(Path(model) / "model.safetensors").read_bytes() for model in (found["model"], expected["model"])]
        assert weights[0] == weights[1] and found["kills"] >= 3
        assert (found["samples_lost"], found["samples_doubled"]) == (0, 0)


def test_a_demo_that_is_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Ctrl-C in the middle ends all processes; the same command finishes the run with the same losses."""
    (tmp_path / "RUN.toml").write_text(RUN)
    command = [sys.executable, "-m", "protocol.cli", "demo", "--config", str(tmp_path / "RUN.toml"), "--plain"]
    command += ["--state", str(tmp_path / "state"), "--out", str(tmp_path / "out"), "--steps", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("step 06"):
            first.send_signal(signal.SIGINT)
            break
    rest = first.stdout.read()
    first.stdout.close()
    assert first.wait() == 130 and "all processes are ended" in rest, rest
    found = demo(tmp_path, "--state", str(tmp_path / "state"), "--steps", "20")
    expected = demo(tmp_path, "--reference", "--steps", "20")
    assert found["steps"] == expected["steps"] == 20
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert distance(found["model"], expected["model"]) < 1e-5
    assert (found["samples_lost"], found["samples_doubled"]) == (0, 0)
