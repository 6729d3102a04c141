"""A coordinator that comes back old, empty or beside a second one takes over what its servers go by."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.live.orders import Adopt, ChangeRun, PauseRun
from coordinator.live.records import DataRow, PlanRow, StoredState
from protocol.base.machine import Ordered
from protocol.messages import NodeReport, PlanChanged, StepReportStored, Welcome
from protocol.run.changes import RunChange
from protocol.run.plan import Plan
from protocol.run.run import StagesSection
from tests.coordinator.live.desk import CONFIG, DATA, Desk, join

SERVERS = ("s0", "s1", "s2", "s3")


def trained(**facts: Any) -> Plan:
    """The plan of a run that has begun, as its servers keep it; `facts` as later plans have them."""
    return msgspec.structs.replace(Desk().train(), **{"generation": 9, "ledger_generation": 6, **facts})


def shows(desk: Desk, node: str, plan: Plan, version: int = 3, **facts: Any) -> None:
    """A server joins with a whole disk of the plan's ledgers, and shows the plan."""
    stage, shard = plan.stage_of(node), plan.shard_of(node)  # type: ignore[arg-type]
    own = {
        "stage": -1 if stage is None else stage, "shard": -1 if shard is None else shard, "version": version,
        "held_generation": plan.ledger_generation, "plan": plan, "config_hash": CONFIG.config_hash(),
    }  # fmt: skip
    desk.server(node, **{**own, **facts})


def goes_on(desk: Desk, plan: Plan) -> None:
    """The plan is in force under a newer generation, with its ledgers, and each of its servers has heard so."""
    now = desk.plan
    assert now.generation > plan.generation
    assert now == msgspec.structs.replace(plan, generation=now.generation)
    for node in plan.server_nodes():
        assert desk.sent(node, PlanChanged)[-1].plan == now
    assert not desk.hung_up(desk.done) and not desk.machine.placement.review.sentence


def test_a_coordinator_without_its_database_takes_over_the_plan_that_all_servers_show() -> None:
    """Nobody is refused; the data's facts and the reports of steps count at once."""
    plan, desk = trained(), Desk()
    for node in SERVERS:
        shows(desk, node, plan)
        if node == "s0":
            desk.say("s0", DATA)
    goes_on(desk, plan)
    desk.volunteer("v0")
    assert desk.sent("v0", PlanChanged)
    desk.report(3)
    assert desk.sent("s0", StepReportStored)[-1].step == -1
    desk.report(3)  # what was before it, nobody has any more
    assert desk.sent("s0", StepReportStored)[-1].step == 3


@pytest.mark.parametrize("ledgers", [1, 6])
def test_a_coordinator_with_an_older_database_takes_over_the_newer_plan(ledgers: int) -> None:
    """Of the same ledgers or of newer ones: no step that the servers have closed is thrown away."""
    before = Desk()
    old = before.train()
    plan = trained(ledger_generation=ledgers)
    desk = Desk(stored=StoredState(plan=old, data=data_row()), generation=2)
    for node in SERVERS:
        shows(desk, node, plan)
    goes_on(desk, plan)
    assert all(row.plan.ledger_generation in (old.ledger_generation, ledgers) for row in desk.written(PlanRow))
    assert desk.machine.history.lost_steps == 0


def test_what_the_operator_changed_after_the_backup_still_counts() -> None:
    """Also where the old database was started so often that its generations have overtaken the servers'."""
    old = Desk().train()
    change = RunChange(key="optimizer.learning_rate", value="0.0001", from_step=2)
    plan = msgspec.structs.replace(old, generation=3, changes=(change,), paused=True)
    desk = Desk(stored=StoredState(plan=old, data=data_row()), generation=50)
    for node in SERVERS:
        shows(desk, node, plan)
    assert desk.plan.changes == (change,) and desk.plan.paused and desk.plan.generation > 50


def test_a_pause_of_which_an_old_database_knows_nothing_stays() -> None:
    """Its generations are above all that were told, for it has just started; what was told meanwhile is newer still."""
    old = Desk().train()
    plan = msgspec.structs.replace(old, generation=old.generation + 3, paused=True)
    desk = Desk(stored=StoredState(plan=old, data=data_row()), generation=10**6)
    shows(desk, "s0", old)
    assert not desk.plan.paused
    for node in SERVERS[1:]:
        shows(desk, node, plan)
    assert desk.plan.paused and desk.plan.generation > 10**6
    assert desk.sent("s0", PlanChanged)[-1].plan == desk.plan
    desk.feed(Ordered(PauseRun(False)))
    shows(desk, "s3", plan)  # who was told nothing since brings nothing new
    assert not desk.plan.paused and not desk.machine.placement.review.sentence


@pytest.mark.parametrize("first", SERVERS)
def test_an_order_that_was_given_up_does_not_come_back_by_one_server_that_has_not_heard_so(first: str) -> None:
    """The database is older than the order. The plan of that one server has more changes, and a lower generation."""
    old = Desk().train()
    change = RunChange("optimizer.learning_rate", "0.5", from_step=1)
    waits = msgspec.structs.replace(old, generation=7, changes=(change, RunChange("steps", "9")), held=True)
    dropped = msgspec.structs.replace(old, generation=8, changes=(change,))
    desk = Desk(stored=StoredState(plan=old, data=data_row()), generation=2)
    for node in (first, *(other for other in SERVERS if other != first)):
        shows(desk, node, waits if node == "s3" else dropped)
    assert desk.plan.changes == (change,) and not desk.plan.held
    assert desk.sent("s3", PlanChanged)[-1].plan == desk.plan


def test_a_server_that_came_back_does_not_bring_an_order_back_that_came_too_late() -> None:
    """It joined again with the plan in which the run waits for the end of a step, the order in it. When it had come too
    late, the list was shorter than what that server had shown, which was taken over: a plan every 40 ms, for ever."""
    desk = Desk()
    desk.train()
    for step in range(3):
        desk.report(step)
    desk.feed(Ordered(ChangeRun(RunChange("steps", "2"))))
    waits = desk.plan
    for node in SERVERS:
        desk.drop(node)
    for node in SERVERS:
        shows(desk, node, waits)
    for plan in (waits, msgspec.structs.replace(waits, generation=waits.generation + 1)):
        assert desk.plan.generation == plan.generation and desk.plan.held
        for node in SERVERS:
            counters = {"step": 2.0, "generation": float(plan.generation), **({"opened": 2.0} if node == "s0" else {})}
            news = NodeReport(
                state="training", ledger_generation=plan.ledger_generation, waiting_for="", counters=counters
            )
            desk.say(node, news)
    assert len(desk.logged("change too late")) == 1
    assert not desk.plan.changes and not desk.plan.held and desk.plan.generation == waits.generation + 2


def test_a_missing_server_is_waited_for_by_name_until_it_comes() -> None:
    plan, desk = trained(), Desk()
    for node in SERVERS[:3]:
        shows(desk, node, plan)
    sentence = desk.machine.status(desk.now)["run"]["waiting_for"]
    assert "server s3" in sentence and "barnraise run adopt" in sentence
    assert not desk.sent("s0", Welcome) and not desk.hung_up(desk.done) and not desk.written(PlanRow)
    shows(desk, "s3", plan)
    goes_on(desk, plan)


def test_an_operator_may_do_without_a_missing_server() -> None:
    plan, desk = trained(), Desk()
    for node in SERVERS[:3]:
        shows(desk, node, plan)
    desk.feed(Ordered(Adopt()))
    assert desk.plan.ledger_generation == plan.ledger_generation and desk.sent("s0", PlanChanged)
    assert "stage 1 back 0" in desk.machine.status(desk.now)["run"]["waiting_for"]


def test_a_server_whose_disk_is_empty_is_not_told_the_plan_that_is_taken_over() -> None:
    """It would begin the ledgers anew of which the others have more; the run goes back to where all can go on."""
    plan, desk = trained(), Desk()
    for node in SERVERS[:2]:
        shows(desk, node, plan)
    desk.server("s2")
    assert not desk.written(PlanRow)
    shows(desk, "s3", plan)
    taken_over, back = [row.plan for row in desk.written(PlanRow)]
    assert taken_over.ledger_generation == plan.ledger_generation < back.ledger_generation
    assert [told.plan for told in desk.sent("s2", PlanChanged)] == [back]


def test_the_newest_plan_wins_over_one_of_a_server_that_was_away() -> None:
    """It was cut off while the others went back: its older ledgers count for nothing."""
    plan, desk = trained(), Desk()
    shows(desk, "s3", trained(generation=5, ledger_generation=4))
    for node in SERVERS[:3]:
        shows(desk, node, plan)
    assert desk.written(PlanRow)[0].plan.ledger_generation == plan.ledger_generation


@pytest.mark.parametrize("facts", [{"restore_step": 2}, {"in_flight_max": 7}])
def test_two_plans_under_one_number_are_for_the_operator_to_judge(facts: dict[str, Any]) -> None:
    """Two coordinators have made them: the sentence names both sides, and says what to do."""
    plan, desk = trained(), Desk()
    for node in SERVERS[:2]:
        shows(desk, node, plan)
    for node in SERVERS[2:]:
        shows(desk, node, msgspec.structs.replace(plan, **facts))
    sentence = desk.machine.status(desk.now)["run"]["waiting_for"]
    assert all(f"server {node}" in sentence for node in SERVERS) and "move their state folders away" in sentence
    assert not desk.written(PlanRow) and not desk.hung_up(desk.done)


def test_two_coordinators_that_are_both_up_outbid_each_other_and_keep_the_ledgers() -> None:
    """What the other one issued meanwhile is taken over, and the next generation is above both."""
    desk = Desk()
    plan = desk.train()
    for node in SERVERS:
        desk.drop(node)
    other = msgspec.structs.replace(plan, generation=7)
    for node in SERVERS:
        shows(desk, node, other, version=0)
    goes_on(desk, other)
    assert desk.plan.ledger_generation == plan.ledger_generation


def test_a_plan_of_another_configuration_is_named_and_not_taken_over() -> None:
    plan, desk = trained(), Desk()
    for node in SERVERS:
        shows(desk, node, plan, config_hash=b"another")
    assert "RUN.toml that the servers know" in desk.machine.status(desk.now)["run"]["waiting_for"]
    assert not desk.written(PlanRow) and not desk.hung_up(desk.done)


def test_an_open_run_is_settled_as_the_servers_know_it() -> None:
    """`cut = "planned"`: the planner is not asked a second time."""
    config = msgspec.structs.replace(CONFIG, stages=StagesSection(count=2, cut="planned"))
    plan = trained()
    settled = config.settled(2, tuple(chunk.first_block for chunk in plan.course.chunks[1:]))
    desk = Desk(config)
    for node in SERVERS:
        shows(desk, node, plan, config_hash=settled.config_hash())
    assert desk.machine.config == settled and desk.sent("s0", Welcome)[-1].config == settled
    goes_on(desk, plan)


def test_a_server_with_ledgers_that_nobody_explains_stays_out_and_holds_nobody_up() -> None:
    """Its state folder has lost the plan: a run that is well goes on without it."""
    desk = Desk()
    desk.train()
    desk.server("s9", stage=0, shard=0, version=7, held_generation=8)
    assert desk.logged("server waits") and not desk.sent("s9", Welcome) and not desk.hung_up(desk.done)
    desk.report(0)
    assert desk.machine.history.newest_step == 0 and not desk.machine.status(desk.now)["run"]["waiting_for"]


def test_what_no_coordinator_would_have_planned_ends_the_link() -> None:
    plan = trained(generation=3)
    desk = Desk()
    desk.link("s0")
    assert desk.hung_up(desk.say("s0", join(plan=plan))) == [("s0", "unexpected")]
    desk.link("v0", "volunteer")
    assert desk.hung_up(desk.say("v0", join(role="volunteer", addresses=(), plan=trained()))) == [("v0", "unexpected")]


def data_row() -> DataRow:
    return DataRow(vocabulary=DATA.vocabulary, data_hash=DATA.data_hash, token_count=DATA.token_count)
