"""Which versions of the weights a run validates, and with which of its steps."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from protocol.run.run import BatchSection, RunConfig, ValidationSection


@pytest.mark.parametrize("delay", [0, 1])
def test_every_version_that_the_file_asks_for_is_validated_by_one_step(delay: Any) -> None:
    """Each multiple of `every_steps`, the seed's and the last one; with a delay no step runs on the last two, and the
    one before the last may be asked for, too."""
    for steps, every in product(range(1, 9), range(1, 10)):
        config = RunConfig(
            steps=steps, batch=BatchSection(delay=delay), validation=ValidationSection(every_steps=every)
        )
        asked_for = [version for version in range(steps + 1) if version % every == 0 or version == steps]
        with_it = [step for step in range(steps + 5) if config.has_step(step) and config.validates(step)]
        assert [config.version_of(step) for step in with_it] == asked_for, f"{steps} steps, every {every}"


def test_without_a_validation_nothing_comes_behind_the_last_step() -> None:
    config = RunConfig(steps=3)
    assert [step for step in range(-1, 9) if config.has_step(step)] == [0, 1, 2]
