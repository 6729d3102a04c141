"""A shard that is lost, and a copy of it at its buddy: the run goes on from a version and not from a checkpoint."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.live.records import PlanRow
from coordinator.live.slots import COPIED_SHARE
from protocol.messages import PlanChanged
from protocol.run.plan import Plan
from tests.coordinator.live.desk import CONFIG, Desk, join
from tests.coordinator.live.test_seating import GONE_S, held

CHECKPOINTS = (2,)


def trained(versions: dict[str, int], copies: tuple[tuple[int, int, int, int], ...]) -> tuple[Desk, Plan]:
    """Four steps of six are closed; servers have these versions, and s3 has copies."""
    desk = Desk(msgspec.structs.replace(CONFIG, steps=6))
    plan = desk.train()
    for step in range(4):
        desk.report(step)
    for node, version in versions.items():
        facts = held(node, plan, version=version, checkpoints=CHECKPOINTS, addresses=(f"{node}:1",))
        desk.say(node, join(**facts, copies=copies if node == "s3" else ()))
    return desk, plan


def lose(desk: Desk) -> None:
    """s2 (stage 1 front 0, whose buddy is s3) comes back with an empty disk."""
    desk.drop("s2")
    desk.server("s2", checkpoints=CHECKPOINTS)


def test_a_lost_disk_costs_no_closed_step_where_the_buddy_has_all_that_it_had() -> None:
    """New ledgers, from the newest version that all can show; the log says by whom, and no step is thrown away."""
    desk, _ = trained({"s0": 4, "s1": 5, "s3": 4}, ((1, 0, 4, 1), (1, 0, 5, 1)))
    lose(desk)
    assert (desk.plan.ledger_generation, desk.plan.restore_step, desk.plan.continues) == (2, 4, 1)
    assert desk.written(PlanRow)[-1].lost_steps == 0 and desk.machine.history.newest_step == 3
    (log,) = desk.logged("run goes back")
    assert log["cause"] == "the state of stage 1 front 0 is lost, and stage 1 back 0 still has version 4 of it"
    assert [message.plan for message in desk.sent("s2", PlanChanged)][-1] == desk.plan


@pytest.mark.parametrize(
    ("versions", "copies"),
    [
        ({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 3, 1),)),  # older than what is closed
        ({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 4, 0),)),  # of other ledgers
        ({"s0": 4, "s1": 4, "s3": 4}, ((1, 1, 4, 1), (0, 0, 4, 1))),  # of other shards
        ({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 5, 1),)),  # newer than what all others have
        ({"s0": 4, "s1": 4, "s3": 4}, ()),
    ],
)
def test_nothing_is_mixed_and_no_older_copy_counts(
    versions: dict[str, int], copies: tuple[tuple[int, int, int, int], ...]
) -> None:
    """Where no version is every shard's, the run goes back to the newest checkpoint, and says how much that costs."""
    desk, _ = trained(versions, copies)
    lose(desk)
    assert (desk.plan.restore_step, desk.plan.continues) == (2, -1)
    assert desk.written(PlanRow)[-1].lost_steps == 2


def test_a_server_that_gave_up_its_state_is_its_own_buddy_for_what_closed_steps_came_to() -> None:
    """Its fellow has lost the end of its disk, and contradicts it about the open step; what is closed both have (seed
    112242 of the world)."""
    desk, _ = trained({"s0": 4, "s1": 4, "s3": 4}, ())
    desk.drop("s2")
    desk.server("s2", checkpoints=CHECKPOINTS, copies=((1, 0, 4, 1),))
    assert (desk.plan.ledger_generation, desk.plan.restore_step, desk.plan.continues) == (2, 4, 1)
    assert desk.written(PlanRow)[-1].lost_steps == 0
    (log,) = desk.logged("run goes back")
    assert log["cause"] == "the state of stage 1 front 0 is lost, and stage 1 front 0 still has version 4 of it"


def test_the_word_of_a_server_that_is_no_buddy_does_not_count() -> None:
    """Whatever it says to hold."""
    desk, plan = trained({"s0": 4, "s1": 4, "s3": 4}, ())
    desk.say("s0", join(**held("s0", plan, 4, checkpoints=CHECKPOINTS, addresses=("s0:1",)), copies=((1, 0, 4, 1),)))
    lose(desk)
    assert (desk.plan.restore_step, desk.plan.continues) == (2, -1)


def test_both_lost_with_their_copies_is_a_way_back_to_the_checkpoint() -> None:
    """A shard and its buddy."""
    desk, _ = trained({"s0": 4, "s1": 4}, ())
    desk.drop("s3")
    lose(desk)
    desk.server("s3", checkpoints=CHECKPOINTS)
    assert (desk.plan.restore_step, desk.plan.continues) == (2, -1)


def test_a_place_whose_state_a_buddy_has_is_given_to_a_spare_sooner() -> None:
    """Since that costs open steps only; without a copy it stays the absent one's for all of its time."""
    for copies, share in ((((1, 0, 4, 1),), COPIED_SHARE), ((), 1.0)):
        desk, _ = trained({"s0": 4, "s1": 4, "s3": 4}, copies)
        desk.server("s4", checkpoints=CHECKPOINTS)
        desk.drop("s2")
        desk.stay(share * GONE_S - 2, "s0", "s1", "s3", "s4")
        assert desk.plan.ledger_generation == 1
        desk.stay(4, "s0", "s1", "s3", "s4")
        assert desk.plan.server_nodes() == ("s0", "s1", "s4", "s3") and desk.plan.ledger_generation == 2
        assert desk.plan.restore_step == (4 if copies else 2)


def test_ledgers_that_went_on_are_begun_by_who_has_what_they_begin_with() -> None:
    """A server that was away when they began finds its version in its journal, or at its buddy: both are well."""
    desk, plan = trained({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 4, 1),))
    desk.durable = False
    desk.drop("s2")
    desk.server("s2", checkpoints=CHECKPOINTS)
    while not isinstance(desk.records[-1], PlanRow):
        desk.settle_one()
    desk.drop("s0")
    desk.settle()
    desk.durable = True
    assert desk.plan.continues == 1
    desk.server("s0", **held("s0", plan, version=4))
    assert desk.sent("s0", PlanChanged)[-1].plan == desk.plan and desk.plan.ledger_generation == 2


def test_a_plan_of_the_same_ledgers_still_says_what_they_go_on_from() -> None:
    """After a restart of the coordinator, and when a server's address changes."""
    desk, _ = trained({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 4, 1),))
    lose(desk)
    begun = desk.plan
    for node in ("s0", "s1", "s2", "s3"):
        desk.drop(node)
    for node in ("s0", "s1", "s2", "s3"):
        desk.server(node, **held(node, begun, version=4, addresses=(f"{node}:9",)))
    assert (desk.plan.ledger_generation, desk.plan.continues, desk.plan.restore_step) == (2, 1, 4)
    assert desk.plan.generation > begun.generation


def twice_lost() -> tuple[Desk, Plan]:
    """s2 is given up, and ledgers go on from version 4 with s4 in its place; s3, which held the copy, is gone before s4
    has it. s4 and s3 are back without it, and s5 waits with what s2 had."""
    desk, plan = trained({"s0": 4, "s1": 4, "s3": 4}, ((1, 0, 4, 1),))
    desk.server("s4", checkpoints=CHECKPOINTS)
    desk.drop("s2")
    desk.stay(COPIED_SHARE * GONE_S + 2, "s0", "s1", "s3", "s4")
    assert (desk.plan.ledger_generation, desk.plan.restore_step, desk.plan.continues) == (2, 4, 1)
    desk.server("s5", **held("s2", plan, version=4, checkpoints=CHECKPOINTS))
    begun = desk.plan
    desk.say(
        "s4", join(**held("s2", begun, version=4, checkpoints=CHECKPOINTS, addresses=("s4:1",)))
    )  # what it fetches
    desk.drop("s3")
    return desk, begun


@pytest.mark.parametrize("begun", [True, False])
def test_a_spare_with_the_disk_of_a_lost_shard_takes_its_place_and_no_step_is_lost(begun: bool) -> None:
    """Ledgers go on once more from what the second ones began with: s0 and s1 have it of these, and s3, which may have
    been away when they began, of the first."""
    desk, plan = twice_lost()
    for node in ("s0", "s1"):
        desk.say(node, join(**held(node, plan, version=4, checkpoints=CHECKPOINTS, addresses=(f"{node}:1",))))
    first = msgspec.structs.replace(plan, ledger_generation=1)
    desk.server("s3", **held("s3", plan if begun else first, version=4, checkpoints=CHECKPOINTS))
    desk.drop("s4")
    desk.server("s4", checkpoints=CHECKPOINTS)
    assert desk.plan.server_nodes() == ("s0", "s1", "s5", "s3")
    assert (desk.plan.ledger_generation, desk.plan.restore_step, desk.plan.continues) == (desk.plan.generation, 4, 1)
    assert desk.written(PlanRow)[-1].lost_steps == 0
    assert [message.plan for message in desk.sent("s5", PlanChanged)][-1] == desk.plan
    assert [message.plan for message in desk.sent("s3", PlanChanged)][-1] == desk.plan
    cause = desk.logged("run goes back")[-1]["cause"]
    assert cause.endswith("is lost, and all have version 4, with which these ledgers began")


def test_who_fetches_in_vain_gives_its_place_to_the_spare_that_has_the_shard() -> None:
    """s4 was told the ledgers and never had what they begin with; its buddy is gone, and so it counts as lost when s3
    comes back empty. It counted as one that has all of it, and closed steps were thrown away (seed 29 of a scene)."""
    desk, plan = twice_lost()
    for node, version in (("s0", 4), ("s1", 4), ("s4", -1)):
        place = "s2" if node == "s4" else node
        desk.say(node, join(**held(place, plan, version=version, checkpoints=CHECKPOINTS, addresses=(f"{node}:1",))))
    first = msgspec.structs.replace(plan, ledger_generation=1)
    desk.server("s3", **held("s3", first, version=4, checkpoints=CHECKPOINTS))
    assert desk.plan.server_nodes() == ("s0", "s1", "s5", "s3")
    assert (desk.plan.restore_step, desk.plan.continues) == (4, 1)
    assert desk.written(PlanRow)[-1].lost_steps == 0


def test_what_ledgers_began_with_counts_no_more_when_they_have_closed_a_step() -> None:
    """Then it is older than what the run has, and the checkpoint is what is left."""
    desk, plan = twice_lost()
    desk.report(4, ledger_generation=2)
    for node in ("s0", "s1"):
        desk.say(node, join(**held(node, plan, version=5, checkpoints=CHECKPOINTS, addresses=(f"{node}:1",))))
    desk.server("s3", **held("s3", plan, version=5, checkpoints=CHECKPOINTS))
    desk.drop("s4")
    desk.server("s4", checkpoints=CHECKPOINTS)
    assert desk.plan.server_nodes() == ("s0", "s1", "s4", "s3")
    assert (desk.plan.restore_step, desk.plan.continues) == (2, -1)


def test_an_empty_place_goes_to_the_spare_that_has_its_shard() -> None:
    """And not to whoever came first."""
    desk, plan = trained({"s0": 4, "s1": 4, "s3": 4}, ())
    desk.server("s4", checkpoints=CHECKPOINTS)
    desk.server("s5", **held("s2", plan, version=4, checkpoints=CHECKPOINTS))
    desk.drop("s2")
    desk.stay(GONE_S + 2, "s0", "s1", "s3", "s4", "s5")
    assert desk.plan.server_nodes() == ("s0", "s1", "s5", "s3") and desk.plan.ledger_generation == 1
