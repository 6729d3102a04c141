"""What a slow volunteer costs a run that it joins: `python -m tests.benchmarks.slow_joins FILE [--rounds 6]` (root).

Real processes in network namespaces, with lines and shares of a core as `tests.benchmarks.predicted` shapes them: four
servers at 100 Mbit/s, two stages, four volunteers at 20/80 Mbit/s. A fifth one, with 2/20 Mbit/s and a device like
theirs, joins and leaves in turns within one run, so that whatever else the computer does meets both arms:

    without: S steps | it joins | with: S steps, from the moment it is a member | it leaves | without: …

*With* begins when the run's status names it: what the first leases cost, before servers know what it is worth, counts.
FILE gets a line for each round as it ends; ended and started again, the script goes on in a new run. At the end: the
mean of (seconds a step with it / without it) - 1 over all rounds, where *without* is the mean of the arms before and
after in the same run, and its standard error. Exit code 1 where the mean is 5 % or more. A round takes twice S steps
and about twenty seconds for the volunteer's start and end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from tests.benchmarks.predicted import CASES, Running, _until, running

COSTS_MAX = 0.05
WARM_STEPS = 5
FAST, SERVER, SLOW = (20.0, 80.0), (100.0, 100.0), (2.0, 20.0)
"""Mbit/s up and down."""
EVEN = next(case for case in CASES if case.name == "even")
CASE = replace(EVEN, name="slow joins", servers=(SERVER,) * 4, volunteers=(FAST,) * 4)


def timed(run: Running, steps: int, patience_s: float) -> float:
    """Seconds a step of the next ones, by the coordinator's record of when they closed."""
    first = run.step()
    run.steps(steps, patience_s)
    rows = run.ask(f"steps?from={first}&count={steps + 1}")["steps"]
    closed = [float(row["wall_s"]) for row in rows]
    return (closed[-1] - closed[0]) / (len(closed) - 1)


def crew(run: Running) -> int:
    """How many volunteers the run's status names."""
    return sum(member["role"] == "volunteer" for member in run.ask("status")["members"])


def with_it(run: Running, steps: int, patience_s: float) -> tuple[float, str]:
    """It joins, works, and leaves: seconds a step meanwhile, and what its own screen said at last."""
    there = crew(run)
    run.join(*SLOW, CASE.all_shares()[-1])
    newcomer = run.volunteers.pop()
    _until(lambda: crew(run) > there, patience_s)
    run.shares.free(newcomer.pid)
    with_s = timed(run, steps, patience_s)
    said = newcomer.log_tail().strip().splitlines()
    run.children.end([newcomer])
    _until(lambda: crew(run) <= there, patience_s)
    return with_s, said[-1] if said else ""


def measure(file: Path, known: list[dict[str, Any]], rounds: int, steps: int, patience_s: float) -> None:
    """Rounds until there are so many."""
    number = 1 + max((row["run"] for row in known), default=0)
    folder = Path(tempfile.mkdtemp(prefix="slow-joins-"))
    try:
        with running(CASE, folder) as run:
            run.steps(1, patience_s)
            run.free()
            run.steps(WARM_STEPS, patience_s)
            before_s = timed(run, steps, patience_s)
            while len(known) < rounds:
                began = time.monotonic()
                with_s, said = with_it(run, steps, patience_s)
                run.steps(1, patience_s)
                after_s = timed(run, steps, patience_s)
                row = {"run": number, "without_s": before_s, "with_s": with_s, "after_s": after_s, "said": said[:200]}
                known.append({**row, "took_s": round(time.monotonic() - began, 1)})
                with file.open("a") as out:
                    out.write(json.dumps(known[-1]) + "\n")
                print(shown(known[-1]), file=sys.stderr, flush=True)
                before_s = after_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cost(row: dict[str, Any]) -> float:
    """Against the arms before and after."""
    return float(row["with_s"] / mean((row["without_s"], row["after_s"])) - 1)


def shown(row: dict[str, Any]) -> str:
    return (
        f"run {row['run']}: without {row['without_s']:.3f} s a step, with {row['with_s']:.3f}, without"
        f" {row['after_s']:.3f}: {cost(row):+.1%}   (it says: {row['said']})"
    )


def main() -> int:
    """Runs what is missing of the rounds, and says what it cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60, help="of each arm")
    parser.add_argument("--patience-s", type=float, default=300.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as at Ctrl-C: nothing is left behind
    known = [json.loads(line) for line in arguments.file.read_text().splitlines()] if arguments.file.exists() else []
    if len(known) < arguments.rounds:
        try:
            measure(arguments.file, known, arguments.rounds, arguments.steps, arguments.patience_s)
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"stopped: {error}", file=sys.stderr)
    for row in known:
        print(shown(row))
    found = [cost(row) for row in known]
    if not found:
        return 1
    spread = stdev(found) / len(found) ** 0.5 if len(found) > 1 else float("nan")
    print(f"{len(found)} rounds: {mean(found):+.1%} +- {spread:.1%} (bound {COSTS_MAX:.0%})")
    return int(mean(found) >= COSTS_MAX or len(found) < arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
