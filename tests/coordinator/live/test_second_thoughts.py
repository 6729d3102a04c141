"""Moves are judged by the steps that then come."""

from __future__ import annotations

from collections import Counter

import pytest

from coordinator.live.second_thoughts import TRIAL_S, Moved, SecondThoughts
from protocol.base.ids import NodeId


def test_a_move_after_which_no_step_comes_is_taken_back() -> None:
    """It was relied upon that another would do the work there, and that one hangs: without steps there was no verdict,
    and without a verdict no move."""
    thoughts = SecondThoughts()
    for number in range(60):
        thoughts.step_closed(1.0, {0: 1, 1: 2}, float(number))
    thoughts.moved([Moved(NodeId("v1"), 1, 0)], {0: 2, 1: 1}, 60.0)
    thoughts.step_closed(1.0, {0: 2, 1: 1}, 61.0)
    assert thoughts.verdict(60.0 + TRIAL_S + 15.9) is None and thoughts.undecided
    found = thoughts.verdict(60.0 + TRIAL_S + 16.0)
    assert found is not None and found[0].moves[0].node == "v1" and found[1] == pytest.approx(76.0 / 2 - 1.0)
    assert thoughts.trial is None and thoughts.pause_factor == 2.0


def test_what_a_pause_takes_is_no_fault_of_a_move() -> None:
    """The operator pauses the run for an hour, soon after somebody moved: the time begins anew when it goes on."""
    thoughts = SecondThoughts()
    for number in range(60):
        thoughts.step_closed(1.0, {0: 1, 1: 2}, float(number))
    thoughts.moved([Moved(NodeId("v1"), 1, 0)], {0: 2, 1: 1}, 60.0)
    assert thoughts.verdict(100.0, interrupted=True) is None
    assert thoughts.verdict(3700.0, interrupted=True) is None
    for number in range(8):
        thoughts.step_closed(1.0, {0: 2, 1: 1}, 3701.0 + number)
    assert thoughts.verdict(3709.0) is None and thoughts.trial is not None
    assert thoughts.verdict(3700.0 + TRIAL_S) is None and thoughts.trial is None


def test_steps_that_are_a_little_longer_after_a_move_are_luck() -> None:
    """And one that is found to be good makes the next move wait no longer than the first."""
    thoughts, crews = SecondThoughts(), {0: 1, 1: 2}
    for took_s, pause in ((2.0, 2.0), (2.0, 4.0), (1.05, 1.0)):
        thoughts._recent.clear()
        for now in range(20):
            thoughts.step_closed(1.0, crews, float(now))
        thoughts.moved([], crews, 30.0)
        for now in range(20, 110):
            thoughts.verdict(float(now))
            thoughts.step_closed(took_s, crews, float(now))
        assert thoughts.trial is None and thoughts.pause_factor == pause


def test_a_move_is_not_judged_without_steps_before_it_nor_after_its_volunteer_is_gone() -> None:
    thoughts, crews = SecondThoughts(), {0: 2, 1: 2, 2: 2}
    thoughts.moved([Moved(NodeId("v1"), 0, 1)], crews, 30.0)
    assert thoughts.trial is None
    for now in range(20):
        thoughts.step_closed(0.0, crews, float(now))
        thoughts.step_closed(1.0, crews, float(now))
    crews = {0: 1, 1: 3, 2: 2}
    thoughts.moved([Moved(NodeId("v1"), 0, 1)], crews, 30.0)
    thoughts.gone(NodeId("v2"))
    assert thoughts.trial is not None and thoughts.trial.before_s == 1.0
    thoughts.gone(NodeId("v1"))
    assert thoughts.trial is None
    crews = {0: 1, 1: 2, 2: 3}
    thoughts.moved([Moved(NodeId("v3"), 1, 2)], crews, 30.0)
    assert thoughts.trial is not None, "who has only gone elsewhere has not left"
    thoughts.moved([Moved(NodeId("v1"), 2, 1), Moved(NodeId("v2"), 2, 0)], {0: 2, 1: 3, 2: 1}, 30.0)
    assert thoughts.trial is not None
    thoughts.gone(NodeId("v2"))
    assert thoughts.trial is None


@pytest.mark.parametrize(("lost", "pause"), [({}, 4.0), ({1: 1}, 1.0), ({2: 1}, 1.0), ({0: 1}, 4.0)])
def test_a_move_stays_where_a_stage_has_lost_others_since(lost: dict[int, int], pause: float) -> None:
    """Whoever is left does again what they took with them, and all of their work: that is why steps are longer. One of
    twenty is no reason. Two trials, and the pause between moves is twice as long after each that was regretted."""
    for then in ("before", "after"):
        thoughts = SecondThoughts()
        for number in range(2):
            crews = Counter({0: 20, 1: 2, 2: 2})
            if then == "before":
                crews.update(lost)
            thoughts._recent.clear()
            for now in range(20):
                thoughts.step_closed(1.0, crews, float(now))
            crews = Counter({0: 19, 1: 3, 2: 2})
            thoughts.moved([Moved(NodeId("v1"), 0, 1)], crews, 30.0)
            if then == "after":
                crews.subtract(lost)
            thoughts.lost(crews)
            for now in range(20, 110):
                assert thoughts.verdict(float(now)) is None or now >= 90
                thoughts.step_closed(9.0 if now < 30 else 2.0, crews, float(now))
            assert thoughts.trial is None and thoughts.pause_factor == (pause if number else min(pause, 2.0))
