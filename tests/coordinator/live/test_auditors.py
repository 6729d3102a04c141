"""Which stage an auditor looks after, and that it is nobody's volunteer."""

from __future__ import annotations

from coordinator.live.auditors import MOVE_PAUSE_S
from protocol.messages import PlanChanged
from tests.coordinator.live.desk import DATA, Desk, join

SERVERS = ("s0", "s1", "s2", "s3")


def arrive(desk: Desk, node: str, stage: int = -1) -> None:
    desk.link(node, "auditor")
    desk.say(node, join(role="auditor", addresses=(), stage=stage))


def stages(desk: Desk) -> dict[str, int]:
    return {member.peer: member.stage for member in desk.machine.roster.auditors()}


def test_each_auditor_comes_where_there_are_fewest_or_where_it_wishes() -> None:
    """It waits for the plan and the vocabulary, and counts for no stage's work."""
    desk = Desk()
    desk.staff()
    arrive(desk, "a0")
    assert stages(desk) == {}
    desk.say("s0", DATA)
    assert desk.sent("a0", PlanChanged)[-1].stage == 0
    arrive(desk, "a1")
    arrive(desk, "a2", stage=1)
    assert stages(desk) == {"a0": 0, "a1": 1, "a2": 1}
    assert desk.machine.roster.volunteers() == []
    assert {member["role"] for member in desk.machine.status(desk.now)["members"]} == {"server", "auditor"}


def test_a_stage_that_has_lost_its_last_auditor_gets_one_of_those_that_nobody_wished_there() -> None:
    desk = Desk()
    desk.train()
    for node, wished in (("a0", 0), ("a1", -1), ("a2", -1)):
        arrive(desk, node, wished)
    assert stages(desk) == {"a0": 0, "a1": 1, "a2": 0}
    desk.drop("a1")
    desk.stay(MOVE_PAUSE_S / 2, *SERVERS, "a0", "a2")
    assert stages(desk) == {"a0": 0, "a2": 0}
    desk.stay(MOVE_PAUSE_S, *SERVERS, "a0", "a2")
    assert stages(desk) == {"a0": 0, "a2": 1}
    assert desk.sent("a2", PlanChanged)[-1].stage == 1


def test_what_asks_for_another_role_than_its_invite_is_sent_away() -> None:
    desk = Desk()
    desk.train()
    desk.link("v0", "volunteer")
    effects = desk.say("v0", join(role="auditor", addresses=()))
    assert desk.hung_up(effects) == [("v0", "unexpected")]
