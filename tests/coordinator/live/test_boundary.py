"""Tests of `coordinator.live.boundary`: from which step on a change counts that all servers must know of."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.live.boundary import begun_at, boundary, closed_up_to
from protocol.messages import NodeReport
from protocol.run.changes import LAYOUT, RunChange, check_changes
from tests.node.setting import make_config


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


def test_what_is_ordered_after_going_back_begins_with_the_last_of_what_was_changed_before() -> None:
    """A run whose shard was lost does steps 2 and 3 again, and at step 4 what was changed there. An order was taken to
    begin with step 2, before an older one in the list: such a list no member takes, and all of them ended."""
    before = RunChange(key="checkpoint.every_steps", value="3", from_step=4)
    order = RunChange(key="batch.microbatches", value="3")
    found, late = begun_at((before, order), 2)
    assert (late, [change.from_step for change in found]) == ((), [4, 4])
    check_changes(make_config(), found)
    shorter = msgspec.structs.replace(order, key="steps", value="4")
    assert begun_at((before, shorter), 2) == ((before,), (shorter,)), "it would end without its last checkpoint"


def test_a_layout_begins_with_its_ledgers_whatever_is_changed_later() -> None:
    """They begin from what is closed now."""
    before = RunChange(key="checkpoint.every_steps", value="3", from_step=4)
    layout = RunChange(key=LAYOUT, value='{"stages.count":2}')
    found, _ = begun_at((before, layout), 2)
    assert [(change.key, change.from_step) for change in found] == [(LAYOUT, 2), (before.key, 4)]
