"""Split backward at a volunteer: the input gradient goes out first, the weight gradient is owed until it is done."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.jobs import (
    Backward,
    DropAccumulators,
    DropGraphs,
    Forward,
    RouteEnd,
    TakeGradient,
    WeightGradient,
)
from protocol.base.ids import TaskId
from protocol.messages import InputGradient, Lease, LeaseReturned, StepClosed, Summed
from tests.node.setting import Effects, backward, make_config, make_plan
from tests.node.volunteer import test_volunteer
from tests.node.volunteer.test_volunteer import Desk, forward

STAGE = 1
CONFIG = make_config(count=3, microbatches=4)
SPLIT = msgspec.structs.replace(CONFIG, compute=msgspec.structs.replace(CONFIG.compute, split_backward=True))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A volunteer of the middle stage of three, in a run that splits its backwards."""
    monkeypatch.setattr(test_volunteer, "CONFIG", SPLIT)
    return Desk(STAGE, make_plan(stages=3))


def lease_forward(desk: Desk, microbatch: int, step: int = 0) -> Effects:
    return desk.say(desk.servers[0], desk.lease(forward(step, microbatch, STAGE), tensors=(desk.tensor(),)))


def go_forward(desk: Desk, microbatch: int) -> None:
    effects = lease_forward(desk, microbatch)
    effects = effects if effects.jobs(Forward) else desk.load()
    desk.done(effects.jobs(Forward)[0], desk.tensor())


def ask_back(desk: Desk, microbatch: int) -> Backward:
    """The backward is leased, and begins."""
    lease = desk.lease(backward(0, microbatch, STAGE), need_input_gradient=True)
    (job,) = desk.say(desk.servers[1], lease).jobs(Backward)
    assert job.weights_later
    return job


def go_back(desk: Desk, microbatch: int = 0) -> Effects:
    """A forward, and then the first part of its backward."""
    go_forward(desk, microbatch)
    return desk.done(ask_back(desk, microbatch), desk.tensor())


def test_the_input_gradient_goes_out_before_the_weight_gradient_is_begun(desk: Desk) -> None:
    """It is sent with the outcome of the first part, and the lease's clock stops; then, since nothing else is ready,
    the second part begins."""
    effects = go_back(desk)
    assert effects.peers(InputGradient) == ["f1"]
    assert [s.tasks for s in effects.sent(Summed)] == [(backward(0, 0, STAGE),)]
    (job,) = effects.jobs(WeightGradient)
    assert job.task == backward(0, 0, STAGE)


def test_no_contribution_is_cut_before_all_that_it_names_is_in_the_sum(desk: Desk) -> None:
    """The tail of the step has come while a weight gradient is owed: the sum leaves when that is done, and names it."""
    (job,) = go_back(desk).jobs(WeightGradient)
    assert not desk.flush(0, {desk.servers[0]: 1, desk.servers[1]: 1}).jobs(TakeGradient)
    desk.machine.drain(0.0)
    assert not desk.take().jobs(TakeGradient) and not desk.machine.drained
    assert len(desk.done(job).jobs(TakeGradient)) == 1
    assert desk.machine.gradients.tasks_in_sums() == [backward(0, 0, STAGE)]


def test_what_others_wait_for_goes_before_what_is_owed_and_an_older_step_before_a_newer(desk: Desk) -> None:
    """A forward that waits is next, not the weight gradient; but no work of the next step goes before it."""
    go_forward(desk, 0)
    first = ask_back(desk, 0)
    lease_forward(desk, 1)
    lease_forward(desk, 0, step=1)
    effects = desk.done(first, desk.tensor())
    (job,) = effects.jobs(Forward)
    assert job.task == forward(0, 1, STAGE) and not effects.jobs(WeightGradient)
    effects = desk.done(job, desk.tensor())
    assert not effects.jobs(Forward) and len(effects.jobs(WeightGradient)) == 1


def test_a_device_that_is_full_finishes_what_is_owed_first(desk: Desk) -> None:
    """A graph lives until both parts are done, so it counts among those that fit."""
    desk.machine._room.set_up(2)
    go_forward(desk, 0)
    go_forward(desk, 1)
    first = ask_back(desk, 0)
    lease_forward(desk, 2)
    effects = desk.done(first, desk.tensor())
    assert len(effects.jobs(WeightGradient)) == 1 and not effects.jobs(Forward)


def test_a_closed_step_takes_what_was_owed_with_it(desk: Desk) -> None:
    """Nobody needs it: the device forgets the graph."""
    go_forward(desk, 0)
    first = ask_back(desk, 0)
    lease_forward(desk, 1)
    desk.done(first, desk.tensor())
    effects = desk.say(desk.servers[0], StepClosed(ledger_generation=1, step=0))
    assert [job.tasks for job in effects.jobs(DropGraphs)] == [(backward(0, 0, STAGE),)]
    assert effects.jobs(DropAccumulators)


def test_a_device_that_fails_at_a_weight_gradient_loses_the_sum_and_says_so(desk: Desk) -> None:
    """The sum may hold half of it: all its tasks go back."""
    (job,) = go_back(desk, 0).jobs(WeightGradient)
    desk.done(job)
    (second,) = go_back(desk, 1).jobs(WeightGradient)
    desk.machine.failed(second, "the driver crashed", 0.0)
    returned = [task for said in desk.take().sent(LeaseReturned, "b1") for task in said.tasks]
    assert sorted(returned) == [backward(0, 0, STAGE), backward(0, 1, STAGE)]
    assert not desk.machine.gradients.tasks_in_sums()


def test_a_lost_device_gives_back_what_it_owed(desk: Desk) -> None:
    """The whole backward is somebody's again: what was sent of it helps nobody to its weight gradient."""
    go_back(desk, 0)
    desk.machine.device_lost("it was unplugged")
    returned = [task for said in desk.take().sent(LeaseReturned, "b1") for task in said.tasks]
    assert returned == [backward(0, 0, STAGE)]


def test_a_new_link_hears_of_what_is_owed(desk: Desk) -> None:
    """Otherwise its server would give the task to somebody else, and one of two contributions would be refused."""
    go_back(desk, 0)
    desk.machine.link_down(desk.servers[1])
    desk.machine.link_up(desk.servers[1])
    assert [said.tasks for said in desk.take().sent(Summed, "b1") if said.complete] == [(backward(0, 0, STAGE),)]


def test_route_ends_are_owed_two_at_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds the gradient of a head: the third waits for one of them."""
    monkeypatch.setattr(test_volunteer, "CONFIG", SPLIT)
    desk = Desk(2, make_plan(stages=3))
    effects = desk.say(desk.servers[0], end_of(desk, 0))
    effects = effects if effects.jobs(RouteEnd) else desk.load()
    for microbatch in (1, 2):
        desk.say(desk.servers[0], end_of(desk, microbatch))
        effects = desk.done(effects.jobs(RouteEnd)[0], (2.5, desk.tensor()))
    assert not effects.jobs(RouteEnd) and len(effects.jobs(WeightGradient)) == 1
    assert len(desk.done(effects.jobs(WeightGradient)[0]).jobs(RouteEnd)) == 1


def end_of(desk: Desk, microbatch: int) -> Lease:
    tasks = (forward(0, microbatch, 2), TaskId(0, microbatch, 3, "L"), backward(0, microbatch, 2))
    return desk.lease(*tasks, need_input_gradient=True)
