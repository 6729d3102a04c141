"""The tests marked `long`, on from where the last run stopped; what passed so far lies in `long.json`.

    python -m tests.long                     # all that have not passed with the code as it is: some hours
    python -m tests.long --seconds 3600      # an hour of them
    python -m tests.long --only simulation   # those whose names hold the word
    python -m tests.long --processes 2       # side by side, where nothing else runs

Those that never passed come first, then those whose pass is the oldest. Ends with exit code 1 where one failed; the
next run begins with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import msgspec

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "long.json"
BATCH = 8
"""Tests in one process of pytest, which takes seconds to start; so many are run again at most when it is stopped."""


class Pass(msgspec.Struct, frozen=True):
    """When a test passed last."""

    commit: str
    seconds: float
    number: int
    """Grows with each test that is run."""


class Kept(msgspec.Struct):
    """What was run so far."""

    passed: dict[str, Pass] = {}
    failed: dict[str, str] = {}
    """Test -> the commit that it failed at, last."""


def still_to_run(names: Iterable[str], kept: Kept, commit: str) -> list[str]:
    """Of all tests, those that have not passed at `commit`, in the order in which they go."""

    def order(name: str) -> tuple[bool, int]:
        record = kept.passed.get(name)
        return name not in kept.failed, -1 if record is None else record.number

    due = [name for name in names if name not in kept.passed or kept.passed[name].commit != commit]
    return sorted(due, key=order)


def go_on(
    path: Path,
    names: Sequence[str],
    commit: str,
    run: Callable[[Sequence[str]], dict[str, float]],
    until_s: float,
    only: str = "",
) -> list[str]:
    """Runs what is left until the monotonic clock shows `until_s`, and keeps in `path` what passed.

    Args:
        run: runs some of them; those that passed, with the seconds that each took.
        only: those whose names hold it.

    Returns:
        Those that failed.
    """
    kept = msgspec.json.decode(path.read_bytes(), type=Kept) if path.exists() else Kept()
    for known in (kept.passed, kept.failed):
        for name in [name for name in known if name not in names]:
            del known[name]
    due = [name for name in still_to_run(names, kept, commit) if only in name]
    failed: list[str] = []
    number = max((each.number for each in kept.passed.values()), default=0)
    for first in range(0, len(due), BATCH):
        if time.monotonic() >= until_s:
            break
        batch = due[first : first + BATCH]
        passed = run(batch)
        for name in batch:
            number += 1
            if name in passed:
                kept.passed[name] = Pass(commit, round(passed[name], 1), number)
                kept.failed.pop(name, None)
            else:
                kept.passed.pop(name, None)
                kept.failed[name] = commit
                failed.append(name)
        _write(path, kept)
        print(f"{first + len(batch):,} of {len(due):,} run, {len(failed)} failed", flush=True)
    return failed


def _write(path: Path, kept: Kept) -> None:
    """Whole or not at all, also when it is killed meanwhile."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(kept, order="sorted"), indent=1) + b"\n")
    os.replace(part, path)


def _names() -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long", "tests"]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [line for line in text.splitlines() if "::" in line]


def _run(names: Sequence[str], processes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        apart = ["-n", str(processes), "--dist", "loadgroup"]  # some may not run beside their like
        command = [sys.executable, "-m", "pytest", "-q", *apart, f"--junitxml={report}", *names]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            return {}
        found = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if not any(child.tag in ("failure", "error", "skipped") for child in case):
                name = case.attrib["classname"].replace(".", "/") + ".py::" + case.attrib["name"]
                # Those of a group are named after it, too.
                name = name if name in names else name.rpartition("@")[0]
                found[name] = float(case.attrib["time"])
        return found


def _commit() -> str:
    """The newest that changed more than what is kept here; with a `+` where the tree is not what was committed."""
    but_kept = ["--", ".", f":!{KEPT.relative_to(ROOT)}"]

    def git(*words: str) -> str:
        command = ["git", *words, *but_kept]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain") else "")


def main() -> int:
    """Parses the line and goes on."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.long", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="")
    line = parser.parse_args()
    names, commit = _names(), _commit()
    until_s = time.monotonic() + line.seconds
    failed = go_on(KEPT, names, commit, lambda batch: _run(batch, line.processes), until_s, line.only)
    kept = msgspec.json.decode(KEPT.read_bytes(), type=Kept) if KEPT.exists() else Kept()
    print(f"{len(names) - len(still_to_run(names, kept, commit)):,} of {len(names):,} have passed at {commit}")
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
