"""The validation in every weather: it tells what one process would, and training does not notice it."""

from __future__ import annotations

import pytest

from tests.simulation.run_seed import run_seed
from tests.simulation.scene import Scene


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2001, 2009))
def test_each_version_is_validated_once_in_any_weather(seed: int) -> None:
    """Volunteers and servers die in the middle of it: every loss is that of one process, the first and the last version
    are among them, and weights and history are as without it."""
    run_seed(seed, scene=Scene(run={"validate_every": 2}))
