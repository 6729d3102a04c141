"""What servers say of their disks and steps may be older than what is known by others' words."""

from __future__ import annotations

from protocol.messages import NodeReport, Ping, Pong
from tests.coordinator.live.desk import Desk, join
from tests.coordinator.live.test_seating import held


def test_a_word_overtaken_by_a_report_is_no_lost_disk() -> None:
    """s2 said "version 1" and went on; step 1 was reported before its word came. Asked again, it says "version 2"."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.report(1)
    desk.answers = False
    effects = desk.server("s2", **held("s2", plan, version=1))
    (ping,) = desk.sent("s2", Ping, effects)
    desk.answers = True
    desk.say("s2", join(**held("s2", plan, version=2, addresses=("s2:1",))))
    effects = desk.say("s2", Pong(number=ping.number))
    assert desk.plan.ledger_generation == 1
    assert desk.machine.placement.review.kind == "keep"


def test_steps_that_are_closed_while_a_word_is_on_its_way_say_nothing_of_a_disk() -> None:
    """s2 trained on by its links to the other servers. What it says of its disk is as old as its link to us can be, and
    so is its answer when it is asked again: four closed steps were thrown away. Its own link tells the two apart."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.link("s2")
    desk.report(1)
    desk.report(2)
    assert not desk.sent("s2", Ping, desk.say("s2", join(**held("s2", plan, version=1, addresses=("s2:1",)))))
    assert desk.plan.ledger_generation == 1 and desk.machine.placement.review.kind == "keep"
    desk.drop("s2")
    desk.server("s2", **held("s2", plan, version=2))
    assert desk.plan.ledger_generation == 2, "three steps were closed before this link came up"


def test_a_server_that_catches_up_is_no_news_of_a_step() -> None:
    """It has started anew and hears how far the others are: no step was closed, and whoever hangs hangs as before."""
    desk = Desk()
    plan = desk.train()

    def tells(node: str, step: int) -> float:
        counters = {"step": float(step)}
        report = NodeReport(
            state="training", waiting_for="", ledger_generation=plan.ledger_generation, counters=counters
        )
        desk.pass_time(1.0)
        desk.say(node, report)
        return desk.now - desk.machine.placement.newest_news_at

    assert (tells("s0", 4), tells("s0", 5), tells("s1", 3)) == (1.0, 0.0, 1.0)
    assert (tells("s1", 5), tells("s1", 6)) == (2.0, 0.0)
