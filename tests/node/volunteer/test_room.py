"""A device that fails: it drops what it can, rests, says so once, and never stays idle for ever."""

from __future__ import annotations

from node.machine.jobs import Backward, DropGraphs, Forward, Job, SetUpDevice, TakeGradient
from node.volunteer.room import REST_MOST_S, REST_S, Room
from protocol.base.ids import NodeId
from protocol.messages import FetchInput, LeaseReturned, Ready, VersionReady
from tests.node.setting import Effects, backward, make_plan
from tests.node.volunteer.test_volunteer import BACK, FRONT, Desk, forward

FULL = "CUDA out of memory. Tried to allocate 20.00 MiB"


def desk_with_graphs(count: int = 2) -> Desk:
    """A volunteer that holds the graphs of some forwards."""
    desk = Desk()
    desk.load()
    for microbatch in range(count):
        desk.compute_forward(microbatch)
    return desk


def fail(desk: Desk, job: Job, reason: str) -> Effects:
    desk.machine.failed(job, reason, desk.now)
    return desk.take()


def test_out_of_memory_drops_graphs_and_takes_fewer_after_a_rest() -> None:
    """The task goes back, graphs go, nothing is asked for until the rest is over, and then less than before."""
    desk = desk_with_graphs(1)
    (job,) = desk.say(FRONT, desk.lease(forward(0, 1))).jobs(Forward)
    effects = fail(desk, job, FULL)
    assert [dropped.tasks for dropped in effects.jobs(DropGraphs)] == [(forward(0, 0),)]
    assert {message.tasks for message in effects.sent(LeaseReturned)} == {(forward(0, 1),)}
    assert not effects.sent(Ready) and "rests" in desk.machine.waiting_for()
    desk.now = desk.machine.wake_at() or 0.0
    assert desk.now == REST_S
    desk.machine.wake(desk.now)
    asked = [message.slots for message in desk.take().sent(Ready)]
    assert asked and "rests" not in desk.machine.waiting_for()


def test_a_backward_whose_graph_was_dropped_is_recomputed() -> None:
    """A lease that counted on the graph fetches the input instead, and runs after the rest."""
    desk = desk_with_graphs(1)
    (running,) = desk.say(FRONT, desk.lease(forward(0, 1))).jobs(Forward)
    assert not desk.say(BACK, desk.lease(backward(0, 0))).sent(FetchInput)
    effects = fail(desk, running, FULL)
    assert [message.task for message in effects.sent(FetchInput)] == [forward(0, 0)]
    assert not effects.jobs(Backward)


def test_two_fronts_together_never_fill_more_than_the_device_holds() -> None:
    """Each may give as many forwards as fit; what is too much waits for a backward. Done again is what has its graph
    here even when all is full: it needs no more room than it has."""
    desk, other = Desk(plan=make_plan(fronts=2)), NodeId("g0")
    desk.servers = (FRONT, other, BACK)
    desk.machine.link_up(other)
    desk.say(other, VersionReady(ledger_generation=1, version=0))
    desk.load()
    desk.machine._room.set_up(1)
    (first,) = desk.say(FRONT, desk.lease(forward(0, 0), back=BACK)).jobs(Forward)
    desk.done(first, desk.tensor())
    assert not desk.say(other, desk.lease(forward(0, 1), front=other, back=BACK)).jobs(Forward)
    (again,) = desk.say(FRONT, desk.lease(forward(0, 0), back=BACK)).jobs(Forward)
    assert not desk.done(again, desk.tensor()).jobs(Forward)
    (back,) = desk.say(BACK, desk.lease(backward(0, 0), back=BACK)).jobs(Backward)
    assert [job.task for job in desk.done(back).jobs(Forward)] == [forward(0, 1)]


def test_a_failed_set_up_is_tried_again() -> None:
    """With longer rests each time, and with the reason on every screen meanwhile."""
    desk = Desk()
    desk.machine.set_plan(make_plan(ledgers=2), 0)
    (job,) = desk.take().jobs(SetUpDevice)
    waited = []
    for _ in range(3):
        fail(desk, job, "out of memory: this stage needs 900 MB of the device")
        assert "needs 900 MB" in desk.machine.waiting_for()
        wake = desk.machine.wake_at()
        assert wake is not None
        waited.append(wake - desk.now)
        desk.now = wake
        desk.machine.wake(desk.now)
        (job,) = desk.take().jobs(SetUpDevice)
    assert waited == [REST_S, 2 * REST_S, 4 * REST_S]


def test_a_sum_that_cannot_be_handed_over_goes_back() -> None:
    """Its tasks are given back to the servers, which lease them anew; nothing waits for it."""
    desk = desk_with_graphs(1)
    (job,) = desk.say(BACK, desk.lease(backward(0, 0))).jobs(Backward)
    desk.done(job)
    (take,) = desk.flush(0, {FRONT: 1, BACK: 1}).jobs(TakeGradient)
    effects = fail(desk, take, "the device is gone")
    assert backward(0, 0) in {task for message in effects.sent(LeaseReturned) for task in message.tasks}
    assert desk.machine.gradients.empty


def test_rests_double_up_to_a_bound_and_a_success_forgets_them() -> None:
    """And a device always takes one graph at the least."""
    room = Room()
    room.set_up(3)
    rests = [room.failed(FULL, 3, 0.0) for _ in range(12)]
    assert rests[:3] == [REST_S, 2 * REST_S, 4 * REST_S] and rests[-1] == REST_MOST_S
    assert room.graphs_max == 1
    room.check()
    room.succeeded()
    assert room.failed("cable", 1, 0.0) == REST_S and room.graphs_max == 1
