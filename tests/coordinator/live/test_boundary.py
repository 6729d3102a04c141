"""Tests of `coordinator.live.boundary`: from which step on a change counts that all servers must know of."""

from __future__ import annotations

import pytest

from coordinator.live.boundary import boundary, closed_up_to
from protocol.messages import NodeReport


def report(closed: int, **decider: int) -> NodeReport:
    counters = {"step": float(closed), "generation": 5.0, **{name: float(n) for name, n in decider.items()}}
    return NodeReport(state="training", ledger_generation=1, waiting_for="", counters=counters)


@pytest.mark.parametrize(
    ("reports", "step"),
    [
        ([report(4, opened=4, reached=4), report(4)], 5),
        ([report(4, opened=5, reached=5), report(4)], None),
        ([report(4, opened=4, reached=4), report(3)], None),
        ([report(-1, opened=-1, reached=-1), report(-1)], 0),
        ([report(4, opened=4), report(4)], 5),
    ],
)
def test_the_boundary_is_behind_all_open_steps(reports: list[NodeReport], step: int | None) -> None:
    """Once they are closed everywhere; a stage 0 of an older build does not say how far its life before was."""
    assert boundary(reports) == closed_up_to(reports) == step


def test_steps_that_a_life_before_may_have_opened_are_done_as_they_were_begun() -> None:
    """Somebody may have them open, with the old data and tasks, and stage 0 does not know it any more. What is laid out
    anew has other ledgers, and begins from what is closed."""
    reports = [report(4, opened=4, reached=6), report(4)]
    assert (boundary(reports), closed_up_to(reports)) == (7, 5)
