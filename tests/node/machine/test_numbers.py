"""Tests of `node.machine.numbers`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.machine.numbers import clip_factor, learning_rate
from protocol.run.run import OptimizerSection, RunConfig


def small_run(**sections: Any) -> RunConfig:
    return RunConfig(**({"steps": 40} | sections))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0.01, 10))
@settings(max_examples=50, deadline=None)
def test_clipping_bounds_the_norm(square_norms: list[float], bound: float) -> None:
    """The norm times the factor is at most the bound, and a small gradient is left alone."""
    factor = clip_factor(square_norms, bound)
    norm = math.sqrt(math.fsum(square_norms))
    assert norm * factor <= bound * (1 + 1e-12)
    assert factor == 1.0 or norm > bound - 1e-5
    assert clip_factor(square_norms, 0.0) == 1.0


def test_rate_warms_up_then_falls() -> None:
    """The rate climbs linearly to its peak, never rises after it, and ends at the final ratio."""
    for decay, last in (("cosine", 0.25), ("linear", 0.25), ("wsd", 0.25), ("constant", 1.0)):
        section = OptimizerSection(learning_rate=2.0, warmup_steps=4, decay=decay, final_ratio=0.25)  # type: ignore[arg-type]
        config = small_run(optimizer=section)
        rates = [learning_rate(config, step) for step in range(config.steps)]
        assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
        assert all(after <= before for before, after in itertools.pairwise(rates[4:]))
        assert rates[-1] == pytest.approx(2.0 * last)
        assert learning_rate(config, config.steps + 100) == pytest.approx(rates[-1])


def test_stable_rate_falls_only_in_the_last_share_of_the_steps() -> None:
    """`wsd` holds the peak from the warm-up until `decay_share` of the steps are left, then falls in equal parts."""
    section = OptimizerSection(learning_rate=1.0, warmup_steps=10, decay="wsd", decay_share=0.2, final_ratio=0.0)
    config = small_run(steps=101, optimizer=section)
    rates = [learning_rate(config, step) for step in range(101)]
    assert set(rates[9:81]) == {1.0}
    assert rates[80:] == pytest.approx([1 - each / 20 for each in range(21)])
    longer = small_run(steps=201, optimizer=section)
    assert [learning_rate(longer, step) for step in range(81)] == rates[:81]


def test_runs_shorter_than_their_warm_up_have_a_rate() -> None:
    """One step, no warm-up, or a warm-up longer than the run: every rate is finite and positive."""
    for steps, warmup in ((1, 0), (1, 1), (2, 1), (3, 10)):
        config = small_run(steps=steps, optimizer=OptimizerSection(warmup_steps=warmup))
        assert all(0 < learning_rate(config, step) <= config.optimizer.learning_rate for step in range(steps))
