"""Volunteers that die at the worst moments, real processes by SIGKILL: the weights are those of one process.

Random kills hardly ever meet a moment that lasts a millisecond. Here a volunteer's own device ends its daemon when such
a moment comes for the third time; nobody else serves its stage, so the run waits until somebody comes in its place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from node.demo.processes import Children
from tests.integration.swarm import Swarm, eventually
from tests.integration.test_audits import BadChildren, start
from tests.integration.test_changes import command, tensors

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("changes")]

STEPS = 40
RUN = f"""
name = "mortal"
steps = {STEPS}
[model]
layers = 3
hidden = 32
heads = 2
kv_heads = 1
feed_forward = 64
context = 16
[data]
source = "builtin:grammar"
[batch]
microbatches = 4
SEGMENTS
[stages]
count = 3
back_servers = 0
collocated = "never"
[optimizer]
warmup_steps = 2
[routes]
ROUTES
[compute]
COMPUTE
[audit]
rate = 0.0
[checkpoint]
every_steps = 8
folder = "FOLDER"
"""
SHAPES = {
    "segments": ({"SEGMENTS": "segments = 3"}, ("dies_between_forwards", "dies_between_backwards", "dies_with_a_loss")),
    "skips and halves": (
        {"ROUTES": "skip = 0.34", "COMPUTE": "split_backward = true"},
        ("dies_owing_weights", "dies_with_a_loss"),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_deaths_at_the_worst_moments_change_nothing(shape: str, tmp_path: Path) -> None:
    """At each moment a volunteer dies, and its fellows a little later wherever they are; then others compute what is
    left, and a server dies in the middle of the course and comes back."""
    words, deeds = SHAPES[shape]
    text = RUN.replace("FOLDER", str(tmp_path / "checkpoints"))
    for key in ("SEGMENTS", "ROUTES", "COMPUTE"):
        text = text.replace(key, words.get(key, ""))
    (tmp_path / "checkpoints").mkdir()
    more = ("--checkpoints", str(tmp_path / "checkpoints"))
    with Swarm(tmp_path, text, server_count=3, more=more) as swarm, BadChildren() as mortal, Children() as others:
        link = str(swarm.links["volunteer"])
        for deed in deeds:
            dying = [start(mortal, tmp_path, f"{deed}-{number}", deed, "join", link) for number in range(3)]
            eventually(lambda dying=dying: not all(each.child.running for each in dying), f"a death: {deed}")  # type: ignore[misc]
            for each in dying:
                mortal.kill(each.child)
        before = swarm.step()
        assert before < STEPS - 8, "they died too late to matter"
        for number in range(3):
            start(others, tmp_path, f"survivor-{number}", "join", link)
        eventually(lambda: swarm.step() > before, "a step after the deaths")
        swarm.kill(swarm.servers[1])
        assert swarm.step() < STEPS - 1, "the server died too late to matter"
        swarm.again(swarm.servers[1])
        eventually(lambda: swarm.status()["run"]["state"] == "finished", "the end")
        found = swarm.status()["run"]
        assert (found["rollbacks"], found["lost_steps"]) == (0, 0)
    exported = command("export", str(tmp_path / "model"), str(tmp_path / "checkpoints"))
    assert exported.returncode == 0, exported.stderr
    done = command("demo", "--reference", "--config", str(tmp_path / "RUN.toml"), "--out", str(tmp_path / "alone"))
    assert done.returncode == 0, done.stderr
    assert tensors(tmp_path / "model") == tensors(tmp_path / "alone" / "model")
