"""Places, plans and going back: which server gets which shard, and which ledgers survive what."""

from __future__ import annotations

from typing import Any

import msgspec

from coordinator.live.records import DataRow, HistoryEnded, PlanRow, StepRow, StoredState
from coordinator.live.status import run_state
from protocol.base.ids import NodeId
from protocol.base.machine import Send
from protocol.messages import Leave, NodeReport, Ping, PlanChanged, Pong, StepReportStored
from protocol.run.plan import Plan
from tests.coordinator.live.desk import CONFIG, DATA, Desk, join

PLACES = {"s0": (0, 0), "s1": (0, 1), "s2": (1, 0), "s3": (1, 1)}
GONE_S = CONFIG.limits.server_gone_s


def held(node: str, plan: Plan, version: int, **facts: Any) -> dict[str, Any]:
    """What a server says that has its shard of the plan's ledgers on disk."""
    stage, shard = PLACES[node]
    own = {"stage": stage, "shard": shard, "version": version, "held_generation": plan.ledger_generation}
    return {**own, **facts}


def restarted(desk: Desk, steps: int) -> Desk:
    """A coordinator with the database of `desk`, in which so many steps are stored."""
    rows = tuple(record for record in desk.written(StepRow))
    assert len(rows) == steps
    plans = desk.written(PlanRow)
    stored = StoredState(
        plan=plans[-1].plan,
        plan_sentence=plans[-1].sentence,
        data=DataRow(vocabulary=259, data_hash="d" * 64, token_count=1000),
        steps=rows,
        tokens=sum(row.tokens for row in rows),
        next_serial=100,
    )
    return Desk(stored=stored, generation=plans[-1].plan.generation + 1)


def test_a_broken_link_changes_nothing() -> None:
    """A server whose link breaks keeps its place; back with its state it gets the same plan, and nobody else a word."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    effects = desk.server("s2", **held("s2", plan, version=1))
    assert desk.sent("s2", PlanChanged, effects) == [PlanChanged(plan=plan, stage=1, reason="stage 1 front 0")]
    assert all(isinstance(effect, Send) and effect.peer == "s2" for effect in effects)
    assert len(desk.written(PlanRow)) == 1


def test_a_new_address_is_a_new_generation_with_the_same_ledgers() -> None:
    """A server back at another port: everybody gets the new address, nothing resets."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    effects = desk.server("s2", **held("s2", plan, version=1, addresses=("s2:2",)))
    assert (desk.plan.generation, desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1, -1)
    assert desk.plan.addresses_of(NodeId("s2")) == ("s2:2",)
    for node in PLACES:
        assert [message.plan.generation for message in desk.sent(node, PlanChanged, effects)] == [2]


def test_a_coordinator_restart_reissues_the_placement_and_resets_nothing() -> None:
    """The database's plan under the next generation, durable before it is told, with the same ledgers."""
    first = Desk()
    plan = first.train()
    first.report(0)
    desk = restarted(first, steps=1)
    assert (desk.plan.generation, desk.plan.ledger_generation) == (2, 1)
    assert desk.plan.stages == plan.stages
    effects = desk.server("s3", **held("s3", plan, version=1))
    assert [message.plan for message in desk.sent("s3", PlanChanged, effects)] == [desk.plan]
    desk.server("s0", **held("s0", plan, version=1))
    assert desk.sent("s0", StepReportStored, desk.report(1)) == [StepReportStored(step=1)]


def test_a_server_that_joins_while_the_reissued_plan_is_written_is_told_only_that() -> None:
    """Nobody is sent the old generation in between."""
    first = Desk()
    plan = first.train()
    stored = StoredState(plan=plan, next_serial=9)
    desk = Desk(stored=stored, generation=2, durable=False)
    desk.server("s0", **held("s0", plan, version=0))
    assert [message.plan.generation for message in desk.sent("s0", PlanChanged, desk.settle())] == [2]


def test_the_whole_run_resumes_when_all_servers_come_back_in_any_order() -> None:
    """All servers restarted, at new ports, in another order: same places, same ledgers."""
    first = Desk()
    plan = first.train()
    first.report(0)
    desk = restarted(first, steps=1)
    for node in ("s3", "s1", "s0", "s2"):
        desk.server(node, **held(node, plan, version=1, addresses=(f"{node}:9",)))
    assert desk.plan.ledger_generation == 1
    assert desk.plan.server_nodes() == ("s0", "s1", "s2", "s3")
    assert all(desk.plan.addresses_of(NodeId(node)) == (f"{node}:9",) for node in PLACES)
    assert desk.machine.history.rollback_count == 0


def test_a_server_that_lost_its_disk_sends_the_run_back_to_the_common_checkpoint() -> None:
    """Its place, but no state: new ledgers from the newest checkpoint that all can read; lost steps counted."""
    desk = Desk()
    plan = desk.train()
    for step in range(4):
        desk.report(step)
    for node, steps in (("s0", (2, 1)), ("s1", (1,)), ("s3", (2, 1, 0))):
        desk.say(node, join(**held(node, plan, version=4, checkpoints=steps, addresses=(f"{node}:1",))))
    desk.drop("s2")
    effects = desk.server("s2", checkpoints=(2, 1))
    assert (desk.plan.generation, desk.plan.ledger_generation, desk.plan.restore_step) == (2, 2, 1)
    assert [message.plan.generation for message in desk.sent("s2", PlanChanged, effects)] == [2]
    assert desk.written(PlanRow)[-1].lost_steps == 3
    assert desk.counted("barnraise_run_bad_steps_total", run="demo", reason="rolled_back") == 3
    (log,) = desk.logged("run goes back")
    assert (log["first_lost"], log["last_lost"], log["restore_step"]) == (1, 3, 1)
    assert "stage 1 front 0" in log["cause"]
    assert desk.machine.history.newest_step == 0
    assert desk.report(3, ledger_generation=1) == []  # from before, still under way
    assert desk.sent("s0", StepReportStored, desk.report(1)) == [StepReportStored(step=1)]
    assert [(row.step, row.ledger_generation) for row in desk.machine.history.tail] == [(0, 1), (1, 2)]


def test_without_a_common_checkpoint_the_run_begins_again_from_the_seed() -> None:
    """No checkpoint that all can read: restore_step -1, all closed steps lost."""
    desk = Desk()
    desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.server("s2", checkpoints=(0,))
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, -1)
    assert desk.machine.history.newest_step == -1 and desk.machine.history.lost_steps == 1


def test_going_back_waits_until_all_servers_are_there_to_say_what_they_can_read() -> None:
    """A lost disk and an absent server: the stateless one hears no plan until the absent one is back."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s1")
    desk.drop("s2")
    assert not desk.sent("s2", PlanChanged, desk.server("s2"))
    assert desk.plan.generation == 1
    assert "come back: stage 0 back 0" in desk.machine.status(desk.now)["run"]["waiting_for"]
    effects = desk.server("s1", **held("s1", plan, version=1))
    assert desk.plan.ledger_generation == 2
    assert desk.sent("s2", PlanChanged, effects) and desk.sent("s1", PlanChanged, effects)


def test_a_lost_disk_is_known_also_while_a_place_is_empty() -> None:
    """Whoever brought the disk of another place has left before a plan named it. The server without its state is not
    sent the plan meanwhile: it would begin with nothing and hold up the run for ever (seed 114768 of the world)."""
    desk = Desk()
    plan = desk.train()
    for node in ("s1", "s2", "s3"):
        desk.drop(node)
    desk.server("s2")  # without its disk
    desk.server("s5", **held("s1", plan, version=0))
    assert desk.machine.placement.table.holder[0, 1] == "s5"
    effects = desk.drop("s5")
    assert (0, 1) not in desk.machine.placement.table.holder
    effects += desk.stay(2, "s0", "s2")
    assert desk.sent("s2", PlanChanged, effects) == []
    assert desk.machine.placement.review.lost == ((1, 0),)
    for node in ("s1", "s3"):
        desk.server(node, **held(node, plan, version=0))
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, -1)


def test_an_older_copy_of_a_disk_is_a_lost_disk() -> None:
    """Version 1 although steps 0 and 1 are closed everywhere: somebody restored a copy."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.report(1)
    desk.drop("s2")
    desk.server("s2", **held("s2", plan, version=1))
    assert desk.plan.ledger_generation == 2


def test_going_back_waits_for_a_server_whose_word_may_be_on_its_way() -> None:
    """s1's link is cut without a sign, so its news of checkpoint 1 has not arrived: nobody throws that step away."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.report(1)
    for node in ("s0", "s3"):
        desk.say(node, join(**held(node, plan, version=2, checkpoints=(1,), addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.pass_time(0.5)
    desk.answers = False
    effects = desk.server("s2", checkpoints=(1,))
    asked = {e.peer: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)}
    assert set(asked) == {"s0", "s1", "s2", "s3"}
    for node in ("s0", "s2", "s3"):
        desk.say(node, Pong(number=asked[NodeId(node)].number))
    assert desk.plan.ledger_generation == 1
    assert "waiting for stage 0 back 0 (s1) to say which" in desk.machine.placement.review.sentence
    desk.drop("s1", "silent")
    desk.answers = True
    desk.server("s1", **held("s1", plan, version=2, checkpoints=(1,)))
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1)


def test_a_server_whose_disk_is_whole_after_all_is_told_the_plan() -> None:
    """Before it knew the run it could not say what its disk gives back; with its second word it has its place again."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.answers = False
    effects = desk.server("s2")
    assert desk.machine.placement.review.lost and not desk.sent("s2", PlanChanged, effects)
    effects = desk.say("s2", join(**held("s2", plan, version=1, addresses=("s2:1",))))
    assert desk.machine.placement.review.kind == "keep"
    assert [message.plan for message in desk.sent("s2", PlanChanged, effects)] == [plan]


def test_a_server_whose_fellows_reach_it_is_not_given_up() -> None:
    """Only the way between the coordinator and the decider is broken: no spare, no going back, and the status says
    nothing of waiting. When the fellows lose it too, its time begins; what it closed unheard counts as lost."""
    desk = Desk()
    plan = desk.train()
    desk.server("spare")
    desk.drop("s0")
    report = NodeReport(
        state="training", waiting_for="", counters={"step": 3.0}, ledger_generation=plan.ledger_generation,
        linked=(NodeId("s0"),),
    )  # fmt: skip
    for step in range(40):
        desk.stay(5.0, "s1", "s2", "s3", "spare")
        report = msgspec.structs.replace(report, counters={"step": float(step)})
        desk.say("s1", report)
    assert desk.plan.ledger_generation == 1 and run_state(desk.machine, desk.now) == ("training", "")
    alone = msgspec.structs.replace(report, linked=())
    for _ in range(40):
        desk.say("s1", alone)
        desk.stay(5.0, "s1", "s2", "s3", "spare")
    assert desk.plan.ledger_generation == 2 and NodeId("spare") in desk.plan.server_nodes()
    assert desk.machine.history.lost_steps == 40


def test_a_spare_is_asked_to_look_and_a_plain_answer_is_not_enough() -> None:
    """It was told of no checkpoint; the run goes back to the one that it finds, not to the seed."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    for node in ("s0", "s1", "s3"):
        desk.say(node, join(**held(node, plan, version=1, checkpoints=(1,), addresses=(f"{node}:1",))))
    desk.server("spare")
    desk.drop("s2")
    desk.stay(CONFIG.limits.server_gone_s - 1.0, "s0", "s1", "s3", "spare")
    effects = desk.pass_time(2.0)
    assert desk.plan.ledger_generation == 1
    for node in ("s0", "s1", "s3"):
        desk.say(node, Pong(number=desk.sent(node, Ping, effects)[-1].number))
    (look,) = [ping for ping in desk.sent("spare", Ping, effects) if ping.look]
    desk.say("spare", Pong(number=desk.sent("spare", Ping, effects)[-1].number + 100))
    assert desk.plan.ledger_generation == 1
    desk.say("spare", join(addresses=("spare:1",), checkpoints=(1,)))
    desk.say("spare", Pong(number=look.number))
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 1)


def test_a_checkpoint_ahead_of_the_history_brings_its_steps_back() -> None:
    """One server could not read checkpoint 2, so the run went back to the seed; now all can: steps 0 and 1 count."""
    desk = Desk()
    plan = desk.train()
    for step in range(3):
        desk.report(step)
    for node in ("s0", "s3"):
        desk.say(node, join(**held(node, plan, version=3, checkpoints=(2,), addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.server("s2", checkpoints=(2,))  # s1 has never heard of the checkpoint
    assert (desk.plan.restore_step, desk.machine.history.newest_step) == (-1, -1)
    desk.report(0, node=desk.plan.decider)
    desk.drop("s1")
    desk.server("s1", checkpoints=(2,))
    assert desk.plan.restore_step == 2
    history = desk.machine.history
    assert [(row.step, row.ledger_generation) for row in history.tail] == [(0, 2), (1, 1)]
    assert (history.newest_step, history.tokens, history.lost_steps) == (1, 2 * 2048, 3)
    desk.report(2, node=desk.plan.decider)
    assert desk.machine.history.newest_step == 2 and not desk.logged("step reports missing")


def back_at_the_end(desk: Desk) -> None:
    """All steps are closed and the last checkpoint is written; of step 4 the coordinator never heard. Then a disk is
    lost."""
    plan = desk.train()
    for step in range(4):
        desk.report(step)
    for node in ("s0", "s1", "s3"):
        desk.say(node, join(**held(node, plan, version=5, checkpoints=(5,), addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.server("s2", checkpoints=(5,))
    assert desk.plan.restore_step == 5


def decider_says(desk: Desk, unreported: int, ledger_generation: int | None = None) -> None:
    generation = desk.plan.ledger_generation if ledger_generation is None else ledger_generation
    counters = {"unreported": float(unreported)}
    report = NodeReport(state="training", waiting_for="", ledger_generation=generation, counters=counters)
    desk.say(desk.plan.decider, report)


def test_a_run_that_went_back_to_its_last_checkpoint_is_not_finished_before_the_last_report() -> None:
    """T-I10: the decider still has the report that the coordinator missed, and the history ends whole."""
    desk = Desk()
    back_at_the_end(desk)
    assert not desk.machine.finished
    assert run_state(desk.machine, desk.now) == (
        "waiting",
        "waiting for stage 0 front 0 to tell how the last steps ended",
    )
    decider_says(desk, unreported=0, ledger_generation=1)  # of the ledgers before: it does not know yet
    decider_says(desk, unreported=1)
    assert not desk.machine.finished
    desk.report(4)
    assert desk.machine.finished and desk.machine.history.newest_step == 4
    assert not desk.written(HistoryEnded) and not desk.logged("step reports missing")


def test_a_last_report_that_is_lost_with_its_disk_is_given_up_on_record() -> None:
    """The decider that began anew knows of none: that is written down, and the run is finished, also for a coordinator
    that is started once more."""
    desk = Desk()
    back_at_the_end(desk)
    desk.durable = False
    decider_says(desk, unreported=0)
    decider_says(desk, unreported=0)
    assert not desk.machine.finished, "not before it is durable"
    desk.durable = True
    desk.settle()
    assert desk.machine.finished
    assert desk.written(HistoryEnded) == [HistoryEnded(ledger_generation=2, first_missing=4)]
    (log,) = desk.logged("step reports missing")
    assert (log["first"], log["last"]) == (4, 4)
    again = Desk(stored=StoredState(plan=desk.plan, steps=tuple(desk.written(StepRow)), ended=True), generation=9)
    assert again.machine.finished and not again.written(PlanRow)


def test_a_server_back_after_the_run_went_back_without_it_joins_the_new_ledgers() -> None:
    """Its link broke before it was told of the new ledgers, so nothing of them can be lost: no second going back."""
    desk = Desk()
    plan = desk.train()
    desk.drop("s2")
    desk.durable = False
    desk.server("s2")
    while not desk.written(PlanRow)[1:]:
        desk.settle_one()
    desk.drop("s1")  # while the plan is being written
    desk.durable = True
    desk.settle()
    assert desk.plan.ledger_generation == 2
    effects = desk.server("s1", **held("s1", plan, version=0))
    assert desk.sent("s1", PlanChanged, effects)
    assert desk.plan.ledger_generation == 2


def test_a_server_lost_before_the_first_plan_frees_its_place() -> None:
    """Before training there is nothing to come back to: the next server takes the place."""
    desk = Desk()
    desk.server("s0")
    desk.server("s1")
    desk.drop("s0")
    desk.server("s2")
    assert desk.machine.placement.table.holder == {(0, 0): "s2", (0, 1): "s1"}


def test_a_spare_waits_and_takes_the_place_of_a_server_that_is_gone_too_long() -> None:
    """Told that it is a spare; after server_gone_s it takes over and the run goes back to what all can read."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    effects = desk.server("s4", checkpoints=(0,))
    assert desk.sent("s4", PlanChanged, effects) == [
        PlanChanged(plan=plan, stage=-1, reason="all places are taken: this server is a spare")
    ]
    for node in ("s0", "s1", "s3"):
        desk.say(node, join(**held(node, plan, version=1, checkpoints=(0,), addresses=(f"{node}:1",))))
    desk.drop("s2")
    desk.stay(GONE_S - 2, "s0", "s1", "s3", "s4")
    assert desk.plan.generation == 1
    desk.stay(4, "s0", "s1", "s3", "s4")
    assert desk.plan.server_nodes() == ("s0", "s1", "s4", "s3")
    assert (desk.plan.ledger_generation, desk.plan.restore_step) == (2, 0)
    (log,) = desk.logged("server given up")
    assert log["node"] == "s2"
    effects = desk.server("s2", **held("s2", plan, version=1))
    assert desk.sent("s2", PlanChanged, effects)[0].stage == -1


def with_a_spare_that_cannot_begin() -> tuple[Desk, Plan]:
    """s1 is gone so long that its place is the spare's (s4); s2 is away, too, so no plan says so yet."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.server("s4")
    desk.drop("s1")
    desk.stay(2, "s0", "s2", "s3", "s4")
    desk.drop("s2")
    desk.stay(GONE_S - 1, "s0", "s3", "s4")
    assert desk.machine.placement.table.holder[(0, 1)] == "s4"
    return desk, plan


def test_who_lost_its_place_and_its_disk_is_not_told_a_plan_that_still_names_it() -> None:
    """Seed 408054: the spare that has the place cannot begin while somebody is away. The plan in force would have the
    one that is back, with an empty disk, begin there at version 0 among fellows that are further."""
    desk, _ = with_a_spare_that_cannot_begin()
    effects = desk.server("s1")
    assert desk.sent("s1", PlanChanged, effects) == []
    effects = desk.server("s2")
    assert desk.plan.server_nodes() == ("s0", "s4", "s2", "s3")
    assert [(message.plan, message.stage) for message in desk.sent("s1", PlanChanged, effects)] == [(desk.plan, -1)]


def test_a_server_without_a_link_is_not_given_up_while_steps_close() -> None:
    """Steps cannot close without it, so it works: only its link to the coordinator is down."""
    desk = Desk()
    desk.train()
    desk.server("s4")
    desk.drop("s2")
    for step in range(3):
        desk.stay(GONE_S * 0.7, "s0", "s1", "s3", "s4")
        desk.report(step)
    assert desk.plan.generation == 1
    desk.stay(GONE_S + 2, "s0", "s1", "s3", "s4")
    assert desk.plan.ledger_generation == 2


def test_a_server_given_up_that_comes_back_in_time_is_preferred_to_the_spare() -> None:
    """The spare cannot start until all are there; meanwhile the old holder comes back with the shard: nothing lost."""
    desk, plan = with_a_spare_that_cannot_begin()
    desk.server("s1", **held("s1", plan, version=1))
    desk.server("s2", **held("s2", plan, version=1))
    assert desk.plan.server_nodes() == ("s0", "s1", "s2", "s3")
    assert desk.plan.ledger_generation == 1


def test_another_identity_with_the_disk_of_an_absent_server_takes_over_without_loss() -> None:
    """A shard's disk in a new machine: its place, same ledgers, new generation."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.server("s9", stage=1, shard=0, version=1, held_generation=plan.ledger_generation)
    assert desk.plan.server_nodes() == ("s0", "s1", "s9", "s3")
    assert (desk.plan.generation, desk.plan.ledger_generation) == (2, 1)


def test_another_identity_with_a_copied_disk_of_a_present_server_is_a_spare() -> None:
    """Identity decides ties."""
    desk = Desk()
    plan = desk.train()
    effects = desk.server("s9", stage=1, shard=0, version=0, held_generation=plan.ledger_generation)
    assert desk.sent("s9", PlanChanged, effects)[0].stage == -1
    assert desk.plan.generation == 1


def test_a_graceful_leave_keeps_the_place_too() -> None:
    """A server restarted by hand says goodbye and comes back."""
    desk = Desk()
    plan = desk.train()
    desk.report(0)
    desk.say("s2", Leave(reason="restart"))
    effects = desk.server("s2", **held("s2", plan, version=1))
    assert desk.sent("s2", PlanChanged, effects)[0].stage == 1
    assert desk.plan.generation == 1


def test_after_the_end_nothing_is_replanned() -> None:
    """A server that comes back after the last step with an empty disk does not undo the run."""
    desk = Desk()
    desk.train()
    for step in range(5):
        desk.report(step)
    desk.drop("s2")
    desk.server("s2")
    assert desk.plan.generation == 1 and desk.machine.finished


# ---- step reports ------------------------------------------------------------------------------------------------


def test_a_step_is_acknowledged_only_when_it_is_durable() -> None:
    """Persist first, then StepReportStored; a duplicate in between is answered once it is stored."""
    desk = Desk()
    desk.train()
    desk.durable = False
    assert desk.report(0) == []
    assert desk.report(0) == []
    assert desk.settle() == [Send(NodeId("s0"), StepReportStored(step=0))]
    assert desk.report(0) == [Send(NodeId("s0"), StepReportStored(step=0))]
    assert len(desk.written(StepRow)) == 1


def test_a_gap_is_asked_for_and_accepted_only_when_nobody_has_it() -> None:
    """Step 2 before step 1: the answer names step 0; repeated alone, it is stored and the gap is logged."""
    desk = Desk()
    desk.train()
    desk.report(0)
    assert desk.report(2) == [Send(NodeId("s0"), StepReportStored(step=0))]
    assert [row.step for row in desk.written(StepRow)] == [0]
    assert desk.report(2) == [Send(NodeId("s0"), StepReportStored(step=2))]
    assert desk.logged("step reports missing") == [{"first": 1, "last": 1}]


def test_a_gap_that_is_filled_is_no_gap() -> None:
    """Step 2, then 1 and 2: all stored in order."""
    desk = Desk()
    desk.train()
    desk.report(0)
    for step in (2, 1, 2):
        desk.report(step)
    assert [row.step for row in desk.written(StepRow)] == [0, 1, 2]
    assert desk.logged("step reports missing") == []


def test_reports_that_come_while_the_run_goes_back_do_not_count() -> None:
    """The plan that goes back is being written: a report of the ledgers that it ends would be lost in the database."""
    desk = Desk()
    desk.train()
    desk.report(0)
    desk.drop("s2")
    desk.durable = False
    desk.server("s2")
    desk.settle_one()
    assert desk.machine.placement.going_back
    assert desk.report(1, ledger_generation=1) == []
    desk.settle()
    assert [row.step for row in desk.written(StepRow)] == [0]
    assert desk.machine.history.newest_step == -1


def test_a_step_outside_the_run_closes_the_link() -> None:
    """Step 5 of a run of five."""
    desk = Desk()
    desk.train()
    assert desk.hung_up(desk.report(5)) == [("s0", "unexpected")]


def test_data_of_a_replaced_server_is_compared_too() -> None:
    """Who takes a place on stage 0 must read the same data as the run began with."""
    first = Desk()
    plan = first.train()
    desk = restarted(first, steps=0)
    desk.server("s0", **held("s0", plan, version=0))
    assert desk.say("s0", DATA) == []
