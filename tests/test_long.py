"""The long tests go on where they stopped, and what has failed or never passed comes first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tests.long import BATCH, go_on

NAMES = [f"tests/test_it.py::test_it[{number}]" for number in range(BATCH + 2)]
EVER = float("inf")


def test_a_run_that_was_stopped_goes_on_and_a_new_commit_begins_with_what_failed(tmp_path: Path) -> None:
    """Each once at a commit, though the first run stops after a batch; who fails is the first at the next commit."""
    path, bad = tmp_path / "long.json", {NAMES[3]}
    ran: list[str] = []

    def run(names: Sequence[str]) -> dict[str, float]:
        ran.extend(names)
        return {name: 1.0 for name in names if name not in bad}

    def stop_after_one(names: Sequence[str]) -> dict[str, float]:
        if ran:
            raise KeyboardInterrupt
        return run(names)

    with contextlib.suppress(KeyboardInterrupt):
        go_on(path, NAMES, "first", stop_after_one, EVER)
    assert ran == NAMES[:BATCH]
    assert go_on(path, NAMES, "first", run, EVER) == [NAMES[3]]
    assert sorted(ran[BATCH:]) == sorted([NAMES[3], *NAMES[BATCH:]])
    ran.clear()
    bad.clear()
    assert go_on(path, NAMES, "second", run, EVER) == []
    assert ran[0] == NAMES[3] and sorted(ran) == sorted(NAMES)
    ran.clear()
    assert go_on(path, NAMES, "second", run, EVER) == [] and ran == []
    assert go_on(path, NAMES, "third", run, 0.0) == [] and ran == []
    assert go_on(path, NAMES, "third", run, EVER, "[2]") == [] and ran == [NAMES[2]]
