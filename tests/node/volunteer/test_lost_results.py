"""What a volunteer has of links and places that have ended: results that may be lost are asked for again, leases given
back once, and nothing old stands in the way of the same work given anew."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import Backward, DropGraphs, Forward
from protocol.base.ids import NodeId
from protocol.messages import Forget, InputGradient, LeaseReturned, Ready, StepClosed, VersionReady
from protocol.run.plan import Plan, ServerPlan, StagePlan
from tests.node.setting import Effects, backward, make_plan
from tests.node.volunteer.test_volunteer import BACK, FRONT, Desk, forward, run_backward


@pytest.mark.parametrize("order", ["front last", "back last", "given anew"])
def test_only_a_lease_that_is_still_ours_is_given_back(order: str) -> None:
    """A front whose link has ended has given its leases to others, perhaps to us once more: what we say of the old one
    would take away the new one, and that be held against us."""
    desk = Desk()
    desk.compute_forward(0)
    for server in {"front last": (BACK, FRONT), "back last": (FRONT, BACK), "given anew": (BACK,)}[order]:
        desk.machine.link_down(server)
    for server in desk.servers:
        desk.machine.link_up(server)
        desk.say(server, VersionReady(ledger_generation=1, version=0))
    if order == "given anew":
        desk.say(FRONT, desk.lease(forward(0, 0)))
    effects = desk.say(BACK, Forget(ledger_generation=1, tasks=(forward(0, 0),)))
    assert effects.sent(LeaseReturned) == []


@pytest.mark.parametrize("arrived", [True, False])
def test_an_output_that_may_be_lost_with_a_link_is_not_waited_for(arrived: bool) -> None:
    """The back server says when it is back whether it has it: if not, somebody does it again at once, and not when the
    lease's time is over."""
    desk = Desk()
    desk.compute_forward(0)
    desk.machine.link_down(BACK)
    desk.machine.link_up(BACK)
    desk.take()
    effects = desk.say(BACK, VersionReady(ledger_generation=1, version=0))
    assert effects.sent(Ready, "b0")[0].graphs == (forward(0, 0),)
    if arrived:
        assert len(desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)) == 1
        return
    (returned,) = desk.say(BACK, Forget(ledger_generation=1, tasks=(forward(0, 0),))).sent(LeaseReturned, "f0")
    assert returned.tasks == (forward(0, 0),)


def back_again(desk: Desk, server: NodeId) -> Effects:
    """Its link ends and begins anew, and it takes work."""
    desk.machine.link_down(server)
    desk.machine.link_up(server)
    desk.take()
    return desk.say(server, VersionReady(ledger_generation=1, version=0))


def test_a_result_whose_receiver_was_away_is_asked_for_again() -> None:
    """No copy of it is here. Whoever leased the task has heard of no broken link, so he hears it from us when the one
    that it was sent to takes work again: he knows whether he still waits, and it was seconds, not the lease's time."""
    desk = Desk(1, make_plan(stages=3))
    front, back = desk.servers
    effects = desk.say(front, desk.lease(forward(0, 0, 1), tensors=(desk.tensor(),)))
    (job,) = (effects if effects.jobs(Forward) else desk.load()).jobs(Forward)
    desk.done(job, desk.tensor())
    (running,) = desk.say(back, desk.lease(backward(0, 0, 1), need_input_gradient=True)).jobs(Backward)
    desk.machine.link_down(front)
    assert len(desk.done(running, desk.tensor()).sent(InputGradient)) == 1
    assert [said.tasks for said in back_again(desk, front).sent(LeaseReturned, "b1")] == [(backward(0, 0, 1),)]
    assert back_again(desk, front).sent(LeaseReturned) == [], "it was said once"


def test_an_output_that_is_nowhere_any_more_is_not_waited_for() -> None:
    """The back server has leased the backward, so its graph is used up, and then lost all: nothing that it asks for
    when it is back would say that the forward has to be done again."""
    desk = Desk()
    desk.compute_forward(0)
    run_backward(desk, 0)
    effects = back_again(desk, BACK)
    assert [said.tasks for said in effects.sent(LeaseReturned, "f0")] == [(forward(0, 0),)]


@pytest.mark.parametrize("how", ["its link ended", "leased anew", "step closed"])
def test_a_lease_that_is_over_is_not_given_back_when_its_result_may_be_lost(how: str) -> None:
    """It may be somebody else's now, or ours once more."""
    desk = Desk()
    desk.compute_forward(0)
    run_backward(desk, 0)
    if how == "its link ended":
        back_again(desk, FRONT)
    elif how == "leased anew":
        desk.say(FRONT, desk.lease(forward(0, 0)))
    else:
        desk.say(FRONT, StepClosed(ledger_generation=1, step=0))
    assert back_again(desk, BACK).sent(LeaseReturned, "f0") == []


def test_a_lease_of_a_link_that_has_ended_keeps_no_graph_that_nobody_will_ask_for() -> None:
    """Its back server has started anew, knows nothing of it, and wants the output again."""
    desk = Desk()
    desk.compute_forward(0)
    (running,) = desk.say(FRONT, desk.lease(forward(0, 1))).jobs(Forward)
    desk.say(BACK, desk.lease(backward(0, 0)))
    desk.machine.link_down(BACK)
    desk.machine.link_up(BACK)
    desk.take()
    effects = desk.say(BACK, Forget(ledger_generation=1, tasks=(forward(0, 0),)))
    assert [job.tasks for job in effects.jobs(DropGraphs)] == [(forward(0, 0),)]
    assert [said.tasks for said in effects.sent(LeaseReturned, "f0")] == [(forward(0, 0),)]
    assert desk.done(running, desk.tensor()).jobs(Backward) == []


def test_work_that_a_change_of_servers_undoes_is_given_back_to_those_who_stay() -> None:
    """The disk of a stage's server comes back on another computer, under the same ledgers: a volunteer begins anew with
    that stage, and its other server would wait for what it had given until the lease's time is over."""
    desk = Desk()
    desk.say(FRONT, desk.lease(forward(0, 0)))
    plan = make_plan(generation=2)
    (front, _), others = plan.stages[0].servers, plan.stages[1:]
    moved = StagePlan((front, ServerPlan(NodeId("c0"), "back", ("c0:1",))))
    assert desk.machine.set_plan(msgspec.structs.replace(plan, stages=(moved, *others)), 0)
    (returned,) = desk.take().sent(LeaseReturned, "f0")
    assert returned.tasks == (forward(0, 0),)


def moved_back(desk: Desk) -> Plan:
    """The same ledgers, with the back server's disk on another computer."""
    plan = make_plan(generation=2)
    (front, _), others = plan.stages[0].servers, plan.stages[1:]
    moved = StagePlan((front, ServerPlan(NodeId("c0"), "back", ("c0:1",))))
    return msgspec.structs.replace(plan, stages=(moved, *others))


def test_an_output_for_a_server_that_has_moved_is_done_again() -> None:
    """It was ready while that server was away, and the graph goes with the old place."""
    desk = Desk()
    (running,) = [*desk.say(FRONT, desk.lease(forward(0, 0))).jobs(Forward), *desk.load().jobs(Forward)]
    desk.machine.link_down(BACK)
    desk.done(running, desk.tensor())
    assert desk.machine.set_plan(moved_back(desk), 0)
    assert [said.tasks for said in desk.take().sent(LeaseReturned, "f0")] == [(forward(0, 0),)]


def test_what_runs_at_an_old_place_does_not_stand_for_a_new_lease_of_the_same() -> None:
    """Its front gives the lease that was given back to us at once; the old job's result goes nowhere."""
    desk = Desk()
    (running,) = [*desk.say(FRONT, desk.lease(forward(0, 0))).jobs(Forward), *desk.load().jobs(Forward)]
    desk.servers = (FRONT, NodeId("c0"))
    desk.begin(moved_back(desk))
    desk.say(FRONT, desk.lease(forward(0, 0)))
    desk.load()
    assert [job.task for job in desk.done(running, desk.tensor()).jobs(Forward)] == [forward(0, 0)]
