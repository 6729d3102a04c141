"""What members' reports add up to."""

from __future__ import annotations

import pytest

from protocol.messages import NodeReport
from tests.coordinator.live.desk import Desk

STAGE = "barnraise_coordinator_stage_microbatches_total"
RUN = "barnraise_run_microbatches_total"


def say(desk: Desk, node: str, **counters: float) -> None:
    desk.say(node, NodeReport(state="training", waiting_for="", counters=counters))


def test_what_grew_between_two_reports_of_a_link_is_counted_once() -> None:
    """The first report of a link counts nothing, nor does a total that went down: that process began anew."""
    desk = Desk()
    plan = desk.train()
    run, node = desk.machine.config.name, plan.stages[1].servers[0].node
    for total in (5.0, 8.0, 8.0, 1.0, 2.0):
        say(desk, node, tasks_backward=total, tasks_recomputed=total, reissued=0.0)
        desk.now += 1
    assert desk.counted(STAGE, run=run, stage="1") == 4
    assert desk.counted(STAGE, run=run, stage="0") == 0
    assert desk.counted(RUN, run=run, outcome="recomputed") == 4
    assert desk.counted(RUN, run=run, outcome="reissued") == 0


def test_idle_is_the_time_in_which_those_who_compute_did_not() -> None:
    """Over their newest two reports; who computes nothing is no hole in the pipeline, who left counts no more."""
    desk = Desk()
    desk.train()
    assert desk.machine.reported.idle_share() is None
    for second in range(2):
        say(desk, "s0", compute_s=8.0 * second)
        say(desk, "s1", compute_s=2.0 * second)
        say(desk, "s2", compute_s=0.0)
        desk.now += 10
    assert desk.machine.reported.idle_share() == pytest.approx(0.5)
    desk.drop("s1")
    assert desk.machine.reported.idle_share() == pytest.approx(0.2)


def test_a_closed_step_accepts_its_microbatches_at_every_stage() -> None:
    """Against what was computed this says how much work was done twice."""
    desk = Desk()
    desk.train()
    desk.report(0)
    config = desk.machine.config
    accepted = desk.counted(RUN, run=config.name, outcome="accepted")
    assert accepted == config.batch.microbatches * config.stages.count
