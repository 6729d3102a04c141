"""Who may say what to a server: beyond the roles of `protocol.messages`, the places of the plan. Deny by default.

The role table lets any server talk to any server; but only the stage's ledger may say what counts, only the decider
how a step ends, only the neighbour in the route what its output was. A server without a place in the plan (a spare,
or one whose place went to another) has no say at all.
"""

from __future__ import annotations

from node.server.context import StageContext
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TaskId
from protocol.messages import (
    Activation,
    Audit,
    AuditOver,
    AuditReport,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Committed,
    Contribute,
    Decision,
    Evaluated,
    FetchAudited,
    FetchInput,
    FetchParameters,
    Freeze,
    Gradient,
    Held,
    InputGradient,
    Labels,
    LeaseReturned,
    Output,
    PartialNorm,
    Ready,
    ServerReady,
    StageCommitted,
    StageFrozen,
    StageKey,
    StepClosed,
    StepOpened,
    Stored,
    Summed,
    Tail,
    Validated,
    Verdict,
    Work,
)

_FROM_WORKERS = (
    Ready, Summed, LeaseReturned, Output, InputGradient, Evaluated, FetchInput, FetchParameters, Contribute,
)  # fmt: skip
_FROM_AUDITORS = (Ready, FetchParameters, FetchAudited, AuditReport)


def check_sender(
    context: StageContext, peer: NodeId, message: Work, *, is_volunteer: bool, is_auditor: bool = False
) -> None:
    """Raises `RemoteProtocolError` ("role") unless `peer` has the place from which this message may come.

    Expects the tasks of the message to be of this run. `is_volunteer` and `is_auditor` are what the link's credential
    says.
    """
    if is_auditor and isinstance(message, _FROM_AUDITORS):
        return
    if not _may_say(context, peer, message, is_volunteer):
        raise RemoteProtocolError("role", f"{type(message).__name__} from a node that has no say in it here")


def _may_say(context: StageContext, peer: NodeId, message: Work, is_volunteer: bool) -> bool:
    plan = context.plan
    if isinstance(message, _FROM_WORKERS):
        return is_volunteer or peer in context.stage_servers
    match message:
        case Freeze() | Commit() | Verdict() | StageKey() | Audit() | AuditOver():
            return peer == context.ledger
        case Decision() | CheckpointDone():
            return peer == plan.decider
        case StepOpened():
            return peer in (plan.decider, context.ledger)
        case StepClosed():  # a fellow says it as to anybody who may compute for it; to a decider, what it should know
            fellow = context.node == plan.decider and plan.stage_of(peer) is not None
            return fellow or peer == plan.decider or peer in context.stage_servers
        case Stored() | PartialNorm() | Committed():
            return peer in context.stage_servers and plan.shard_of(peer) == message.shard
        case Tail() | FetchAudited() | AuditReport():
            return peer in context.stage_servers
        case StageFrozen() | StageCommitted():
            return 0 <= message.stage < len(plan.stages) and peer == plan.ledger_of(message.stage)
        case CheckpointPart():
            return (plan.stage_of(peer), plan.shard_of(peer)) == (message.stage, message.shard)
        case Activation():
            return message.task.position > 0 and peer == plan.back_of(*_visit(message.task, -1))
        case Gradient():
            return not plan.ends_at(*_visit(message.task)) and peer == plan.front_of(*_visit(message.task, +1))
        case Validated():
            return peer == plan.front_of(*_visit(message.task))
        case Labels():
            return peer == plan.front_of(message.task.step, message.task.microbatch, 0)
        case ServerReady() | Held():
            return plan.stage_of(peer) is not None
        case _:
            return False


def _visit(task: TaskId, ahead: int = 0) -> tuple[int, int, int]:
    """(step, microbatch, position) of a task, or of the visit before or after it."""
    return task.step, task.microbatch, task.position + ahead
