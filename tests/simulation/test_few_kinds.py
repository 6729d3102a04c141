"""Runs with one to three kinds of faults: what a nightly seed seldom meets."""

from __future__ import annotations

import pytest

from tests.simulation.few_kinds import FIRST_SEED, FOR_CLOCKS, LONG_LEASE_S, outcome, scene_of

SEEDS = range(FIRST_SEED, FIRST_SEED + 16)


def test_only_where_something_tells_nobody_waits_for_a_clock() -> None:
    """What a silent link has lost only a clock shows. Without such a fault half of the runs have leases that are as
    good as for ever."""
    scenes = [scene_of(seed) for seed in range(FIRST_SEED, FIRST_SEED + 400)]
    for_ever = [scene for scene in scenes if scene.run.get("lease_s") == LONG_LEASE_S]
    assert 80 < len(for_ever) < 200
    assert not any(FOR_CLOCKS & set(scene.only) for scene in for_ever)
    assert scenes == [scene_of(seed) for seed in range(FIRST_SEED, FIRST_SEED + 400)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_under_few_kinds_of_faults_ends_as_it_should(seed: int) -> None:
    """The first of those that `nightly --few-kinds` runs."""
    assert outcome(seed) == ""
