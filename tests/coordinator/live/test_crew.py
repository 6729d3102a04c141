"""Stages of volunteers: the least power for the work, with a reason; moved seldom."""

from __future__ import annotations

from coordinator.live.crew import MOVE_PAUSE_S, STAY_S
from coordinator.live.stage_choice import Assignment, Power, Standing, move, power_per_work
from coordinator.live.stage_choice import assign as assign_by
from protocol.base.ids import NodeId
from protocol.messages import PlanChanged
from protocol.run.run import LimitsSection, RunConfig
from tests.coordinator.live.desk import Desk

SERVERS = ("s0", "s1", "s2", "s3")


def assign(work: list[float], there: list[Power], wished: int, per_stage_max: int) -> Assignment:
    return assign_by(work, Standing(len(work), there), wished, per_stage_max)


def powers(*stages_and_speeds: tuple[int, float]) -> list[Power]:
    return [Power(NodeId(f"v{n}"), stage, speed, n) for n, (stage, speed) in enumerate(stages_and_speeds)]


def test_power_counts_by_the_work_of_the_stage() -> None:
    """A stage with three times the work needs three times the power; unmeasured volunteers count as the mean."""
    assert power_per_work([1.0, 3.0], powers((0, 10.0), (1, 30.0))) == [40.0, 40.0]
    assert power_per_work([1.0, 1.0], powers((0, 10.0), (0, 30.0), (1, 0.0))) == [80.0, 40.0]


def test_a_stage_that_all_routes_leave_out_needs_nobody() -> None:
    """Two stages with half of them skipped: nothing is divided by its work, and nobody is given or moved to it."""
    assert assign([1.0, 0.0], [], -1, 9).stage == 0
    assert assign([1.0, 0.0], powers((0, 5.0), (0, 5.0)), 1, 9).stage == 0
    assert move([1.0, 0.0], powers((0, 5.0), (0, 5.0))) is None


def test_the_least_power_for_the_work_gets_the_next_volunteer() -> None:
    """Ties go to the lower stage, and the sentence says why."""
    assert assign([1.0, 1.0], [], -1, 9).stage == 0
    assert assign([1.0, 1.0], powers((0, 5.0)), -1, 9).reason == "stage 1 has no volunteer"
    assert assign([1.0, 1.0], powers((0, 5.0), (1, 4.0)), -1, 9).stage == 1
    assert assign([1.0, 3.0], powers((0, 5.0), (1, 10.0)), -1, 9).stage == 1
    assert assign([1.0, 1.0], powers((0, 5.0), (1, 5.0)), -1, 9).stage == 0


def test_a_wish_is_granted_when_nobody_is_short() -> None:
    """Not while another stage has nobody, and not beyond twice the power of the poorest."""
    assert assign([1.0, 1.0], powers((0, 5.0)), 0, 9).stage == 1
    assert assign([1.0, 1.0], powers((0, 5.0), (1, 4.0)), 0, 9).label == "wished"
    assert assign([1.0, 1.0], powers((0, 9.0), (1, 4.0)), 0, 9).stage == 1
    assert assign([1.0, 1.0], [], 7, 9).stage == 0


def test_a_full_stage_takes_nobody() -> None:
    """The servers of a stage hold so many links; when all are full the volunteer waits and knows why."""
    assert assign([1.0, 1.0], powers((0, 1.0), (1, 9.0), (1, 9.0)), 0, 1).stage == -1
    assert assign([1.0, 1.0], powers((0, 1.0)), 0, 1).stage == 1


def test_the_weakest_of_the_richest_stage_moves_to_the_empty_one() -> None:
    """Of equals the last to come; those to keep stay; a stage of one gives nobody."""
    assert move([1.0, 1.0], powers((0, 5.0))) is None
    assert move([1.0, 1.0], powers((0, 5.0), (1, 5.0))) is None
    moved = move([1.0, 1.0, 1.0], powers((0, 5.0), (0, 3.0), (0, 3.0), (1, 1.0), (1, 1.0)))
    assert moved is not None and (moved[0], moved[1].stage) == ("v2", 2)
    kept = move([1.0, 1.0], powers((0, 5.0), (0, 3.0)), keep=[NodeId("v1")])
    assert kept is not None and kept[0] == "v0"


def test_a_stage_that_loses_its_last_volunteer_gets_one_after_a_pause() -> None:
    """Stage 1, which has the head, has two; stage 0 loses its one: after the pause one moves, and is told why."""
    desk = Desk()
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1]
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    desk.drop("v0")
    assert not desk.sent("v2", PlanChanged, desk.stay(MOVE_PAUSE_S - 1, *SERVERS, "v1", "v2"))
    effects = desk.stay(4, *SERVERS, "v1", "v2")
    assert not desk.sent("v1", PlanChanged, effects)
    (message,) = desk.sent("v2", PlanChanged, effects)
    assert message.stage == 0 and message.reason == "moved from stage 1 to stage 0, which has no volunteer"
    assert message.plan == desk.plan


def test_a_new_volunteer_within_the_pause_spares_the_others_the_move() -> None:
    """A killed volunteer's successor goes where it was."""
    desk = Desk()
    desk.train()
    for number in range(3):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    desk.stay(STAY_S, *SERVERS, "v0", "v1", "v2")
    desk.drop("v0")
    desk.stay(MOVE_PAUSE_S - 2, *SERVERS, "v1", "v2")
    assert desk.sent("v3", PlanChanged, desk.volunteer("v3", tokens_per_s=10.0))[0].stage == 0
    effects = desk.stay(60, *SERVERS, "v1", "v2", "v3")
    assert not any(desk.sent(node, PlanChanged, effects) for node in ("v1", "v2", "v3"))


def test_who_has_just_come_is_not_moved() -> None:
    """Both volunteers of stage 0 leave at once: one of stage 1 moves, but not before it has been there a while."""
    desk = Desk()
    desk.train()
    for number in range(4):
        desk.volunteer(f"v{number}", tokens_per_s=10.0)
    assert [member.stage for member in desk.machine.roster.volunteers()] == [0, 1, 1, 0]
    desk.drop("v0")
    desk.drop("v3")
    effects = desk.stay(STAY_S - 2, *SERVERS, "v1", "v2")
    assert not desk.sent("v1", PlanChanged, effects) + desk.sent("v2", PlanChanged, effects)
    effects = desk.stay(60, *SERVERS, "v1", "v2")
    assert len(desk.sent("v1", PlanChanged, effects) + desk.sent("v2", PlanChanged, effects)) == 1


def test_a_volunteer_without_room_gets_a_stage_when_there_is_some() -> None:
    """Two stages of one volunteer each: the third waits with a reason and follows the first that leaves."""
    desk = Desk(RunConfig(limits=LimitsSection(volunteers_max=1)))
    desk.train()
    desk.volunteer("v0")
    desk.volunteer("v1")
    effects = desk.volunteer("v2")
    (message,) = desk.sent("v2", PlanChanged, effects)
    assert message.stage == -1 and "all stages have the 1 volunteer" in message.reason
    desk.drop("v0")
    effects = desk.stay(2, *SERVERS, "v1", "v2")
    assert [message.stage for message in desk.sent("v2", PlanChanged, effects)] == [0]
