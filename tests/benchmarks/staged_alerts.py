"""Alerts against a real Prometheus, each by a fault that is staged in a run of real processes.

    python -m tests.benchmarks.staged_alerts [CASE...]

A minute of the rules is a second here: windows, offsets and the time that an expression must hold. Each case starts a
run of its own, waits until the alerts that it names are quiet, stages its fault and waits until they fire; what it saw
goes to `staged_alerts.json` beside this file, and a case that stands there is not run again unless it is named. The
other alerts are staged in `tests/integration/test_monitoring.py`, or have promtool's cases only, which the table says.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.monitoring.files import rules_file
from coordinator.monitoring.rules import Thresholds, alerts
from tests.integration.prometheus import Prometheus, prometheus
from tests.integration.swarm import RUN, Daemon, Swarm, eventually

TABLE = Path(__file__).with_suffix(".json")
SHORT = Thresholds(stalled_s=15.0, checkpoint_s=60.0, disk_bytes=4e6)
STEADY = RUN.replace("microbatches = 2", "microbatches = 8")
"""A loss that does not leap by itself: windows are seconds here, where the rules have minutes to average it."""
ALONE = STEADY.replace('collocated = "always"', 'collocated = "never"')
"""Only volunteers compute."""
Stage = Callable[[Swarm, Prometheus], None]


def set_key(swarm: Swarm, key: str, value: str) -> None:
    words = [sys.executable, "-m", "protocol.cli", "run", "set", key, value, "--url", swarm.links["http"]]
    subprocess.run(words, check=True, capture_output=True)


def lend(swarm: Swarm, count: int) -> list[Daemon]:
    words = ("join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    return [swarm.node(f"volunteer-{number}", *words) for number in range(count)]


def diverge(swarm: Swarm, watcher: Prometheus) -> None:
    """The operator sets a rate of a hundred, without clipping or warm-up: the loss leaps."""
    eventually(lambda: swarm.step() >= 20, "some steps")
    time.sleep(12)  # what the loss is compared with
    for key, value in (
        ("optimizer.warmup_steps", "0"), ("optimizer.clip_norm", "0"), ("optimizer.learning_rate", "100"),
    ):  # fmt: skip
        set_key(swarm, key, value)


def too_few(swarm: Swarm, watcher: Prometheus) -> None:
    """Three servers for four places."""


def all_leave(swarm: Swarm, watcher: Prometheus) -> None:
    """Five volunteers are killed; servers do not compute."""
    volunteers = lend(swarm, 5)
    eventually(lambda: swarm.step() >= 3, "some steps")
    for volunteer in volunteers:
        swarm.kill(volunteer)


def strangers(swarm: Swarm, watcher: Prometheus) -> None:
    """Somebody who is no member calls the coordinator forty times and shakes hands with noise."""
    eventually(lambda: swarm.step() >= 1, "some steps")
    host, _, port = swarm.links["listen"].rpartition(":")
    for _ in range(40):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(range(256)) * 4)
        time.sleep(0.05)


CASES: dict[str, tuple[str, int, Stage, tuple[str, ...]]] = {
    "diverge": (STEADY, 4, diverge, ("BarnraiseLossSpike",)),
    "too_few": (STEADY, 3, too_few, ("BarnraisePlacesOpen",)),
    "all_leave": (ALONE, 4, all_leave, ("BarnraiseNodesLeaving", "BarnraiseRunStalled", "BarnraiseThroughputDropped")),
    "strangers": (STEADY, 4, strangers, ("BarnraiseBadPeers",)),
}


def in_seconds(rules: str) -> str:
    """The rules with seconds where they have minutes."""
    hours = re.sub(r"(?<=[\[ ])(\d+)h(?=[\] )])", lambda found: f"{60 * int(found[1])}s", rules)
    return re.sub(r"(?<=[\[ ])(\d+)m(?=[\] )])", r"\1s", hours)


def healthy(swarm: Swarm, watcher: Prometheus) -> list[str]:
    """A minute of a run with nothing wrong: what fires nevertheless."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    seen: set[str] = set()
    for _ in range(60):
        seen |= watcher.firing()
        time.sleep(1)
    return sorted(seen)


def run_case(name: str) -> dict[str, object]:
    """What a case saw."""
    text, servers, stage, names = CASES.get(name, (STEADY, 4, too_few, ()))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "mon").mkdir()
        rules = in_seconds(rules_file(SHORT, lambda alert: max(1.0, alert.hold_s / 60)))
        with (
            Swarm(home, text.replace('"attacked"', '"staged"'), servers) as swarm,
            prometheus(home / "mon", swarm.links["http"], SHORT, lambda alert: 1.0, rules) as watcher,
        ):
            eventually(lambda: watcher.up().get("coordinator") == 1, "the coordinator")
            if name == "healthy":
                return {"fires": healthy(swarm, watcher)}
            watcher.is_quiet(*names)
            began = time.monotonic()
            stage(swarm, watcher)
            after: dict[str, float] = {}
            while len(after) < len(names) and time.monotonic() < began + 240:
                for alert in sorted(set(names) & watcher.firing() - after.keys()):
                    after[alert] = round(time.monotonic() - began, 1)
                time.sleep(0.2)
            return {"fault": " ".join((stage.__doc__ or "").split()), "fires_after_s": after, "wanted": list(names)}


def main(words: list[str]) -> int:
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in words or [name for name in ("healthy", *CASES) if name not in table]:
        try:
            table[name] = run_case(name)
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
            continue
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
        print(f"{name}: {table[name]}", flush=True)
    staged = {alert for found in table.values() for alert in found.get("fires_after_s", {})}
    known = [alert.name for alert in alerts()]
    print(f"{len(staged)} of {len(known)} alerts staged here: {', '.join(sorted(staged))}")
    return sum(set(found.get("wanted", ())) != set(found.get("fires_after_s", {})) for found in table.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
