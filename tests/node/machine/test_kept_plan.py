"""A node goes on by the plan on its disk when no coordinator answers, and never by one older than it has followed."""

from __future__ import annotations

import msgspec

from node.machine.jobs import LoadSnapshot, SetUpServer
from node.machine.kept_plan import COORDINATOR_S, DIALS, WELCOME_S, KeptPlan
from node.machine.records import ShardStarted, SnapshotWritten, StateLost
from protocol.base.machine import Dial, Exit, LinkDown, LinkUp, Persist
from protocol.messages import PlanChanged, Welcome
from protocol.run.plan import Plan
from tests.node.setting import make_plan
from tests.node.test_core import CONFIG, COORDINATOR, Desk, started


def kept(plan: Plan | None = None, stage: int = 1) -> KeptPlan:
    return KeptPlan(config=CONFIG, vocabulary=259, plan=plan or make_plan(), stage=stage, reason="because")


def begun(generation: int = 1) -> list[ShardStarted | SnapshotWritten]:
    """The disk of b1: its ledgers began, and there is a snapshot."""
    start = msgspec.structs.replace(started(generation=generation), stage=1, config_hash=CONFIG.config_hash())
    return [start, SnapshotWritten(ledger_generation=generation, step=0, file="snapshot-0", digest=b"d")]


def test_a_server_restarts_without_its_coordinator() -> None:
    """After a few seconds without a link it restores its shard and dials its fellows; the run goes on."""
    desk = Desk("b1", kept=kept(), records=begun())
    assert not desk.jobs(SetUpServer)
    desk.feed(LinkDown(COORDINATOR, "refused"))
    desk.effects = list(desk.machine.wake(COORDINATOR_S))
    assert len(desk.jobs(SetUpServer)) == len(desk.jobs(LoadSnapshot)) == 1
    assert {dial.peer for dial in desk.of(Dial)} >= {"f1"}
    assert desk.machine.server is not None and desk.machine.server.context.generation == 1


def test_a_coordinator_whose_port_is_closed_is_not_waited_for() -> None:
    """Its computer answers each dial at once that nobody is there: the third time the server goes on, half a second
    after its start, and its stage has not waited five."""
    desk = Desk("b1", kept=kept(), records=begun())
    for number in range(DIALS):
        assert desk.machine.plan is None and not desk.jobs(SetUpServer)
        desk.feed(LinkDown(COORDINATOR, "refused"), now=0.2 * number)
    now = desk.machine.wake_at()
    assert now == 0.2 * (DIALS - 1)
    desk.effects = list(desk.machine.wake(now))
    assert len(desk.jobs(SetUpServer)) == 1


def test_a_volunteer_restarts_without_its_coordinator() -> None:
    """It knows its stage, and dials that stage's servers."""
    desk = Desk("v1", role="volunteer", kept=kept())
    desk.effects = list(desk.machine.wake(COORDINATOR_S))
    assert {dial.peer for dial in desk.of(Dial)} >= {"f1", "b1"} and desk.machine.volunteer is not None


def test_a_coordinator_that_is_there_is_waited_for() -> None:
    """It has let us in, and may know that this disk has lost something: while it is linked, nothing begins without its
    word."""
    desk = Desk("b1", kept=kept(), records=begun())
    desk.join()
    desk.effects = list(desk.machine.wake(10 * COORDINATOR_S))
    assert not desk.jobs(SetUpServer)
    desk.feed(LinkDown(COORDINATOR, "reset"), now=100.0)
    desk.effects = list(desk.machine.wake(100.0 + COORDINATOR_S))
    assert len(desk.jobs(SetUpServer)) == 1


def test_a_coordinator_that_does_not_know_the_run_is_not_waited_for() -> None:
    """Its database is old or lost, and it lets nobody in before all servers are back, which may be for ever: after a
    while the disk's plan counts, as if the coordinator were away; what it says later is newer."""
    desk = Desk("b1", kept=kept(), records=begun())
    desk.feed(LinkUp(COORDINATOR, "coordinator"))
    desk.effects = list(desk.machine.wake(WELCOME_S - 0.1))
    assert not desk.jobs(SetUpServer)
    desk.effects = list(desk.machine.wake(WELCOME_S))
    assert len(desk.jobs(SetUpServer)) == 1 and desk.machine.server is not None
    adopted = make_plan(generation=4)
    desk.hear(Welcome(membership=b"m", config=CONFIG, config_hash=CONFIG.config_hash(), vocabulary=259))
    desk.plan(msgspec.structs.replace(adopted, ledger_generation=1), stage=1)
    assert desk.machine.plan is not None and desk.machine.plan.generation == 4
    assert desk.machine.server.context.generation == 1 and not desk.of(Exit)


def test_a_disk_that_lost_the_key_of_its_leases_gives_its_state_up_and_ends_nothing() -> None:
    """Without a coordinator nobody can send the run back: it waits with a sentence instead of crashing in a loop."""
    start = msgspec.structs.replace(begun()[0], shard=0)
    desk = Desk("f1", kept=kept(stage=0), records=[msgspec.structs.replace(start, stage=0), begun()[1]])
    desk.effects = list(desk.machine.wake(COORDINATOR_S))
    assert desk.machine.server is None and "the state here is lost" in desk.machine.waiting_for()
    assert [effect.record for effect in desk.of(Persist) if isinstance(effect.record, StateLost)]


def test_who_has_given_up_its_state_and_computes_does_not_dial_itself() -> None:
    """The link to itself took the place of what it says to itself without one, and went with the next plan: its device
    waited for its own part of the parameters (seed 610581 of the hunt)."""
    desk = Desk("b1", kept=kept(), records=begun())
    desk.effects = list(desk.machine.wake(COORDINATOR_S))
    roles = desk.machine._roles
    assert set(roles.peers()) >= {"f1"} and roles.volunteer is not None
    roles.lose_state("the disk has lost it")
    assert set(roles.peers()) == {"f1"}


def test_a_server_that_never_began_its_ledgers_there_waits() -> None:
    """Its disk is new, or of earlier ledgers: what the others have only the coordinator knows."""
    for records in ([], begun(generation=0)):
        desk = Desk("b1", kept=kept(), records=records)
        desk.effects = list(desk.machine.wake(COORDINATOR_S))
        assert not desk.jobs(SetUpServer) and desk.machine.plan is None


def test_an_older_plan_is_not_kept() -> None:
    """A coordinator that was thought dead tells its plan: the disk stays with the newer one."""
    newer = kept(make_plan(generation=5))
    old = PlanChanged(plan=make_plan(generation=4), stage=0, reason="an old coordinator")
    assert newer.after(old) == newer
    assert newer.after(PlanChanged(plan=make_plan(generation=6), stage=0, reason="new")).plan.generation == 6


def test_another_plan_of_the_same_generation_is_refused() -> None:
    """Two coordinators from one backup: nobody follows both."""
    desk = Desk("b1")
    desk.join()
    plan = make_plan(generation=3)
    desk.plan(plan, stage=1)
    desk.plan(msgspec.structs.replace(plan, in_flight_max=9), stage=1)
    assert desk.machine.plan == plan
