"""Of a sample in segments: who gets what was asked for twice."""

from __future__ import annotations

from itertools import count

from node.machine.jobs import Backward, DropGraphs, Forward
from node.machine.outbox import Outbox
from node.volunteer.holdings import Holdings
from node.volunteer.leases import Held
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import FetchInput, InputAnswer, Lease
from tests.node.setting import TICKET, VOLUNTEER, Effects

FRONT, BACK = NodeId("f1"), NodeId("b1")


def part(op: str, segment: int) -> TaskId:
    return TaskId(0, 0, 1, op, segment)  # type: ignore[arg-type]


def tensor(key: int) -> TensorRef:
    return TensorRef(key, (2, 4, 8), "fp32", 256)


def lease(op: str, key: int) -> Held:
    given = Lease(
        ledger_generation=1, tasks=(part(op, 0),), ticket=TICKET, version=0, deadline_s=600.0, front=FRONT, back=BACK,
        recompute=op == "B", need_input_gradient=op == "B", need_weight_gradient=op == "B", tensors=(tensor(key),),
    )  # fmt: skip
    return Held(given, BACK if op == "B" else FRONT, 0.0, None, True, op == "B", place=0)


def test_a_forward_that_has_begun_gets_what_its_backward_asked_for_too() -> None:
    """Their servers started anew, so a volunteer has a visit's backward, whose graph is gone, and its forward once
    more. The front answers once; the backward took it, could not begin while the forward had, and both waited until
    their leases ran out (found with leases of 1,000 s)."""
    out = Outbox(VOLUNTEER, count(1))
    held = Holdings(out)
    held.generation = 1
    back, forth = lease("B", 1), lease("F", 2)
    held.add(back, segments=2)
    for segment, op in ((0, "F"), (0, "B")):
        held.on_input(InputAnswer(ledger_generation=1, task=part(op, segment), tensors=(tensor(3 + segment),)), 0.0, 2)
    held.add(forth, segments=2)
    assert held.has_what_it_needs(forth) and not held.has_what_it_needs(back)
    held.begin(forth)
    assert forth.tenancy is not None and isinstance(forth.tenancy.job(lambda: None, out.key), Forward)
    held.pause(0.1)
    Effects(out)
    held.on_input(InputAnswer(ledger_generation=1, task=part("F", 1), tensors=(tensor(5),)), 0.2, 2)
    assert held.has_what_it_needs(forth)
    (again,) = Effects(out).sent(FetchInput)
    assert (again.task, again.ticket) == (part("F", 1), back.lease.ticket)
    held.begin(forth)
    forth.tenancy.job(lambda: None, out.key)
    held.end()
    held.on_input(InputAnswer(ledger_generation=1, task=part("F", 1), tensors=(tensor(6),)), 0.3, 2)
    assert held.has_what_it_needs(back)
    assert Effects(out).sent(FetchInput) == []


def test_a_forward_that_is_leased_again_goes_before_a_backward_that_can_get_no_further() -> None:
    """The back server has lost the output, and with it what the backward waits for in the middle of its segments: that
    will not come before there is another output. Each waited for the other until its lease ran out (found with leases
    of 1,000 s)."""
    out = Outbox(VOLUNTEER, count(1))
    held = Holdings(out)
    held.generation = 1
    held.keep_graph(part("F", 0), TICKET, sent=True)
    back, forth = lease("B", 1), lease("F", 2)
    held.add(back, segments=2)
    assert held.has_what_it_needs(back) and back.tenancy is not None
    held.begin(back)
    assert isinstance(back.tenancy.job(lambda: None, out.key), Backward)
    held.add(forth, segments=2)
    assert not held.has_what_it_needs(forth), "the device is at it"
    held.pause(0.1)
    Effects(out)
    assert held.has_what_it_needs(forth) and not held.has_what_it_needs(back)
    held.begin(forth)
    effects = Effects(out)
    assert [job.tasks for job in effects.jobs(DropGraphs)] == [(part("F", 0),)]
    wanted = {part("F", 0), part("F", 1), part("B", 0)}
    assert {said.task for said in effects.sent(FetchInput)} == wanted, "the backward begins from inputs"


def test_a_backward_whose_next_segment_is_here_is_not_given_up_for_its_forward() -> None:
    """It ends first: only then the device has room for the other."""
    out = Outbox(VOLUNTEER, count(1))
    held = Holdings(out)
    held.generation = 1
    held.keep_graph(part("F", 0), TICKET, sent=True)
    back, forth = lease("B", 1), lease("F", 2)
    held.add(back, segments=2)
    held.begin(back)
    assert back.tenancy is not None
    back.tenancy.job(lambda: None, out.key)
    held.pause(0.1)
    held.on_input(InputAnswer(ledger_generation=1, task=part("B", 0), tensors=(tensor(3),)), 0.2, 2)
    held.add(forth, segments=2)
    assert held.has_what_it_needs(back) and not held.has_what_it_needs(forth)
