"""The count of many seeds goes on where it stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import nightly
from tests.simulation.nightly import FIRST_SEED, ROOT, Counts, code_now, files_of_a_seed, go_on
from tests.simulation.run_seed import SeedFailedError


def test_a_run_that_was_stopped_goes_on_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed once, in order, over three runs. One that fails is kept, and the row begins after it; so it does with
    other code, since what passed says nothing of that."""
    ran: list[int] = []
    code = ["one"]

    def run(seed: int) -> None:
        ran.append(seed)
        if seed == FIRST_SEED + 1:
            raise SeedFailedError("seed")

    monkeypatch.setattr(nightly, "run_seed", run)
    monkeypatch.setattr(nightly, "code_now", lambda: code[0])
    path = tmp_path / "counts.json"
    assert go_on(path, 1) == Counts(1, [], 1, "one")
    assert go_on(path, 2) == Counts(4, [FIRST_SEED + 1], 2, "one")
    code[0] = "two"
    assert go_on(path, 2) == Counts(6, [FIRST_SEED + 1], 2, "two")
    assert ran[:6] == list(range(FIRST_SEED, FIRST_SEED + 6))
    assert go_on(path, 3, until_s=0.0).seeds == 6


@pytest.mark.slow
def test_several_processes_run_each_seed_once_and_in_order(tmp_path: Path) -> None:
    """Real ones, of a few seeds."""
    counts = go_on(tmp_path / "counts.json", 3, jobs=2)
    assert (counts.seeds, counts.in_a_row, counts.failed, counts.code) == (3, 3, [], code_now())


@pytest.mark.slow
def test_the_code_of_a_seed_is_all_that_it_loads() -> None:
    """Else a row would go on over a change that it has not seen. What no seed runs, as torch's side, may change."""
    look = (
        "import sys; from tests.simulation.run_seed import run_seed; run_seed(1)\n"
        "print(*(module.__file__ for module in sys.modules.values() if getattr(module, '__file__', None)), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    folders = [ROOT / each for each in ("coordinator", "node", "protocol", "tests")]
    loaded = [Path(line) for line in done.stdout.splitlines()]
    ours = {file for file in loaded if any(file.is_relative_to(folder) for folder in folders)}
    counted = set(files_of_a_seed())
    assert len(ours) > 100 and ours <= counted
    assert not any("compute" in file.parts for file in counted), "a device's arithmetic is no part of a seed"
