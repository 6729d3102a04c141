"""Alerts against a real Prometheus, each by a fault that is staged in a run of real processes.

    python -m tests.benchmarks.staged_alerts [CASE...]

A minute of the rules is a second here: windows, offsets and the time that an expression must hold. Each case starts a
run of its own, waits until the alerts that it names are quiet, stages its fault and waits until they fire; what it saw
goes to `staged_alerts.json` beside this file, and a case that stands there is not run again unless it is named. The
other alerts are staged in `tests/integration/test_monitoring.py`, or have promtool's cases only, which the table says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.monitoring.files import rules_file
from coordinator.monitoring.rules import Thresholds, alerts
from node.platform.sensors import FAKE_VARIABLE
from tests.integration.prometheus import Prometheus, prometheus
from tests.integration.swarm import RUN, Daemon, Swarm, eventually

TABLE = Path(__file__).with_suffix(".json")
SHORT = Thresholds(stalled_s=15.0, checkpoint_s=60.0, disk_bytes=4e6)
STEADY = RUN.replace("microbatches = 2", "microbatches = 8")
"""A loss that does not leap by itself: windows are seconds here, where the rules have minutes to average it."""
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


def servers_die(swarm: Swarm, watcher: Prometheus) -> None:
    """All four servers are killed after a minute's training."""
    eventually(lambda: swarm.step() >= 3, "some steps")
    time.sleep(75)  # what the pace is compared with is that of a minute ago
    for server in swarm.servers:
        swarm.kill(server)


def slow_machines(swarm: Swarm, watcher: Prometheus) -> None:
    """A server's clock is 200 s ahead, another's disk takes 0.8 s for a sync, a third is stopped every other second."""
    words = ("server", swarm.links["server"], "--listen", "127.0.0.1:0")
    slow = swarm.folder / "slow"
    swarm._children.module = "tests.integration.hanging"
    for where in ("slow", "clock"):
        swarm.node(where, where, str(slow), *words)
    swarm._children.module = "protocol.cli"
    eventually(lambda: swarm.step() >= 3, "some steps")
    slow.touch()
    stopped = swarm.servers[0].child.process
    for _ in range(40):
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        stopped.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        if {"BarnraiseLoopBlocked", "BarnraiseJournalSlow", "BarnraiseClockOff"} <= watcher.firing():
            return


def too_hot(swarm: Swarm, watcher: Prometheus) -> None:
    """A volunteer's sensors tell of 95 degrees, for longer than a minute."""
    readings = swarm.folder / "readings.json"
    readings.write_text(json.dumps({"idle_s": 1e6, "temperature_c": 95.0, "gpu": True}))
    os.environ[FAKE_VARIABLE] = str(readings)
    try:
        swarm.node("hot", "join", swarm.links["volunteer"], "--yes", "--no-page", "--no-benchmark")
    finally:
        del os.environ[FAKE_VARIABLE]


def no_answer(swarm: Swarm, watcher: Prometheus) -> None:
    """A volunteer's device hangs: what it was given is done by others, and it ends nothing any more."""
    words = ("hangs", "join", swarm.links["volunteer"], "--yes", "--always", "--no-page", "--no-benchmark")
    swarm._children.module = "tests.integration.bad_volunteer"
    swarm.node("hangs", *words)
    swarm._children.module = "protocol.cli"


def strangers(swarm: Swarm, watcher: Prometheus) -> None:
    """Somebody who is no member calls the coordinator forty times and shakes hands with noise."""
    eventually(lambda: swarm.step() >= 1, "some steps")
    host, _, port = swarm.links["listen"].rpartition(":")
    for _ in range(40):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes(range(256)) * 4)
        time.sleep(0.05)


CASES: dict[str, tuple[str, int, Stage, tuple[str, ...]]] = {
    "diverge": (STEADY, 4, diverge, ("BarnraiseLossSpike", "BarnraiseRunNotFinite")),
    "too_few": (STEADY, 3, too_few, ("BarnraisePlacesOpen",)),
    "servers_die": (
        STEADY,
        4,
        servers_die,
        ("BarnraiseNodesLeaving", "BarnraiseRunStalled", "BarnraiseThroughputDropped"),
    ),
    "slow_machines": (
        STEADY,
        2,
        slow_machines,
        ("BarnraiseClockOff", "BarnraiseJournalSlow", "BarnraiseLoopBlocked"),
    ),
    "too_hot": (STEADY, 4, too_hot, ("BarnraiseNodeHot", "BarnraiseNodeIdleUnwillingly")),
    "no_answer": (STEADY, 4, no_answer, ("BarnraiseNodeIdle",)),
    "strangers": (STEADY, 4, strangers, ("BarnraiseBadPeers",)),
}


def in_seconds(rules: str) -> str:
    """The rules with seconds where they have minutes."""
    hours = re.sub(r"(?<=[\[ ])(\d+)h(?=[\] )])", lambda found: f"{60 * int(found[1])}s", rules)
    idle = hours.replace("> 3600 and", "> 60 and")
    return re.sub(r"(?<=[\[ ])(\d+)m(?=[\] )])", r"\1s", idle)


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
