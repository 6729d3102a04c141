"""Halving the first microbatches: what it gains, and that the count is the smallest best one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.partition.one_f_one_b import makespan_s
from coordinator.planning.partition.slicer import Slices, choose_slices, guess_slices, sliced_makespan_s


@pytest.mark.parametrize(
    ("stages", "microbatches", "plain_s", "paper_s", "chosen"),
    [
        (4, 8, 33, 32, Slices(1, 31.5)),
        (8, 16, 69, 66, Slices(2, 65.5)),
        (12, 24, 105, 100, Slices(3, 99.5)),
    ],
)
def test_slicing_fills_the_pipeline_in_half_the_time(
    stages: int, microbatches: int, plain_s: float, paper_s: float, chosen: Slices
) -> None:
    """F=1, B=2: (P - 1)/2 is gained, half a forward more than AutoPipe's slicer, which gathers halves that
    its blocking sends would delay."""
    forward, backward, link = [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1)
    assert makespan_s(forward, backward, link, microbatches) == plain_s
    assert choose_slices(forward, backward, link, microbatches) == chosen
    assert chosen.makespan_s == plain_s - (stages - 1) / 2 < paper_s


@pytest.mark.parametrize("stages", [2, 4, 8, 12])
@pytest.mark.parametrize("backward", [2.0, 3.0])
def test_the_guess_is_the_closed_form_for_equal_stages(stages: int, backward: float) -> None:
    """Algorithm 2, repaired, gives the least n with n b ≥ (P - 1) f / 2, and simulation agrees."""
    link = [0.0] * (stages - 1)
    guess = guess_slices([1.0] * stages, [backward] * stages, link, 2 * stages)
    assert guess == math.ceil((stages - 1) / (2 * backward))
    assert choose_slices([1.0] * stages, [backward] * stages, link, 2 * stages).count == guess


def test_one_stage_gains_nothing() -> None:
    """Nobody waits for the first half of anything."""
    assert choose_slices([1.0], [2.0], [], 4) == Slices(0, 12.0)


def test_slow_links_can_make_halves_worthless() -> None:
    """Where every half pays the whole link, the choice still never loses to whole microbatches."""
    forward, backward, link = [1.0, 1.0], [2.0, 2.0], [50.0]
    assert choose_slices(forward, backward, link, 2).makespan_s <= makespan_s(forward, backward, link, 2)


def test_huge_pipelines_are_searched_around_the_guess() -> None:
    """64 stages and 512 microbatches: a handful of simulations reach half the warm-up."""
    stages, microbatches = 64, 512
    forward, backward, link = [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1)
    chosen = choose_slices(forward, backward, link, microbatches)
    assert chosen.makespan_s == 3 * (microbatches + stages - 1) - (stages - 1) / 2


@given(st.randoms(use_true_random=False))
def test_no_smaller_and_no_other_count_is_better(rng: random.Random) -> None:
    """Among all counts up to the number of stages the choice is the smallest of the best."""
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 8)
    forward = [rng.randint(1, 9) / 2 for _ in range(stages)]
    backward = [rng.randint(1, 18) / 2 for _ in range(stages)]
    link = [rng.choice([0.0, 0.5, 3.0]) for _ in range(stages - 1)]
    half_link = [seconds / 2 for seconds in link] if rng.random() < 0.5 else None
    chosen = choose_slices(forward, backward, link, microbatches, half_link)
    for count in range(min(stages, microbatches) + 1):
        value_s = sliced_makespan_s(forward, backward, link, microbatches, count, half_link)
        assert value_s > chosen.makespan_s - 1e-9
        assert count >= chosen.count or value_s > chosen.makespan_s
    assert sliced_makespan_s(forward, backward, link, microbatches, 0) == pytest.approx(
        makespan_s(forward, backward, link, microbatches)
    )
