"""What servers may send a volunteer: every field of a lease is looked at before it can crash or mislead."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from node.volunteer.screening import check_from_server
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.messages import InputAnswer, Lease, Parameters, StepClosed, Verdict, Work
from protocol.run.batches import Batches
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import RunConfig, WireSection
from tests.node.setting import TICKET

CONFIG = RunConfig(wire=WireSection(gradients="fp64", parameters="fp32"))
FRONT, BACK = NodeId("f" * 52), NodeId("b" * 52)
OTHERS = NodeId("g" * 52), NodeId("c" * 52)
PLAN = Plan(1, 1, -1, tuple(
    StagePlan((ServerPlan(front, "front", ()), ServerPlan(back, "back", ())))
    for i, (front, back) in enumerate([OTHERS, (FRONT, BACK)])
), line(10, 2))  # fmt: skip
HIDDEN = TensorRef(1, (2, 128, 128), "q8", 33_288)
LABELS = TensorRef(2, (2, 128), "int32", 1024)
END = (TaskId(3, 1, 1, "F"), TaskId(3, 1, 2, "L"), TaskId(3, 1, 1, "B"))
LEASE = Lease(
    ledger_generation=1, tasks=END, ticket=TICKET, version=2, deadline_s=1.0, front=FRONT, back=BACK, recompute=False,
    need_input_gradient=True, need_weight_gradient=True, tensors=(HIDDEN, LABELS),
)  # fmt: skip


def reason(message: Work, peer: NodeId = FRONT, config: RunConfig = CONFIG, stage: int = 1) -> str:
    """The word that the message is refused with, or nothing."""
    try:
        check_from_server(Batches.of(config), PLAN, stage, peer, message)
    except RemoteProtocolError as error:
        return error.reason
    return ""


def test_honest_leases_pass() -> None:
    """The three sorts of them: the route's end, a forward of tokens, and a backward."""
    assert reason(LEASE) == ""
    first = {"front": OTHERS[0], "back": OTHERS[1], "need_input_gradient": False}
    forward = msgspec.structs.replace(LEASE, tasks=(TaskId(3, 1, 0, "F"),), tensors=(LABELS,), **first)
    assert reason(forward, OTHERS[0], stage=0) == ""
    backward = msgspec.structs.replace(LEASE, tasks=(TaskId(3, 1, 0, "B"),), tensors=(HIDDEN,), **first)
    assert reason(backward, OTHERS[1], stage=0) == ""
    assert reason(msgspec.structs.replace(backward, need_input_gradient=True), OTHERS[1], stage=0) == "decode"


@pytest.mark.parametrize(
    ("word", "changes"),
    [
        ("decode", {"tasks": ()}),
        ("decode", {"tasks": END[:2]}),
        ("decode", {"tasks": END[::-1]}),
        ("decode", {"tasks": END[:1]}),
        ("role", {"tasks": (END[0], END[1], TaskId(3, 0, 1, "B"))}),
        ("role", {"tasks": (TaskId(3, 1, 0, "F"), END[1], TaskId(3, 1, 0, "B"))}),
        ("role", {"tasks": tuple(TaskId(3, 1, task.position, task.op, 1) for task in END)}),
        ("decode", {"tasks": tuple(TaskId(3, 2**31, task.position, task.op) for task in END)}),
        ("decode", {"tasks": tuple(TaskId(10**9, 1, task.position, task.op) for task in END), "version": 10**9 - 1}),
        ("version", {"version": 3}),
        ("role", {"front": BACK}),
        ("role", {"back": OTHERS[1]}),
        ("shape", {"tensors": ()}),
        ("shape", {"tensors": (HIDDEN,)}),
        ("shape", {"tensors": (LABELS, HIDDEN)}),
        ("shape", {"tensors": (msgspec.structs.replace(HIDDEN, form="bf16"), LABELS)}),
        ("shape", {"tensors": (msgspec.structs.replace(HIDDEN, shape=(1, 256, 128)), LABELS)}),
    ],
)
def test_a_lease_that_cannot_be_is_refused_by_name(word: str, changes: dict[str, Any]) -> None:
    """One thing wrong at a time."""
    assert reason(msgspec.structs.replace(LEASE, **changes)) == word


def test_a_lease_from_another_server_is_refused() -> None:
    """Only the front server of a microbatch leases its route's end."""
    assert reason(LEASE, BACK) == "role"


def test_other_words_of_servers_are_looked_at_too() -> None:
    """Parameters of the sender's shard, inputs of the right shape, verdicts of the ledger, steps that exist."""
    vector = TensorRef(1, (10,), "fp32", 40)
    parameters = Parameters(ledger_generation=1, version=0, shard=1, tensors=(vector,))
    assert reason(parameters, BACK) == "" and reason(parameters, FRONT) == "role"
    for wrong in ((vector, vector), (TensorRef(1, (2, 5), "fp32", 40),), (TensorRef(1, (10,), "fp64", 80),)):
        assert reason(msgspec.structs.replace(parameters, tensors=wrong), BACK) == "shape"
    config = msgspec.structs.replace(CONFIG, wire=WireSection(parameters="fp32", gradients="gi"))
    grid = TensorRef(2, (1,), "gi", 9)
    for tensors, named in (((vector, grid), ""), ((vector,), "shape"), ((vector, vector), "shape")):
        with_grid = msgspec.structs.replace(parameters, tensors=tensors)
        assert reason(with_grid, BACK, config) == named
    changes = tuple(TensorRef(i, (10,), "p12", 9) for i in range(2))
    for base, given, named in (
        (-1, changes[:1], ""), (5, changes, ""), (6, changes[:1], ""), (6, changes, "shape"), (-1, changes, "shape"),
        (7, changes[:1], "version"), (3, (*changes, *changes), "version"), (-1, (vector,), "shape"),
    ):  # fmt: skip
        config = msgspec.structs.replace(CONFIG, wire=WireSection(parameters="p12", gradients="fp64"))
        told = Parameters(ledger_generation=1, version=7, shard=1, base=base, tensors=given)
        assert reason(told, BACK, config) == named
    told = Parameters(ledger_generation=1, version=7, shard=1, base=6, tensors=(vector,))
    assert reason(told, BACK) == "version"
    answer = InputAnswer(ledger_generation=1, task=END[0], tensors=(HIDDEN,))
    assert reason(answer) == "" and reason(msgspec.structs.replace(answer, tensors=(LABELS,))) == "shape"
    name = ContributionId(BACK, 1, 1)
    verdict = Verdict(ledger_generation=1, contribution=name, step=3, tasks=END[1:], accepted=True, number=0, reason="")
    assert reason(verdict) == "" and reason(verdict, BACK) == "role"
    assert reason(StepClosed(ledger_generation=1, step=CONFIG.steps - 1)) == ""
    assert reason(StepClosed(ledger_generation=1, step=CONFIG.steps)) == "decode"
