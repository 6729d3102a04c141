"""Who may say what to a server: every kind of message has somebody, and only whom the plan names."""

from __future__ import annotations

from itertools import count
from typing import Any, get_type_hints

import pytest

from node.machine.outbox import Outbox
from node.server.context import StageContext
from node.server.senders import check_sender
from node.server.tickets import TicketOffice
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.kinds import MAY_SEND, MESSAGES
from protocol.messages import Work
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import RunConfig

SERVERS = {name: NodeId(name.replace(" ", "-").ljust(52, "x")) for name in
           ("front 0", "back 0", "front 1", "back 1", "front 2", "back 2")}  # fmt: skip
VOLUNTEER, SPARE = NodeId("v" * 52), NodeId("s" * 52)
TO_SERVERS = [kind for kind in MESSAGES if issubclass(kind, Work) and any(to == "server" for _, to in MAY_SEND[kind])]
"""Kinds about work that a server may hear at all, by the role table."""
ONLY_TO_THE_DEVICE = {"Allowance", "Audited", "Flush", "Lease", "Forget", "InputAnswer", "Parameters", "VersionReady"}
"""Kinds that a server hears only as a volunteer: `node.volunteer.screening` looks at those."""


def context(name: str) -> StageContext:
    """A server of a run of three stages."""
    stages = tuple(
        StagePlan((
            ServerPlan(SERVERS[f"front {i}"], "front", ()), ServerPlan(SERVERS[f"back {i}"], "back", ()),
        ))
        for i in range(3)
    )  # fmt: skip
    plan = Plan(1, 1, -1, stages, line(9, 3))
    node = SERVERS[name]
    stage, shard = plan.stage_of(node), plan.shard_of(node)
    assert stage is not None and shard is not None
    return StageContext(node, RunConfig(), plan, stage, shard, Outbox(node, count(1)), TicketOffice(1))


def message(kind: type[Any], **facts: Any) -> Work:
    """One of its kind, about microbatch 0 of step 0; `stage` and `shard` as given."""
    plain: dict[Any, Any] = {int: 0, float: 0.0, bool: False, str: "", bytes: b"", TaskId: TaskId(0, 0, 0, "F")}
    plain |= {NodeId: VOLUNTEER, ContributionId: ContributionId(VOLUNTEER, 0, 0)}
    fields = {
        name: plain.get(hint, ()) for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__
    }
    return kind(**{**fields, **{name: value for name, value in facts.items() if name in fields}})  # type: ignore[no-any-return]


def may(receiver: str, sender: NodeId, what: Work) -> bool:
    try:
        check_sender(context(receiver), sender, what, is_volunteer=sender == VOLUNTEER)
    except RemoteProtocolError as error:
        return error.reason != "role"
    return True


@pytest.mark.parametrize("kind", TO_SERVERS, ids=lambda kind: kind.__name__)
def test_every_kind_has_a_sender_and_a_spare_is_never_one(kind: type[Work]) -> None:
    """A kind that nobody thought of would be refused from honest servers: then this fails."""
    senders = set()
    for receiver in SERVERS:
        for name, node in SERVERS.items():
            place = {"stage": int(name[-1]), "shard": int(name.startswith("back")), "task": TaskId(0, 0, 1, "F")}
            if may(receiver, node, message(kind, **place)):
                senders.add(name)
        assert not may(receiver, SPARE, message(kind))
    assert bool(senders) != (kind.__name__ in ONLY_TO_THE_DEVICE)


def test_places_decide() -> None:
    """A few pairs of each sort, right and wrong."""
    task = TaskId(0, 0, 1, "F")
    kinds = {kind.__name__: kind for kind in MESSAGES}
    for name, receiver, right, wrong, facts in (
        ("Freeze", "back 1", ["front 1"], ["back 1", "front 0", "front 2"], {}),
        ("Verdict", "back 1", ["front 1"], ["back 1", "front 0"], {}),
        ("Decision", "front 1", ["front 0"], ["front 1", "back 0"], {}),
        ("Activation", "front 1", ["back 0"], ["front 0", "back 1", "front 1"], {"task": task}),
        ("Gradient", "back 1", ["front 2"], ["front 0", "back 2"], {"task": task}),
        ("Labels", "front 2", ["front 0"], ["back 0", "front 1"], {"task": task}),
        ("Stored", "front 1", ["back 1"], ["front 1", "back 0"], {"shard": 1}),
        ("FrozenList", "front 1", ["back 1"], ["front 1", "back 0"], {"shard": 1}),
        ("CopyKept", "front 1", ["back 1"], ["front 1", "front 0", "back 0"], {}),
        ("CopyGiven", "back 1", ["front 1"], ["back 1", "front 0", "back 2"], {}),
        ("ShardCopy", "back 1", ["front 1"], ["back 1", "front 0"], {"stage": 1, "shard": 0}),
        ("StageFrozen", "front 0", ["front 1"], ["front 0", "front 2", "back 1"], {"stage": 1}),
        ("Output", "back 1", ["front 1", "back 1"], ["front 0", "back 0"], {"task": task}),
    ):
        what = message(kinds[name], **facts)
        assert all(may(receiver, SERVERS[sender], what) for sender in right), name
        assert not any(may(receiver, SERVERS[sender], what) for sender in wrong), name
        assert may(receiver, VOLUNTEER, what) == (name == "Output")


def test_an_auditor_may_ask_for_parameters_and_inputs_and_give_opinions_and_nothing_else() -> None:
    """Whatever the role table lets it say: the server's own table says the same."""
    here, auditor = context("front 0"), NodeId("a" * 52)
    allowed = set()
    for kind in TO_SERVERS:
        try:
            check_sender(here, auditor, message(kind), is_volunteer=False, is_auditor=True)
        except RemoteProtocolError:
            continue
        allowed.add(kind)
    assert {kind.__name__ for kind in allowed} == {"Ready", "FetchParameters", "FetchAudited", "AuditReport"}
    assert allowed == {kind for kind in TO_SERVERS if ("auditor", "server") in MAY_SEND[kind]}
