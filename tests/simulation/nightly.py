"""Many seeds of the world, on from where the last run stopped; the count so far lies in `counts.json`.

    python -m tests.simulation.nightly                     # until 20,000 in a row have passed
    python -m tests.simulation.nightly --seconds 36000     # a night
    nice -n 19 python -m tests.simulation.nightly --jobs 2 # beside other work
    python -m tests.simulation.nightly --few-kinds         # those of `few_kinds.py`, counted in `counts_few.json`

Its seeds begin above those that the tests run. One that fails is printed with the line that replays it, and kept in
the file; a seed means another run after a change of the weather or of the machines, so a bug gets a test of its own.
*In a row* are those that have passed since the last failure, all of one code: where a file that they run has changed
the count begins again, and goes on with new seeds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from tests.simulation import few_kinds
from tests.simulation.run_seed import SeedFailedError, run_seed

COUNTS = Path(__file__).parent / "counts.json"
COUNTS_FEW = Path(__file__).parent / "counts_few.json"
ROOT = Path(__file__).parents[2]
FIRST_SEED = 100_001
GOAL = 20_000
TOGETHER = 10
"""Seeds after which the count is written: so many are run twice at most when it is stopped, and counted once."""


class Counts(msgspec.Struct):
    """What was run so far."""

    seeds: int = 0
    """From the first one on, without a gap, under whatever code there was at the time."""
    failed: list[int] = []
    in_a_row: int = 0
    """The newest of them, which all passed under one code."""
    code: str = ""
    """Which."""


def files_of_a_seed() -> list[Path]:
    """All that a seed can run: `run_seed`, what it imports, and so on."""
    found: dict[Path, None] = {}
    names = ["tests.simulation.run_seed"]
    while names:
        stem = ROOT.joinpath(*names.pop().split("."))
        file = next((each for each in (stem.with_suffix(".py"), stem / "__init__.py") if each.is_file()), None)
        if file is None or file in found:
            continue
        found[file] = None
        names += [".".join(parent.parts) for parent in file.parent.relative_to(ROOT).parents if parent.parts]
        names.append(".".join(file.parent.relative_to(ROOT).parts))
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return sorted(found)


def code_now() -> str:
    """A digest of all that a seed can run."""
    digest = hashlib.sha256()
    for file in files_of_a_seed():
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def outcome(seed: int) -> str:
    """What is wrong with a seed, or an empty string."""
    try:
        run_seed(seed)
    except SeedFailedError as failure:
        return str(failure)
    return ""


def go_on(
    path: Path,
    goal: int,
    until_s: float = float("inf"),
    jobs: int = 1,
    first: int = FIRST_SEED,
    outcome: Callable[[int], str] = outcome,
) -> Counts:
    """Runs seeds until `goal` passed in a row, or the monotonic clock shows `until_s`; keeps the count in `path`."""
    counts = msgspec.json.decode(path.read_bytes(), type=Counts) if path.exists() else Counts()
    if counts.code != (code := code_now()):
        counts.code, counts.in_a_row = code, 0
    outcomes = _outcomes(first + counts.seeds, jobs, outcome)
    while counts.in_a_row < goal and time.monotonic() < until_s:
        seed, failure = next(outcomes)
        counts.seeds += 1
        counts.in_a_row += 1
        if failure:
            counts.failed.append(seed)
            counts.in_a_row = 0
            print(failure, flush=True)
        if counts.seeds % TOGETHER == 0:
            _write(path, counts)
    outcomes.close()
    _write(path, counts)
    return counts


def _outcomes(first: int, jobs: int, outcome: Callable[[int], str]) -> Generator[tuple[int, str]]:
    """Of one seed after the other, in order."""
    if jobs == 1:
        while True:
            yield first, outcome(first)
            first += 1
    with ProcessPoolExecutor(jobs) as pool:
        under_way = deque((seed, pool.submit(outcome, seed)) for seed in range(first, first + jobs * TOGETHER))
        try:
            for seed in range(first + jobs * TOGETHER, sys.maxsize):
                oldest, future = under_way.popleft()
                yield oldest, future.result()
                under_way.append((seed, pool.submit(outcome, seed)))
        finally:
            pool.shutdown(cancel_futures=True)


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
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--few-kinds", action="store_true")
    line = parser.parse_args()
    path, first, run = COUNTS, FIRST_SEED, outcome
    if line.few_kinds:
        path, first, run = COUNTS_FEW, few_kinds.FIRST_SEED, few_kinds.outcome
    before = msgspec.json.decode(path.read_bytes(), type=Counts) if path.exists() else Counts()
    counts = go_on(path, line.goal, time.monotonic() + line.seconds, line.jobs, first, run)
    print(f"{counts.in_a_row:,} of {line.goal:,} seeds in a row, of code {counts.code}")
    print(f"{counts.seeds:,} seeds so far, {len(counts.failed)} failed at their time: {counts.failed}")
    return 1 if len(counts.failed) > len(before.failed) else 0


if __name__ == "__main__":
    sys.exit(main())
