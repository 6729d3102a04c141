"""Servers die, links break: no word that is lost with them is waited for until a lease's time is over."""

from __future__ import annotations

import pytest

from tests.seeds import slow_then_long
from tests.simulation.mutants import PATIENT
from tests.simulation.run_seed import run_seed


@pytest.mark.parametrize("seed", slow_then_long(range(1, 61), 12))
def test_nothing_waits_for_the_end_of_a_lease(seed: int) -> None:
    """Leases last longer than the run may take: a result that was sent to a server that was down, or that had not heard
    of the step yet, is asked for again when that server is back (seeds 6, 23, 30 and 38 stood still)."""
    run_seed(seed, scene=PATIENT)
