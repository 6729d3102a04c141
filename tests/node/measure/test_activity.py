"""What a node did: jobs, pauses with their reasons, transfers, and tasks from lease to result."""

from __future__ import annotations

from typing import Any

import msgspec

from node.machine.jobs import Forward
from node.measure.activity import HELD_MAX, Activity, without_numbers
from protocol.base.ids import NodeId, TaskId, TensorRef, Ticket
from protocol.messages import Held, Lease, Output
from protocol.run.spans import CONTENTS, KINDS, FetchSpans, read_spans

TASK = TaskId(3, 1, 0, "F")
TICKET = Ticket(1, b"t" * 16)
PEER = NodeId("a" * 52)


def told(activity: Activity) -> list[tuple[Any, ...]]:
    """(kind, content, start, seconds, name) of all spans."""
    answer = activity.ring.answer(FetchSpans(number=1, after=0, seconds=0.0), 0.0)
    return [
        (
            KINDS[r["kind"]],
            CONTENTS[r["content"]],
            float(r["start"]),
            round(float(r["seconds"]), 3),
            answer.names[r["name"]],
        )
        for r in read_spans(answer)
    ]


def forward() -> Forward:
    return Forward(TASK, 0, TensorRef(1, (1,), "fp32", 4), 2)


def lease() -> Lease:
    return Lease(
        ledger_generation=1, tasks=(TASK,), ticket=TICKET, version=0, deadline_s=9.0, front=PEER, back=PEER,
        recompute=False, need_input_gradient=True, need_weight_gradient=True, tensors=(TensorRef(0, (1,), "fp32", 4),),
    )  # fmt: skip


def test_a_pause_of_the_device_has_a_length_and_a_reason() -> None:
    """From the end of the last job to the order of the next, for what the machine said when it had seen that end."""
    activity = Activity()
    activity.waiting_for = lambda: "step 4: parameters or inputs for the forward of microbatch 7"
    activity.job_begins(True, 1.0)
    activity.job_ended(forward(), True, 0.5, 2.0)
    activity.heard(lease(), 3.0)
    activity.waiting_for = lambda: "something else, later"
    activity.heard(lease(), 3.5)
    activity.job_begins(True, 4.0)
    assert told(activity) == [
        ("forward", "", 1.5, 0.5, ""),
        ("wait", "", 2.0, 2.0, "step #: parameters or inputs for the forward of microbatch #"),
    ]


def test_a_device_with_a_queue_does_not_wait() -> None:
    """Two jobs one after the other, and jobs of the other lane, make no pause."""
    activity = Activity()
    activity.job_begins(True, 1.0)
    activity.job_begins(True, 1.1)
    activity.job_ended(forward(), True, 0.9, 2.0)
    activity.job_begins(False, 2.5)
    activity.job_ended(forward(), True, 1.0, 3.0)
    activity.job_begins(True, 3.0001)
    assert [span[0] for span in told(activity)] == ["forward", "forward"]


def test_a_task_lasts_from_its_lease_to_its_result_on_both_sides() -> None:
    """The volunteer counts from the lease's arrival; the server from giving it, until somebody of it has the result."""
    output = Output(ledger_generation=1, task=TASK, ticket=TICKET, tensors=(TensorRef(0, (1,), "fp32", 4),))
    volunteer, front = Activity(), Activity()
    front.says(PEER, lease(), 1.0)
    volunteer.heard(lease(), 2.0)
    volunteer.says(PEER, output, 5.0)
    front.heard(Held(ledger_generation=1, kind="output", tasks=(TASK,), complete=False), 7.0)
    front.heard(Held(ledger_generation=1, kind="output", tasks=(TASK,), complete=False), 8.0)
    assert told(volunteer) == [("task", "", 2.0, 3.0, "")]
    assert told(front) == [("task", "", 1.0, 6.0, PEER)]


def test_leases_that_never_end_are_forgotten() -> None:
    """A server that gives away leases for a month keeps no more than a few thousand in mind."""
    activity = Activity()
    for number in range(HELD_MAX + 100):
        given = msgspec.structs.replace(lease(), tasks=(TaskId(number, 0, 0, "F"),))
        activity.says(PEER, given, float(number))
    assert len(activity._held) == HELD_MAX


def test_transfers_say_whose_and_what() -> None:
    """Peer, kind of message, bytes and times of what was moved."""
    activity = Activity()
    activity.moved(PEER, "receive", lease(), 4, 1.0, 3.0)
    assert told(activity) == [("receive", "Lease", 1.0, 2.0, PEER)]
    assert without_numbers("servers a7bc, d of stage 3; work") == "servers #, d of stage #; work"
