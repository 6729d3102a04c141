"""What a run pays for being watched: validation, spans, and metrics as Prometheus asks for them, in one run.

`python -m tests.benchmarks.watching [--steps 150] [--every 50]` trains the demo (real processes), asks every daemon's
`/metrics` every second, and at the end compares, by the daemons' own counts, the seconds that devices spent on the
validation with all that they worked, and the seconds that answering took with the time between two questions of
Prometheus (15 s). What noting spans and numbers took stands beside how long each daemon ran (`watched.py`); the one
that spent the largest share counts for all. Shares of one run's seconds, so a busy machine hardly tilts them. Each
second of a watcher's is taken for one that the run has less of: all together may take 2 % of its tokens per second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.benchmarks.watched import FILE

SCRAPE_EVERY_S = 15.0
BOUND = 0.02
_SECONDS = re.compile(r'^barnraise_node_operation_duration_seconds_sum\{.*operation="(\w+)".*\} (\S+)$', re.MULTILINE)


def main() -> int:
    """Prints the shares; exit code 1 when they are over the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        command = [sys.executable, "-m", "tests.benchmarks.watched", "demo", "--steps", str(options.steps), "--plain"]
        command += ["--set", f"validation.every_steps={options.every}", "--set", "validation.batches=4"]
        command += ["--state", str(state), "--out", f"{folder}/out", "--summary", f"{folder}/summary.json"]
        demo = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        worked: dict[str, dict[str, float]] = {}
        answered: list[float] = []
        while demo.poll() is None:
            for file in state.rglob("metrics.json"):
                _ask(file, worked, answered)
            time.sleep(1.0)
        if demo.returncode:
            return 1
        summary = json.loads(Path(f"{folder}/summary.json").read_text())
        noted = {file.parent.name: json.loads(file.read_text()) for file in state.rglob(FILE)}
    totals: dict[str, float] = {}
    for operations in worked.values():
        for operation, seconds in operations.items():
            totals[operation] = totals.get(operation, 0.0) + seconds
    validation = totals.get("validation", 0.0) / sum(totals.values())
    scrapes = sum(answered) / len(answered) / SCRAPE_EVERY_S
    print(f"versions validated: {', '.join(summary['validations'])} of {options.steps} steps")
    print(f"validation  {100 * validation:.2f} % of the seconds that devices and servers worked ({totals})")
    notes = {name: _noting(spent) for name, spent in noted.items()}
    busiest = max(notes, key=lambda name: notes[name])
    calls = {kind: int(noted[busiest][kind][1]) for kind in ("spans", "records")}
    mean_ms = 1e3 * sum(answered) / len(answered)
    print(f"metrics     {100 * scrapes:.2f} % of a daemon's time ({len(answered)} answers, mean {mean_ms:.1f} ms)")
    print(f"notes       {100 * notes[busiest]:.2f} % of the time of {busiest}, of {len(notes)} the most ({calls})")
    together = validation + scrapes + notes[busiest]
    print(f"together    {100 * together:.2f} %, bound {100 * BOUND:.0f} %")
    return 0 if together < BOUND and totals.get("validation", 0.0) > 0 and all(calls.values()) else 1


def _noting(spent: dict[str, Any]) -> float:
    """The share of a daemon's time that went into spans and records."""
    return float((spent["spans"][0] + spent["records"][0]) / spent["seconds"])


def _ask(file: Path, worked: dict[str, dict[str, float]], answered: list[float]) -> None:
    """One daemon's counts, by its file, and how long it took to answer."""
    try:
        target = json.loads(file.read_text())[0]["targets"][0]
        begun = time.perf_counter()
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
    except (OSError, ValueError, urllib.error.URLError):
        return
    answered.append(time.perf_counter() - begun)
    found = {operation: float(seconds) for operation, seconds in _SECONDS.findall(text)}
    if found:
        worked[str(file)] = found


if __name__ == "__main__":
    sys.exit(main())
