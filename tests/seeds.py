"""Which seeds of a test `.ci/run` has time for, and which are left to `python -m tests.long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_then_long(seeds: Iterable[int], slow_count: int) -> list[Any]:
    """Parameters: the first `slow_count` seeds marked slow, the others long."""
    return [
        pytest.param(seed, marks=pytest.mark.slow if number < slow_count else pytest.mark.long)
        for number, seed in enumerate(seeds)
    ]
