"""A running job is laid out anew: held at a boundary, saved there, and nobody is moved before all can read it."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.live.orders import ChangeRun, RollBack
from coordinator.live.plan_builder import Guidance
from coordinator.live.records import DataRow, PlanRow, StoredState
from coordinator.live.replanning import why_no_layout
from protocol.base.ids import NodeId
from protocol.base.machine import LinkDown, Ordered
from protocol.messages import NodeReport, PlanChanged
from protocol.run.changes import changed
from protocol.run.run import CheckpointSection, RunConfig
from protocol.schedule.policies import Policy
from tests.coordinator.live.desk import CONFIG, Desk, join
from tests.layouts import make_layout

RUN = msgspec.structs.replace(CONFIG, steps=100, checkpoint=CheckpointSection(every_steps=10, folder="/shared"))
NODES = ("s0", "s1", "s2", "s3")
PLACES = {"s0": (0, 0), "s1": (0, 1), "s2": (1, 0), "s3": (1, 1)}


def ordered(*settings: str, guidance: Guidance | None = None) -> Desk:
    """Four servers of two stages have closed steps 0 to 6, step 7 is open, and a layout is ordered."""
    desk = Desk(RUN)
    desk.train()
    for step in range(7):
        desk.report(step)
    layout = make_layout(RUN, (), settings or ("stages.count=1", "stages.front_servers=3"))
    desk.feed(Ordered(ChangeRun(layout, guidance)))
    return desk


def get_on(desk: Desk, closed: int, opened: int, unreported: int = 0) -> None:
    """Every server of the plan says by which plan it goes, and how far it is."""
    plan = desk.plan
    for node in plan.server_nodes():
        counters = {"step": float(closed), "generation": float(plan.generation)}
        if node == plan.decider:
            counters |= {"opened": float(opened), "unreported": float(unreported)}
        desk.say(
            node,
            NodeReport(
                state="training", waiting_for="", alert="", ledger_generation=plan.ledger_generation, counters=counters
            ),
        )


def can_read(desk: Desk, step: int, *nodes: str) -> None:
    for node in nodes:
        stage, shard = PLACES.get(node, (-1, -1))
        facts = {"stage": stage, "shard": shard, "version": step, "held_generation": 1} if stage >= 0 else {}
        desk.say(node, join(addresses=(f"{node}:1",), checkpoints=(step,), **facts))


def saved(desk: Desk) -> None:
    """The open step closes, and all know that; the plan that has them save is in force."""
    get_on(desk, 6, 7)
    assert desk.plan.held and desk.plan.save == -1, "a step is open"
    desk.report(7)
    get_on(desk, 7, 7)
    assert desk.plan.held and desk.plan.save == 8 and desk.plan.changes[0].is_pending
    get_on(desk, 7, 7)


def test_what_the_planner_says_beside_a_layout_counts_with_it_and_not_with_the_next() -> None:
    """How much is in flight was for its stages; before it begins, nothing changes."""
    desk = ordered(guidance=Guidance(Policy(), 40))
    before = desk.plan.in_flight_max
    saved(desk)
    assert desk.plan.in_flight_max == before != 40
    can_read(desk, 8, *NODES)
    assert desk.plan.restore_step == 8 and desk.plan.in_flight_max == 40
    wishes = desk.machine.placement.wishes
    desk.feed(Ordered(ChangeRun(make_layout(RUN, wishes.changes, ("stages.count=2", "stages.front_servers=1")))))
    assert desk.plan.in_flight_max == 40 and wishes.layout is not None and wishes.layout.guidance is None


def test_a_second_layout_before_the_first_has_begun_changes_nothing() -> None:
    """Two orders may come in one moment, each after a look that found nothing on its way."""
    desk = ordered()
    layout = make_layout(RUN, (), ('stages.cut="4"',))
    desk.feed(Ordered(ChangeRun(layout)))
    assert layout not in desk.machine.placement.wishes.changes and len(desk.plan.changes) == 1


def test_nobody_moves_before_all_have_saved_and_can_read() -> None:
    """Held, saved, then new ledgers from the saved version: no step is thrown away, and the change has its step."""
    desk = ordered()
    before = desk.plan
    saved(desk)
    can_read(desk, 8, "s0", "s1", "s2")
    assert desk.plan.ledger_generation == before.ledger_generation, "one has not saved"
    can_read(desk, 8, "s3")
    plan = desk.plan
    assert plan.ledger_generation == plan.generation > before.generation and plan.restore_step == 8
    assert (plan.held, plan.save, plan.changes[0].from_step) == (False, -1, 8)
    assert plan.server_nodes() == NODES and len(plan.stages) == 1 and len(plan.course.chunks) == 1
    row = next(row for row in reversed(desk.records) if isinstance(row, PlanRow))
    assert not row.goes_back and row.lost_steps == 0 and "laid out anew from step 8" in row.sentence
    assert desk.machine.history.rollback_count == 0 and desk.machine.history.newest_step == 7
    assert desk.machine.status(desk.now)["run"]["stages"] == 1
    assert not desk.machine.placement.review.lost


def test_a_report_on_its_way_is_waited_for() -> None:
    """The new layout may have another decider, who could not report the steps of the one before."""
    desk = ordered()
    saved(desk)
    get_on(desk, 7, 7, unreported=1)
    can_read(desk, 8, *NODES)
    assert desk.plan.held
    get_on(desk, 7, 7)
    can_read(desk, 8, "s0")
    assert not desk.plan.held and desk.plan.restore_step == 8


def test_without_enough_servers_when_it_is_due_the_run_goes_on_as_it_was() -> None:
    """A spare that has gone: nothing is lost, and the log says why."""
    desk = ordered("stages.count=2", "stages.front_servers=2")
    saved(desk)
    can_read(desk, 8, *NODES)
    assert not desk.plan.held and desk.plan.restore_step == -1 and desk.plan.changes == ()
    assert "take 6 servers, and 4 are here" in desk.logged("layout given up")[-1]["reason"]


def test_a_spare_takes_its_place_when_it_says_that_it_can_read_the_checkpoint() -> None:
    """It is told of none: it is asked. One that cannot read it has no place, and the run goes on as it was."""
    for readable in (True, False):
        desk = ordered("stages.count=5", "stages.back_servers=0")
        desk.server("s4")
        desk.answers = False
        asked = len(desk.done)
        saved(desk)
        can_read(desk, 8, *NODES)
        assert desk.plan.held, "the spare has not answered"
        if readable:
            can_read(desk, 8, "s4")
        desk.answer(asked)
        assert not desk.plan.held and (len(desk.plan.stages) == 5) == readable
        if readable:
            assert desk.plan.stage_of(NodeId("s4")) == 4
            assert desk.plan.stage_of(NodeId("s0")) == 0, "who can stay does"


def test_a_server_that_is_away_is_waited_for_and_a_coordinator_that_comes_back_goes_on() -> None:
    """Its plan tells it how far it was."""
    desk = ordered()
    saved(desk)
    can_read(desk, 8, "s0", "s1", "s2")
    desk.feed(LinkDown(NodeId("s3"), "reset"))
    assert desk.plan.held and desk.plan.save == 8
    row = next(row for row in reversed(desk.records) if isinstance(row, PlanRow))
    again = Desk(RUN, stored=_stored(row), generation=50)
    assert again.machine.placement.wishes.lays_out and again.plan.save == 8 and again.plan.held


def _stored(row: PlanRow) -> StoredState:
    """What the database of a coordinator gives back whose newest plan is this."""
    return StoredState(
        plan=row.plan, plan_sentence=row.sentence, data=DataRow(vocabulary=259, data_hash="d", token_count=10**6)
    )


def test_a_run_that_goes_back_keeps_its_layout() -> None:
    """It counts from the checkpoint on: servers stay where they are, and the reference is told so."""
    desk = ordered()
    saved(desk)
    can_read(desk, 8, *NODES)
    generation = desk.plan.ledger_generation
    for node, shard in zip(NODES, range(4), strict=True):
        facts = {"stage": 0, "shard": shard, "version": 8, "held_generation": generation}
        desk.say(node, join(addresses=(f"{node}:1",), checkpoints=(8, 5), **facts))
    desk.feed(Ordered(RollBack(5)))
    assert desk.plan.restore_step == 5 and len(desk.plan.stages) == 1
    assert [(change.key, change.from_step) for change in desk.plan.changes] == [("stages", 5)]
    assert all(desk.sent(node, PlanChanged) for node in NODES)


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (RUN, ("stages.count=3",), "take 6 servers, and 4 are here: start 2 more"),
        (CONFIG, ("stages.count=1",), "checkpoint.folder: each server keeps its parts to itself"),
    ],
)
def test_what_cannot_be_is_said_before_anybody_is_held(config: RunConfig, settings: tuple[str, ...], says: str) -> None:
    """In a sentence that names the key."""
    desk = Desk(config)
    desk.train()
    wanted = changed(config, [make_layout(config, (), settings)])
    linked = {member.peer: member for member in desk.machine.roster.servers()}
    table = desk.machine.placement.table
    assert says in why_no_layout(config, wanted, table, linked, lays_out=False)
    one = msgspec.structs.replace(RUN, stages=msgspec.structs.replace(RUN.stages, count=1))
    assert "another layout is on its way" in why_no_layout(RUN, one, table, linked, lays_out=True)
    linked.pop(NodeId("s3"))
    assert "not while servers are missed: stage 1 back 0" in why_no_layout(RUN, one, table, linked, lays_out=False)
