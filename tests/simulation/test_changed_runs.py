"""An operator who changes the run in every weather: all servers know before a step opens, and the run ends as asked."""

from __future__ import annotations

import pytest

from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene


@pytest.mark.parametrize("seed", range(3001, 3009))
def test_a_run_that_is_changed_in_any_weather_ends_as_its_operator_asked(seed: int) -> None:
    """Pauses, another number of steps, other checkpoints, computing servers, while processes die and disks are lost:
    no step opens before every server has what it needs to know, nothing is lost or doubled, and the run ends."""
    run_seed(seed, scene=Scene(always=("orders",), gap_s=(0.1, 0.5)))
