"""Fronts and backs keep what anybody may have to do again, and say what they hold when a neighbour comes back."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import pytest

from node.machine.jobs import LoadBatch
from node.server.back import BackRole
from node.server.front import FrontRole
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import (
    Activation,
    FetchInput,
    Forget,
    Gradient,
    Held,
    InputAnswer,
    InputGradient,
    Labels,
    Lease,
    Output,
)
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan
from protocol.schedule.policies import Policy, Traversal
from tests.node.setting import TICKET, VOLUNTEER, Effects, activation, backward, make_config, make_context, make_plan

CONFIG = make_config()
LOOPED = Course((Chunk(0, 2, 0), Chunk(2, 4, 1), Chunk(4, 6, 0), Chunk(6, 10, 1)), ((0, 1, 2, 3),))
"""Two parts on each of two stages."""
CLOSED = Course((Chunk(0, 4, 0), Chunk(4, 9, 1), Chunk(9, 10, 0)), ((0, 1, 2),))


def forward(step: int, microbatch: int, stage: int = 0) -> TaskId:
    return TaskId(step, microbatch, stage, "F")


RoleT = TypeVar("RoleT", FrontRole, BackRole)


class Desk(Generic[RoleT]):
    """One role with step 0 open, and a volunteer with slots."""

    def __init__(self, node: str, role: type[RoleT], plan: Plan | None = None, slots: int = 4) -> None:
        self.context = make_context(node, CONFIG, plan)
        self.role: RoleT = role(self.context)
        self.role.open_step(0)
        for pool in self.role.all_pools:
            pool.worker_here(VOLUNTEER, is_server=False)
            pool.add_slots(VOLUNTEER, slots, 64)
        self.opened = self.take()

    def take(self) -> Effects:
        self.role.give_leases(0.0)
        self.role.check()
        return Effects(self.context.out)

    def held(self, peer: str, kind: Any, tasks: tuple[TaskId, ...], complete: bool = True) -> Effects:
        message = Held(ledger_generation=1, kind=kind, tasks=tasks, complete=complete)
        self.role.on_held(NodeId(peer), message)
        return self.take()


def front_desk(node: str) -> Desk[FrontRole]:
    return Desk(node, FrontRole)


def back_desk(node: str, slots: int = 4) -> Desk[BackRole]:
    return Desk(node, BackRole, slots=slots)


def tensors(key: int) -> tuple[TensorRef, ...]:
    return (activation(key, CONFIG),)


def test_stage_0_loads_its_batch_and_sends_the_labels_to_where_the_loss_is() -> None:
    """Each microbatch is loaded once; its forward is leased, its labels go to the last stage's front."""
    desk = front_desk("f0")
    jobs = desk.opened.jobs(LoadBatch)
    assert [job.microbatch for job in jobs] == [0, 1]
    desk.role.batch_loaded(jobs[0], *tensors(1), *tensors(2))
    effects = desk.take()
    assert effects.peers(Labels) == ["f1"]
    assert [lease.tasks for lease in effects.sent(Lease, "v1")] == [(forward(0, 0),)]


def test_the_end_of_a_route_is_one_unit_of_work() -> None:
    """The last stage leases F, L and B together, when input and labels are both there."""
    desk = front_desk("f1")
    task = forward(0, 0, 1)
    desk.role.on_activation(Activation(ledger_generation=1, task=task, tensors=tensors(1)))
    assert desk.take().sent(Lease) == []
    desk.role.on_labels(Labels(ledger_generation=1, task=TaskId(0, 0, 2, "L"), tensors=tensors(2)))
    (lease,) = desk.take().sent(Lease)
    assert lease.tasks == (task, TaskId(0, 0, 2, "L"), backward(0, 0, 1))
    assert lease.need_input_gradient and lease.need_weight_gradient


def test_the_first_input_stays() -> None:
    """A second one for the same task is dropped: everybody downstream has seen the first."""
    desk = front_desk("f1")
    message = Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(1))
    desk.role.on_activation(message)
    desk.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(9)))
    assert desk.take().dropped == [9]


def test_an_input_gradient_goes_on_at_once_and_is_kept() -> None:
    """The stage before gets it; when that one comes back without it, it gets it again."""
    desk = front_desk("f1")
    task = backward(0, 0, 1)
    desk.role.on_input_gradient(
        NodeId("v1"), InputGradient(ledger_generation=1, task=task, ticket=TICKET, tensors=tensors(1))
    )
    assert desk.take().peers(Gradient) == ["b0"]
    assert desk.held("b0", "gradient", (backward(0, 0),)).sent(Gradient) == []
    assert desk.held("b0", "gradient", ()).peers(Gradient) == ["b0"]


def test_a_lost_output_is_asked_for_again() -> None:
    """The back server comes back without it: the forward is leased anew."""
    desk = front_desk("f0")
    for job in desk.opened.jobs(LoadBatch):
        desk.role.batch_loaded(job, *tensors(job.tokens), *tensors(job.labels))
    assert len(desk.take().sent(Lease)) == 2
    both = (forward(0, 0), forward(0, 1))
    assert desk.held("b0", "output", both, complete=False).sent(Lease) == []
    again = desk.held("b0", "output", (forward(0, 1),)).sent(Lease)
    assert [lease.tasks for lease in again] == [(forward(0, 0),)]


def test_who_has_to_recompute_gets_the_input_or_hears_that_it_is_gone() -> None:
    """An input of an open step is answered with the tensor, another one without."""
    desk = front_desk("f1")
    desk.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(1)))
    for task in (forward(0, 0, 1), forward(0, 1, 1), forward(7, 0, 1)):
        desk.role.on_fetch_input(VOLUNTEER, FetchInput(ledger_generation=1, task=task, ticket=TICKET))
    assert [len(answer.tensors) for answer in desk.take().sent(InputAnswer)] == [1, 0, 0]


def test_a_closed_step_lets_go_of_every_tensor() -> None:
    """Inputs, labels and gradients of the step are dropped, once."""
    desk = front_desk("f1")
    desk.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(1)))
    desk.role.on_labels(Labels(ledger_generation=1, task=TaskId(0, 0, 2, "L"), tensors=tensors(2)))
    desk.role.on_input_gradient(
        NodeId("v1"), InputGradient(ledger_generation=1, task=backward(0, 0, 1), ticket=TICKET, tensors=tensors(3))
    )
    desk.context.closed = 0
    desk.role.close_step(0)
    assert sorted(desk.take().dropped) == [1, 2, 3]


def output(microbatch: int, key: int) -> Output:
    return Output(ledger_generation=1, task=forward(0, microbatch), ticket=TICKET, tensors=tensors(key))


def gradient(microbatch: int, key: int) -> Gradient:
    return Gradient(ledger_generation=1, task=backward(0, microbatch), tensors=tensors(key))


def test_an_output_goes_on_at_once_and_its_maker_gets_the_backward() -> None:
    """The next stage's front gets the activation; the backward goes to who has the graph, without a slot."""
    desk = back_desk("b0", slots=0)
    desk.role.on_output(VOLUNTEER, output(0, 1))
    effects = desk.take()
    assert effects.peers(Activation) == ["f1"] and effects.peers(Held) == ["f0"]
    desk.role.on_gradient(gradient(0, 2))
    (lease,) = desk.take().sent(Lease)
    assert lease.tasks == (backward(0, 0),) and not lease.recompute


def test_if_the_maker_is_gone_another_one_recomputes() -> None:
    """The lease says so, and names the front that has the input."""
    desk = back_desk("b0")
    other = NodeId("v2")
    desk.role.on_output(VOLUNTEER, output(0, 1))
    desk.role.pool.worker_gone(VOLUNTEER, 0.0)
    desk.role.pool.worker_here(other, is_server=False)
    desk.role.pool.add_slots(other, 1, 64)
    desk.role.on_gradient(gradient(0, 2))
    (lease,) = desk.take().sent(Lease, "v2")
    assert lease.recompute and lease.front == "f0"


def test_a_graph_that_nobody_will_ask_for_is_forgotten() -> None:
    """The second maker of an output keeps a graph for nothing: it is told to forget it, and so is who says it later."""
    desk = back_desk("b0")
    other = NodeId("v2")
    desk.role.pool.worker_here(other, is_server=False)
    desk.role.on_output(VOLUNTEER, output(0, 1))
    assert desk.take().sent(Forget) == []
    desk.role.on_output(other, output(0, 9))
    effects = desk.take()
    assert effects.peers(Forget) == ["v2"] and effects.dropped == [9]
    desk.role.on_graphs(other, (forward(0, 0), forward(0, 1), forward(5, 0)))
    assert desk.take().sent(Forget)[0].tasks == (forward(0, 0), forward(0, 1), forward(5, 0))


def test_a_neighbour_without_its_input_gets_it_again() -> None:
    """The next stage's front comes back: what it lacks is sent, what it has is not."""
    desk = back_desk("b0")
    for microbatch in (0, 1):
        desk.role.on_output(VOLUNTEER, output(microbatch, microbatch + 1))
    desk.take()
    effects = desk.held("f1", "input", (forward(0, 1, 1),))
    assert [message.task for message in effects.sent(Activation)] == [forward(0, 0, 1)]


def test_what_two_neighbours_have_lost_one_after_the_other_is_done_again() -> None:
    """We lost a result and trusted in the neighbour that had it; then that one loses it too: nobody has it any more."""
    front = front_desk("f1")
    front.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(1)))
    front.role.on_labels(Labels(ledger_generation=1, task=TaskId(0, 0, 2, "L"), tensors=tensors(2)))
    front.role.ends.covered((TaskId(0, 0, 2, "L"), backward(0, 0, 1)), VOLUNTEER)
    assert front.held("b0", "gradient", (backward(0, 0),), complete=False).sent(Lease) == []
    (lease,) = front.held("b0", "gradient", ()).sent(Lease)
    assert lease.need_input_gradient and not lease.need_weight_gradient
    back = back_desk("b0")
    back.held("f1", "input", (forward(0, 0, 1),), complete=False)
    effects = back.held("f1", "input", ())
    assert [(held.kind, held.tasks, held.complete) for held in effects.sent(Held, "f0")] == [("output", (), True)]


def test_nobody_keeps_a_graph_for_an_output_that_has_to_be_made_again() -> None:
    """This server has started again, and counted on a neighbour that then lost the output too. A device with room for
    one graph kept that of a later step, and the forwards of an earlier one, which all waited for, were never asked for:
    nothing but a link's end would have ended that (few kinds 705410)."""
    desk = back_desk("b0")
    desk.held("f1", "input", (forward(0, 0, 1),), complete=False)
    desk.role.on_graphs(VOLUNTEER, (forward(0, 0),))
    assert desk.take().sent(Forget) == []
    effects = desk.held("f1", "input", ())
    assert [said.tasks for said in effects.sent(Forget, VOLUNTEER)] == [(forward(0, 0),)]


def test_a_ready_neighbour_is_told_all_that_is_held() -> None:
    """Outputs to the own front, output gradients to the next stage's."""
    desk = back_desk("b0")
    desk.role.on_output(VOLUNTEER, output(0, 1))
    desk.role.on_gradient(gradient(0, 2))
    desk.take()
    desk.role.sync(NodeId("f0"))
    desk.role.sync(NodeId("f1"))
    told = [(message.kind, message.tasks, message.complete) for message in desk.take().sent(Held)]
    assert told == [("output", (forward(0, 0),), True), ("gradient", (backward(0, 0),), True)]


def closed_desk() -> Desk[FrontRole]:
    """The front of stage 0, where the routes of a run with tied embeddings begin and end."""
    return Desk("f0", FrontRole, msgspec.structs.replace(make_plan(), course=CLOSED))


def test_a_route_that_ends_where_it_began_needs_its_labels_from_nobody() -> None:
    """Whether the end's input or the data comes first (after a restart: the input), the end becomes work."""
    for data_first in (True, False):
        desk = closed_desk()
        job = desk.opened.jobs(LoadBatch)[0]
        end = Activation(ledger_generation=1, task=forward(0, 0, 2), tensors=tensors(5))
        for data in (data_first, not data_first):
            if data:
                desk.role.batch_loaded(job, *tensors(1), *tensors(2))
            else:
                desk.role.on_activation(end)
        effects = desk.take()
        assert effects.sent(Labels) == []
        leased = {lease.tasks for lease in effects.sent(Lease)}
        assert leased == {(forward(0, 0),), (forward(0, 0, 2), TaskId(0, 0, 3, "L"), backward(0, 0, 2))}


@pytest.mark.parametrize("deepest_first", [False, True])
def test_a_front_gives_forwards_as_the_plans_order_has_it(deepest_first: bool) -> None:
    """Of the visits of a stage with two parts the first or the last goes first on the line; older microbatches of each
    go first in any case."""
    plan = msgspec.structs.replace(
        make_plan(), course=LOOPED, order=Policy(forward=Traversal(deepest_first=deepest_first))
    )
    desk = Desk("f0", FrontRole, plan)
    for job in reversed(desk.opened.jobs(LoadBatch)):
        desk.role.batch_loaded(job, *tensors(10 + job.microbatch), *tensors(20 + job.microbatch))
    for microbatch in (1, 0):
        task = forward(0, microbatch, 2)
        desk.role.on_activation(Activation(ledger_generation=1, task=task, tensors=tensors(5 + microbatch)))
    given = [(lease.tasks[0].position, lease.tasks[0].microbatch) for lease in desk.take().sent(Lease)]
    assert given == [(position, m) for position in ((2, 0) if deepest_first else (0, 2)) for m in (0, 1)]


def test_ends_and_forwards_do_not_share_slots() -> None:
    """With all slots for forwards spent the end of a route is still given away: it is what frees their graphs."""
    desk = closed_desk()
    for pool in desk.role.pools.values():
        pool.worker_gone(VOLUNTEER, 0.0)
        pool.worker_here(VOLUNTEER, is_server=False)
    job = desk.opened.jobs(LoadBatch)[0]
    desk.role.batch_loaded(job, *tensors(1), *tensors(2))
    desk.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 2), tensors=tensors(5)))
    assert [lease.tasks[0] for lease in desk.take().sent(Lease)] == [forward(0, 0, 2)]


def test_who_asks_for_an_input_that_is_still_to_come_gets_it_then() -> None:
    """The answer says that it is not here; the input follows, once, to everybody who asked."""
    desk = front_desk("f1")
    for _ in range(2):
        fetch = FetchInput(ledger_generation=1, task=forward(0, 0, 1), ticket=TICKET)
        desk.role.on_fetch_input(VOLUNTEER, fetch)
    assert [answer.tensors for answer in desk.take().sent(InputAnswer)] == [(), ()]
    desk.role.on_activation(Activation(ledger_generation=1, task=forward(0, 0, 1), tensors=tensors(5)))
    assert [answer.tensors for answer in desk.take().sent(InputAnswer, "v1")] == [tensors(5)]
