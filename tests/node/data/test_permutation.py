"""Tests of `node.data.permutation`."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.data.permutation import Permutation


@given(st.integers(1, 600), st.integers(0, 2**63 - 1))
@settings(max_examples=40, deadline=None)
def test_every_element_comes_once(size: int, seed: int) -> None:
    """Whatever the size and the seed, the places hold each element exactly once."""
    assert sorted(Permutation(size, seed, "x")[place] for place in range(size)) == list(range(size))


def test_order_never_changes() -> None:
    """The same arguments give these elements in every version of the program, at any size."""
    assert [Permutation(10, 1, "epoch 0")[place] for place in range(10)] == [1, 8, 5, 4, 2, 7, 3, 6, 9, 0]
    huge = Permutation(10**15, 1, "epoch 0")
    assert [huge[0], huge[10**15 - 1]] == [905207924929245, 415219366916781]


def test_seed_and_purpose_change_the_order() -> None:
    """Different seeds and purposes shuffle differently, and none is the identity."""
    orders = {
        tuple(Permutation(100, seed, purpose)[place] for place in range(100))
        for seed in (1, 2)
        for purpose in ("epoch 0", "epoch 1", "split")
    }
    assert len(orders) == 6 and tuple(range(100)) not in orders


def test_shuffle_leaves_no_runs() -> None:
    """Neighbours part: places next to each other hold neighbouring elements about as often as chance has it."""
    size = 5000
    order = [Permutation(size, 3, "epoch 0")[place] for place in range(size)]
    neighbours = sum(abs(before - after) == 1 for before, after in itertools.pairwise(order))
    assert neighbours < 12  # expected 2; Poisson: 12 or more has a chance of 1e-6
    first_half = sum(value < size // 2 for value in order[: size // 2])
    assert abs(first_half - size // 4) < 150  # over six standard deviations


@pytest.mark.parametrize("place", [-1, 5])
def test_places_outside_are_refused(place: int) -> None:
    """There is no wrap-around."""
    with pytest.raises(IndexError):
        Permutation(5, 1, "x")[place]
    with pytest.raises(ValueError, match="0 elements"):
        Permutation(0, 1, "x")
