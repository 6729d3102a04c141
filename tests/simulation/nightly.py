"""Many seeds of the world, on from where the last run stopped; the count so far lies in `counts.json`.

    python -m tests.simulation.nightly                     # up to 20,000 seeds
    python -m tests.simulation.nightly --seconds 36000     # a night
    nice -n 19 python -m tests.simulation.nightly          # beside other work: it is one process

Its seeds begin above those that the tests run. One that fails is printed with the line that replays it, and kept in
the file; a seed means another run after a change of the weather or of the machines, so a bug gets a test of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import msgspec

from tests.simulation.run_seed import SeedFailedError, run_seed

COUNTS = Path(__file__).parent / "counts.json"
FIRST_SEED = 100_001
GOAL = 20_000
KEPT_EVERY = 10
"""Seeds after which the count is written: so many are run twice at most when it is stopped, and counted once."""


class Counts(msgspec.Struct):
    """What was run so far, under whatever code there was at the time."""

    seeds: int = 0
    """From `FIRST_SEED` on, without a gap."""
    failed: list[int] = []


def go_on(path: Path, goal: int, until_s: float = float("inf")) -> Counts:
    """Runs seeds until there are `goal` of them or the monotonic clock shows `until_s`; keeps the count in `path`."""
    counts = msgspec.json.decode(path.read_bytes(), type=Counts) if path.exists() else Counts()
    while counts.seeds < goal and time.monotonic() < until_s:
        seed = FIRST_SEED + counts.seeds
        try:
            run_seed(seed)
        except SeedFailedError as failure:
            counts.failed.append(seed)
            print(failure, flush=True)
        counts.seeds += 1
        if counts.seeds % KEPT_EVERY == 0 or counts.seeds == goal:
            _write(path, counts)
    _write(path, counts)
    return counts


def _write(path: Path, counts: Counts) -> None:
    """Whole or not at all, also when it is killed meanwhile."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(counts), indent=1) + b"\n")
    os.replace(part, path)


def main() -> int:
    """Parses the line and goes on."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.nightly", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--goal", type=int, default=GOAL)
    line = parser.parse_args()
    before = msgspec.json.decode(COUNTS.read_bytes(), type=Counts) if COUNTS.exists() else Counts()
    counts = go_on(COUNTS, line.goal, time.monotonic() + line.seconds)
    print(f"{counts.seeds:,} of {line.goal:,} seeds so far, {len(counts.failed)} failed: {counts.failed}")
    return 1 if len(counts.failed) > len(before.failed) else 0


if __name__ == "__main__":
    sys.exit(main())
