"""A huge activation steers no step: it is computed again, and whoever made it up is blamed."""

from __future__ import annotations

import math
from itertools import count

import pytest

from node.machine.jobs import MeasureResult
from node.server.doubts import REPEATS_MAX, SAMPLES_MIN
from node.server.sizes import VALUE_FIRST_MAX, Sizes
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Activation, Allowance, Forget, Gradient, InputGradient, Output
from tests.node.server.test_tickets import CONFIG, Desk
from tests.node.setting import VOLUNTEER, Effects, activation, backward

OTHER = NodeId("v2")
TASK = TaskId(0, 0, 1, "F")


def usual(size: float = 1.0) -> Sizes:
    """Sizes that have seen results of about this one."""
    sizes = Sizes("its output")
    for number in range(2 * SAMPLES_MIN):
        task = TaskId(0, number + 1, 1, "F")
        assert sizes.look(task, VOLUNTEER, 1, size * (1 + number % 3), trusted=False) == ""
        assert sizes.accepted(task, VOLUNTEER, size * (1 + number % 3)) == ()
    return sizes


@pytest.mark.parametrize("size", [1e3, 1e37, math.inf])
def test_an_absurd_result_waits_for_a_second_opinion(size: float) -> None:
    """A usual one shows that it was false; its like from another node, that the run is like that: it diverges."""
    sizes = usual()
    assert "beyond" in sizes.look(TASK, VOLUNTEER, 1, size, trusted=False)
    assert sizes.look(TASK, OTHER, 2, 2.0, trusted=False) == ""
    assert sizes.accepted(TASK, OTHER, 2.0) == (VOLUNTEER,)
    sizes = usual()
    assert sizes.look(TASK, VOLUNTEER, 1, size, trusted=False)
    assert sizes.look(TASK, OTHER, 2, 1.01 * size, trusted=False) == ""
    assert sizes.accepted(TASK, OTHER, 1.01 * size) == ()


def test_where_servers_compute_no_member_confirms_another() -> None:
    """Nor itself with another lease: a server's result is used, and tells who lied."""
    sizes = usual()
    for fence, node in enumerate((VOLUNTEER, OTHER, VOLUNTEER, OTHER)):
        assert sizes.look(TASK, node, fence, math.inf, trusted=False, servers_judge=True)
    assert sizes.look(TASK, NodeId("f0"), 9, 1.0, trusted=True, servers_judge=True) == ""
    assert sizes.accepted(TASK, NodeId("f0"), 1.0) == (VOLUNTEER, OTHER)


def test_saying_it_again_does_not_help() -> None:
    """Only another lease counts as another try; who is alone is believed at the second, as with gradients."""
    sizes = usual()
    assert all(sizes.look(TASK, VOLUNTEER, 1, 1e9, trusted=False) for _ in range(5))
    answers = [sizes.look(TASK, VOLUNTEER, fence, 1e9, trusted=False) for fence in range(2, 1 + REPEATS_MAX)]
    assert all(answers[:-1]) and answers[-1] == ""


def test_a_server_of_the_stage_is_believed_and_so_is_what_nobody_measured() -> None:
    """Whatever the size; and before anything is known, all but what no model gives."""
    assert usual().look(TASK, NodeId("f0"), 1, math.inf, trusted=True) == ""
    assert usual().look(TASK, VOLUNTEER, 1, 0.0, trusted=False) == ""
    young = Sizes("its output")
    assert young.look(TASK, VOLUNTEER, 1, 0.1 * VALUE_FIRST_MAX, trusted=False) == ""
    assert young.look(TASK, VOLUNTEER, 1, 10 * VALUE_FIRST_MAX, trusted=False)


def test_every_place_of_the_model_has_its_own_measure_and_forgets_closed_steps() -> None:
    """Deep in a model values are larger; what was put aside goes with its step."""
    sizes = usual(size=1.0)
    deep = TaskId(0, 0, 5, "F")
    assert sizes.look(deep, VOLUNTEER, 1, 500.0, trusted=False) == ""
    assert sizes.look(TASK, VOLUNTEER, 1, 500.0, trusted=False)
    sizes.close_step(0)
    assert sizes.accepted(TASK, OTHER, 1.0) == ()


def test_a_server_passes_a_huge_output_on_to_nobody() -> None:
    """It is dropped, and the sender told that nobody will ask for its backward; what somebody else computes goes on to
    the next stage, and the first one gets nothing for a while, with the reason."""
    desk = Desk("b0")
    desk.server.link_up(OTHER, "volunteer", 0.0)
    desk.take()
    task, keys = TaskId(0, 0, 0, "F"), count(9)
    for node, fence, size in ((VOLUNTEER, 3, 1e37), (VOLUNTEER, 3, 1e37), (OTHER, 4, 1.0)):
        key = next(keys)
        ticket = desk.ticket(task, node, fence)
        message = Output(ledger_generation=1, task=task, ticket=ticket, tensors=(activation(key, CONFIG),))
        desk.server.handle(node, message, 1.0, size)
        effects = desk.take()
        if node == VOLUNTEER:
            assert effects.sent(Activation) == [] and effects.dropped == [key]
            assert effects.sent(Forget, VOLUNTEER)[0].tasks == (task,)
        else:
            assert len(effects.sent(Activation)) == 1
            assert [a.leases_max for a in effects.sent(Allowance, VOLUNTEER)] == [0]
            assert effects.sent(Allowance, OTHER) == []


@pytest.mark.parametrize(("true_size", "blamed"), [(1.0, True), (3e4, False), (math.inf, False)])
def test_what_a_server_makes_instead_is_measured_before_it_judges(true_size: float, blamed: bool) -> None:
    """It goes on at once, and its bytes are kept until the lane has said how large it is: only then the doubted one was
    false or was not. Honest volunteers were left out for ten minutes over every result ten times the usual one."""
    desk, server = Desk("b0"), NodeId("f0")
    desk.server.context.computing[server] = None
    task = TaskId(0, 0, 0, "F")

    def bring(node: NodeId, fence: int, key: int, size: float) -> Effects:
        ticket = desk.ticket(task, node, fence)
        message = Output(ledger_generation=1, task=task, ticket=ticket, tensors=(activation(key, CONFIG),))
        desk.server.handle(node, message, 1.0, size)
        return desk.take()

    assert bring(VOLUNTEER, 3, 9, 3e4 if true_size < math.inf else math.inf).sent(Activation) == []
    effects = bring(server, 4, 10, 0.0)
    (measure,) = effects.jobs(MeasureResult)
    assert len(effects.sent(Activation)) == 1 and effects.sent(Allowance) == []
    assert measure.result.key not in effects.dropped and (measure.task, measure.node) == (task, server)
    desk.server.computed(measure, true_size, 2.0)
    effects = desk.take()
    assert [said.leases_max for said in effects.sent(Allowance, VOLUNTEER)] == [0] * blamed
    assert effects.dropped == [measure.result.key]


def test_bytes_that_hold_no_numbers_judge_nobody() -> None:
    """What a server sent cannot be decoded: the work goes on, and its copy is let go of."""
    desk = Desk("b0")
    job = MeasureResult(TaskId(0, 0, 0, "F"), "F", NodeId("f0"), activation(9, CONFIG))
    assert desk.server.failed(job, "a tensor that nobody can decode", 1.0)
    assert desk.take().dropped == [9]


def test_a_server_passes_a_huge_input_gradient_on_to_nobody() -> None:
    """The stage before would make absurd gradients of it, and everybody would confirm them."""
    desk = Desk("f1")
    keys = count(9)
    task = backward(0, 0, 1)
    for node, size, passed in ((VOLUNTEER, 1e37, 0), (OTHER, 1.0, 1)):
        if node == OTHER:
            desk.server.link_up(OTHER, "volunteer", 0.0)
            desk.take()
        message = InputGradient(
            ledger_generation=1, task=task, ticket=desk.ticket(task, node), tensors=(activation(next(keys), CONFIG),)
        )
        desk.server.handle(node, message, 1.0, size)
        assert len(desk.take().sent(Gradient)) == passed
