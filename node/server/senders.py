"""Who may say what to a server: beyond the roles of `protocol.kinds`, the places of the plan. Deny by default.

The table lets any server talk to any server; but only the stage's ledger may say what counts, only the decider how a
step ends, only the neighbour in the route what its output was. A server without a place in the plan (a spare, or one
whose place went to another) has no say at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.server.context import StageContext
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TaskId
from protocol.kinds import OF, Place
from protocol.messages import Work


def check_sender(
    context: StageContext, peer: NodeId, message: Work, *, is_volunteer: bool, is_auditor: bool = False
) -> None:
    """Raises `RemoteProtocolError` ("role") unless `peer` has the place from which this message may come.

    Expects the tasks of the message to be of this run. `is_volunteer` and `is_auditor` are what the link's credential
    says.
    """
    kind = OF[type(message)]
    if is_auditor and ("auditor", "server") in kind.ways:
        return
    if is_volunteer and kind.place == "worker":
        return
    stands = _STANDS.get(kind.place)
    if stands is None or not stands(context, peer, message):
        raise RemoteProtocolError("role", f"{type(message).__name__} from a node that has no say in it here")


def _is_fellow(context: StageContext, peer: NodeId, _: Any) -> bool:
    return peer in context.stage_servers


def _holds_own_shard(context: StageContext, peer: NodeId, message: Any) -> bool:
    return peer in context.stage_servers and context.plan.shard_of(peer) == message.shard


def _holds_any_shard(context: StageContext, peer: NodeId, message: Any) -> bool:
    return (context.plan.stage_of(peer), context.plan.shard_of(peer)) == (message.stage, message.shard)


def _is_in_the_plan(context: StageContext, peer: NodeId, _: Any) -> bool:
    return context.plan.stage_of(peer) is not None


def _keeps_our_copies(context: StageContext, peer: NodeId, _: Any) -> bool:
    return peer == context.plan.buddy_of(context.node)


def _is_the_ledger(context: StageContext, peer: NodeId, _: Any) -> bool:
    return peer == context.ledger


def _is_ledger_of(context: StageContext, peer: NodeId, message: Any) -> bool:
    return 0 <= message.stage < len(context.plan.stages) and peer == context.plan.ledger_of(message.stage)


def _decides(context: StageContext, peer: NodeId, _: Any) -> bool:
    return peer == context.plan.decider


def _decides_or_ledger(context: StageContext, peer: NodeId, _: Any) -> bool:
    return peer in (context.plan.decider, context.ledger)


def _closes(context: StageContext, peer: NodeId, _: Any) -> bool:
    """A fellow says it as to anybody who may compute for it; to a decider, what it should know."""
    decider = context.plan.decider
    known = context.node == decider and context.plan.stage_of(peer) is not None
    return known or peer == decider or peer in context.stage_servers


def _keeps_before(context: StageContext, peer: NodeId, message: Any) -> bool:
    return message.task.position > 0 and peer == context.plan.back_of(*_visit(message.task, -1))


def _keeps_after(context: StageContext, peer: NodeId, message: Any) -> bool:
    ends = context.plan.ends_at(*_visit(message.task))
    return not ends and peer == context.plan.front_of(*_visit(message.task, +1))


def _is_front(context: StageContext, peer: NodeId, message: Any) -> bool:
    return peer == context.plan.front_of(*_visit(message.task))


def _begins_route(context: StageContext, peer: NodeId, message: Any) -> bool:
    return peer == context.plan.front_of(message.task.step, message.task.microbatch, 0)


_STANDS: dict[Place, Callable[[StageContext, NodeId, Any], bool]] = {
    "worker": _is_fellow,  # with a device; whoever else computes is a volunteer
    "fellow": _is_fellow,
    "own shard": _holds_own_shard,
    "any shard": _holds_any_shard,
    "server": _is_in_the_plan,
    "buddy": _keeps_our_copies,
    "ledger": _is_the_ledger,
    "ledger of stage": _is_ledger_of,
    "decider": _decides,
    "decider or ledger": _decides_or_ledger,
    "closes": _closes,
    "back before": _keeps_before,
    "front after": _keeps_after,
    "front of task": _is_front,
    "front of route": _begins_route,
}


def _visit(task: TaskId, ahead: int = 0) -> tuple[int, int, int]:
    """(step, microbatch, position) of a task, or of the visit before or after it."""
    return task.step, task.microbatch, task.position + ahead
