"""Tests of `protocol.run.batches`: how many microbatches each step has when an operator has changed their number."""

from __future__ import annotations

from itertools import pairwise

import pytest

from protocol.base.errors import BadInputError
from protocol.run.batches import Batches
from protocol.run.changes import RunChange, check_changes, make_change, running
from protocol.run.course import VALIDATION_FIRST
from protocol.run.run import BatchSection, ModelSection, RunConfig, ValidationSection, WireSection

KEY = "batch.microbatches"
CONFIG = RunConfig(
    steps=20,
    model=ModelSection(context=16),
    batch=BatchSection(microbatches=4, samples=2, delay=0),
    validation=ValidationSection(every_steps=5, batches=3),
    wire=WireSection(gradients="fp64"),
)
UP_AND_DOWN = (RunChange(KEY, "7", 5), RunChange("optimizer.clip_norm", "2.0", 8), RunChange(KEY, "1", 9))


def test_a_step_has_the_number_that_held_when_it_was_opened_however_late_somebody_asks() -> None:
    """The run as it is now has another one, and would be wrong about every step before."""
    batches = Batches.of(CONFIG, UP_AND_DOWN)
    assert [batches.count(step) for step in (0, 4, 5, 8, 9, 19)] == [4, 4, 7, 7, 1, 1]
    assert running(CONFIG, UP_AND_DOWN).batch.microbatches == 1
    assert batches.tokens(4) == 4 * 2 * 16 and batches.tokens(5) == 7 * 2 * 16
    assert [batches.has(4, 3), batches.has(4, 4), batches.has(5, 6), batches.has(9, 1)] == [True, False, True, False]
    assert batches.microbatches_of(9) == (0,) and batches.microbatches_of(4) == (0, 1, 2, 3)


def test_no_sample_is_used_twice_or_left_out_when_the_number_changes() -> None:
    """Each step begins where the one before it ends."""
    batches = Batches.of(CONFIG, UP_AND_DOWN)
    ranges = [batches.samples(step) for step in range(20)]
    assert ranges[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(ranges))
    assert [end - first for first, end in ranges] == [2 * batches.count(step) for step in range(20)]
    assert batches.tokens_before(20) == sum(batches.tokens(step) for step in range(20))


def test_a_run_that_was_sent_back_before_a_change_counts_as_if_it_had_never_been() -> None:
    """The coordinator takes the change out of the list; what was ordered before it stays."""
    kept = Batches.of(CONFIG, UP_AND_DOWN[:1])
    whole = Batches.of(CONFIG, UP_AND_DOWN)
    assert [kept.samples(step) for step in range(9)] == [whole.samples(step) for step in range(9)]
    assert kept.count(9) == 7 and kept.samples(9)[0] == whole.samples(9)[0]


def test_a_change_that_has_no_step_yet_counts_for_none() -> None:
    """All servers wait for one."""
    waiting = make_change(CONFIG, (), KEY, "9")
    assert waiting.is_pending and Batches.of(CONFIG, (waiting,)).counts == ((0, 4),)


def test_before_the_first_step_the_number_of_all_steps_can_be_changed_and_the_unit_stays_the_files() -> None:
    """Whoever computes divides by the file's tokens; what servers multiply with makes a mean of it again."""
    batches = Batches.of(CONFIG, (RunChange(KEY, "2", 0), RunChange(KEY, "8", 0), RunChange(KEY, "1", 3)))
    assert batches.counts == ((0, 8), (3, 1)) and batches.samples(1) == (16, 32)
    assert [batches.scale(step) for step in (0, 2, 3)] == [0.5, 0.5, 4.0]
    assert [Batches.of(CONFIG, UP_AND_DOWN).scale(step) for step in (0, 9)] == [1.0, 4.0]


def test_microbatches_of_the_validation_stay_as_they_are() -> None:
    """They are no part of what is changed; the steps behind the last train on nothing."""
    batches = Batches.of(CONFIG, UP_AND_DOWN)
    aside = tuple(VALIDATION_FIRST + number for number in range(3))
    assert batches.microbatches_of(10) == (0, *aside) and batches.microbatches_of(20) == aside
    assert batches.has(10, VALIDATION_FIRST + 2) and not batches.has(10, VALIDATION_FIRST + 3)
    assert not batches.has(11, VALIDATION_FIRST) and not batches.has(20, 0)


@pytest.mark.parametrize(
    ("gradients", "value", "says"),
    [
        ("fp64", "0", "0 is not between 1 and 65536"),
        ("fp64", "-3", "-3 is not between"),
        ("fp64", "65537", "65537 is not between"),
        ("fp64", "many", "expected a whole number"),
        ("fp64", "2.5", "expected a whole number"),
        ("gi", "5", "5, and at most 4 are possible.*as the run's file says.*run branch"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_a_sentence_that_names_the_key(
    gradients: str, value: str, says: str
) -> None:
    """On the integer grid the file's number is the most whose sum has room, also after it was lowered."""
    config = RunConfig(batch=CONFIG.batch, wire=WireSection(gradients=gradients))  # type: ignore[arg-type]
    lowered = (RunChange(KEY, "2", 3),)
    for before in ((), lowered):
        with pytest.raises(BadInputError, match=f"(?s)^{KEY}: .*{says}"):
            make_change(config, before, KEY, value)
    assert make_change(config, lowered, KEY, "4").value == "4"


@pytest.mark.parametrize("value", ["0", "-1", "5", '"5"', "1e3", "65537", "²"])
def test_a_node_refuses_a_list_with_such_a_number_also_where_a_later_one_is_right(value: str) -> None:
    """It would count for the steps in between: a plan says so, and nobody believes it."""
    on_a_grid = RunConfig(batch=CONFIG.batch)
    with pytest.raises(BadInputError, match=KEY):
        check_changes(on_a_grid, (RunChange(KEY, value, 3), RunChange(KEY, "2", 4)))
    check_changes(on_a_grid, (RunChange(KEY, "3", 3), RunChange(KEY, "2", 4)))
