"""Two coordinators with one record: whoever has the run is killed, and the other one goes on with it."""

from __future__ import annotations

import sys

import pytest

from tests.benchmarks.standby import takeovers
from tests.integration.postgres import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_other_coordinator_goes_on_with_the_run() -> None:
    """Killed twice, there and back: no step is lost or counted twice, and no generation is used twice."""
    reason = why_not()
    if reason:
        print(f"\n\n!!! TWO COORDINATORS WERE NOT TESTED: {reason}\n", file=sys.__stderr__)
        pytest.skip(reason)
    found = takeovers(2)
    assert not found.failure, found
    assert len(found.takeovers_s) == 2 and len(found.steps) > 2
