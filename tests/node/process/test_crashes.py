"""Crashes of a server that come back: the state is given up, then the process stays down with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.process.crashes import CRASHES_MAX, GIVE_UP_AFTER, Crashes
from node.process.journal import Journal
from protocol.base.errors import BadInputError


def test_equal_crashes_in_a_row_give_the_state_up_and_then_stop(tmp_path: Path) -> None:
    """The third start after them does not trust its disk; after the fifth there is none, but a sentence."""
    journal = Journal(tmp_path)
    try:
        for number in range(1, CRASHES_MAX + 1):
            with pytest.raises(ExceptionGroup), Crashes(journal).counted():
                raise ExceptionGroup("a nursery", [AssertionError("a step too many")])
            gives_up = Crashes(journal).gives_up
            assert bool(gives_up) == (number >= GIVE_UP_AFTER)
        with pytest.raises(BadInputError, match=r"crashed 5 times in a row .*\(AssertionError: a step too"):
            Crashes(journal).check(tmp_path)
    finally:
        journal.close()


def test_other_crashes_and_work_begin_the_count_again(tmp_path: Path) -> None:
    """A full disk is no crash at all."""
    journal = Journal(tmp_path)
    try:
        for words in ("one", "one", "two", "one", "one"):
            with pytest.raises(KeyError), Crashes(journal).counted():
                raise KeyError(words)
        assert not Crashes(journal).gives_up
        with pytest.raises(BadInputError), Crashes(journal).counted():
            raise BadInputError("no such folder")
        with pytest.raises(KeyError), Crashes(journal).counted():
            raise KeyError("one")
        assert Crashes(journal).gives_up.startswith("3 crashes in a row: KeyError")
        for words in ("stopped", "failed: the device was lost 5 times", "failed: WriteSnapshot: no space", "drained"):
            Crashes(journal).ended(words)
        for _ in range(GIVE_UP_AFTER):
            assert "Measure" not in Crashes(journal).gives_up
            Crashes(journal).ended("failed: Measure: 63")
        assert Crashes(journal).gives_up == "3 crashes in a row: failed: Measure: 63"
        Crashes(journal).forget()
        assert not Crashes(journal).gives_up
    finally:
        journal.close()
