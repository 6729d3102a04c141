"""Samples in segments in the simulated world: whoever dies between two segments, the weights are the reference's."""

from __future__ import annotations

import pytest

from tests.simulation.mutants_of_segments import SEGMENTS
from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene


@pytest.mark.parametrize("first", [2, 8, 14])
def test_tenants_that_die_between_segments_lose_and_double_nothing(first: int) -> None:
    """Volunteers are killed and links are cut many times a second; every version is the one-process reference's. Every
    change of the timing draws other kills: of six runs one must have some."""
    seeds = range(first, first + 6)
    assert any(run_seed(seed, scene=SEGMENTS).faults.get("volunteer_kill", 0) > 0 for seed in seeds)


@pytest.mark.slow
def test_a_forward_that_is_done_again_does_not_take_a_backwards_keys_and_values() -> None:
    """Both leases of one visit came to one volunteer, and the device had the one's segments dropped for the other."""
    run_seed(23, scene=Scene(run={"segments": 3, "split": True}))


def test_a_visit_that_is_given_again_while_its_last_segment_goes_back_is_in_the_sum_once() -> None:
    """The lease ran out at the server and came back to the same volunteer, whose device was adding to its sum."""
    run_seed(45, scene=Scene(run={"segments": 3}))
