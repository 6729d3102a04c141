"""The count of many seeds goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation import nightly
from tests.simulation.nightly import FIRST_SEED, go_on
from tests.simulation.run_seed import SeedFailedError


def test_a_run_that_was_stopped_goes_on_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed once, in order, over two runs; one that fails is kept and the next is run."""
    ran: list[int] = []

    def run(seed: int) -> None:
        ran.append(seed)
        if seed == FIRST_SEED + 1:
            raise SeedFailedError("seed")

    monkeypatch.setattr(nightly, "run_seed", run)
    path = tmp_path / "counts.json"
    assert go_on(path, 2).seeds == 2
    counts = go_on(path, 3)
    assert (counts.seeds, counts.failed) == (3, [FIRST_SEED + 1])
    assert ran == [FIRST_SEED, FIRST_SEED + 1, FIRST_SEED + 2]
    assert go_on(path, 3, until_s=0.0).seeds == 3
