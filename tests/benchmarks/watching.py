"""What a run pays for being watched: its validation, and its metrics as Prometheus asks for them, in one run.

`python -m tests.benchmarks.watching [--steps 150] [--every 50]` trains the demo (real processes), asks every daemon's
`/metrics` every second, and at the end compares, by the daemons' own counts, the seconds that devices spent on the
validation with all that they worked, and the seconds that answering took with the time between two questions of
Prometheus (15 s). Shares of one run's seconds, so a busy machine hardly tilts them; the bound for both is 2 %.
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
        command = [sys.executable, "-m", "protocol.cli", "demo", "--steps", str(options.steps), "--plain"]
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
    totals: dict[str, float] = {}
    for operations in worked.values():
        for operation, seconds in operations.items():
            totals[operation] = totals.get(operation, 0.0) + seconds
    validation = totals.get("validation", 0.0) / sum(totals.values())
    scrapes = sum(answered) / len(answered) / SCRAPE_EVERY_S
    print(f"versions validated: {', '.join(summary['validations'])} of {options.steps} steps")
    print(f"validation  {100 * validation:.2f} % of the seconds that devices and servers worked ({totals})")
    mean_ms = 1e3 * sum(answered) / len(answered)
    print(f"metrics     {100 * scrapes:.2f} % of a daemon's time ({len(answered)} answers, mean {mean_ms:.1f} ms)")
    print(f"together    {100 * (validation + scrapes):.2f} %, bound {100 * BOUND:.0f} %")
    return 0 if validation + scrapes < BOUND and totals.get("validation", 0.0) > 0 else 1


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
