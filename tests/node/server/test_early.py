"""Results of a step that the server of stage 0 has not heard of: kept until it hears that the step is open."""

from __future__ import annotations

from node.server.early import Early
from protocol.base.ids import TaskId
from protocol.messages import Activation, Forget, Output, StepOpened
from tests.node.server.test_sums import BEFORE, HERE, OTHER, Desk
from tests.node.setting import VOLUNTEER, Effects

LATER = TaskId(1, 0, 0, "F")


def opened(step: int) -> StepOpened:
    return StepOpened(ledger_generation=1, step=step, closed=-1)


def test_an_output_that_comes_before_the_word_that_its_step_is_open_counts_when_it_comes() -> None:
    """A back server that has started again is linked to a volunteer before it is linked to the decider. The output was
    dropped, its graph with it, and the front waited until the lease ran out (found with leases of 1,000 s)."""
    desk = Desk(BEFORE)
    first = desk.result(LATER, "q8")
    assert isinstance(first, Output)
    early = desk.say(VOLUNTEER, first)
    assert early.sent(Activation) == [] and early.sent(Forget) == [] and early.dropped == []
    assert desk.say(OTHER, desk.result(LATER, "q8", OTHER)).dropped != [], "the first one stays"
    effects = desk.say(BEFORE, opened(1))
    assert [said.tensors for said in effects.sent(Activation, HERE)] == [first.tensors]


def test_what_came_early_is_let_go_of_with_its_step_and_with_its_ledgers() -> None:
    """Nobody will ask for it."""
    desk = Desk(BEFORE)
    early, message = Early(desk.server.context), desk.result(LATER, "q8")
    assert isinstance(message, Output)
    early.keep(VOLUNTEER, message, 1.0)
    early.close_step(0)
    assert Effects(desk.out).dropped == []
    early.close_step(1)
    assert Effects(desk.out).dropped == [message.tensors[0].key] and early.take(1) == []
    again = desk.result(LATER, "q8")
    desk.say(VOLUNTEER, again)
    desk.server.end()
    assert again.tensors[0].key in Effects(desk.out).dropped
