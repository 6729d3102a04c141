"""`barnraise run trace` of real processes: what they did, in a file that Perfetto takes, beside what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.world.test_traces import check_chrome
from tests.integration.swarm import RUN, Swarm, eventually, fetch

pytestmark = pytest.mark.slow


def run_trace(swarm: Swarm, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "protocol.cli", "run", "trace", *arguments, "--url", swarm.links["http"]]
    return subprocess.run(command, capture_output=True, text=True, timeout=170)


def test_an_operator_gets_everybodys_spans_beside_a_prediction(tmp_path: Path) -> None:
    """Each server's device, lane and transfers, the coordinator's own spans, steps on both sides; a table, a picture;
    and the run goes on."""
    with Swarm(tmp_path, RUN) as swarm:
        eventually(lambda: swarm.step() >= 5, "steps")
        out, picture = tmp_path / "trace.json", tmp_path / "trace.svg"
        done = run_trace(swarm, str(out), "--seconds", "20", "--table", "--svg", str(picture))
        assert done.returncode == 0, done.stderr
        assert "predicted" in done.stdout and "off" in done.stdout
        written = json.loads(out.read_text())
        check_chrome(written)
        events: list[dict[str, Any]] = [event for event in written["traceEvents"] if event["ph"] == "X"]
        assert {event["pid"] for event in events} == {1, 2}
        real = [event for event in events if event["pid"] == 1]
        nodes = {event["args"].get("node") for event in real} - {None}
        assert nodes == {
            *(server["id"] for s in swarm.status()["stages"] for server in s["servers"]),
            "the coordinator",
        }
        assert {"step", "forward", "backward", "loss", "receive", "send", "task", "optimizer", "fold", "database"} <= {
            event["cat"] for event in real
        }
        # One computer, one clock: a transfer comes after it went, as far as the estimated offsets allow.
        activations = [event for event in real if event["name"].startswith("Activation ")]
        went = {_key(event): event["ts"] for event in activations if event["cat"] == "send"}
        pairs = [(went[_key(e)], e["ts"] + e["dur"]) for e in activations if e["cat"] == "receive" and _key(e) in went]
        assert pairs and all(end >= start - 50_000 for start, end in pairs)
        assert picture.read_text().startswith("<svg")
        shown = fetch(swarm.links["http"] + "/page/timeline.svg")
        assert "predicted:" in shown and "measured:" in shown
        assert not any(server["id"] in shown for s in swarm.status()["stages"] for server in s["servers"])
        assert run_trace(swarm, "--links", str(tmp_path / "none")).returncode == 2
        swarm.moves_on()


def _key(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["name"], event["args"]["step"]
