"""Who may say what to a server: beyond the roles of `protocol.messages`, the places of the plan. Deny by default.

The role table lets any server talk to any server; but only the stage's ledger may say what counts, only the decider
how a step ends, only the neighbour in the route what its output was. A server without a place in the plan (a spare,
or one whose place went to another) has no say at all.
"""

from __future__ import annotations

from node.server.context import StageContext
from protocol.errors import RemoteProtocolError
from protocol.ids import NodeId
from protocol.messages import (
    Activation,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Committed,
    Contribute,
    Decision,
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
    StepClosed,
    StepOpened,
    Stored,
    Verdict,
    Work,
)

_FROM_WORKERS = (Ready, LeaseReturned, Output, InputGradient, FetchInput, FetchParameters, Contribute)


def check_sender(context: StageContext, peer: NodeId, message: Work, *, is_volunteer: bool) -> None:
    """Raises `RemoteProtocolError` ("role") unless `peer` has the place from which this message may come.

    Expects the tasks of the message to be of this run. `is_volunteer` is what the link's credential says.
    """
    if not _may_say(context, peer, message, is_volunteer):
        raise RemoteProtocolError("role", f"{type(message).__name__} from a node that has no say in it here")


def _may_say(context: StageContext, peer: NodeId, message: Work, is_volunteer: bool) -> bool:
    plan, stage = context.plan, context.stage
    if isinstance(message, _FROM_WORKERS):
        return is_volunteer or peer in context.stage_servers
    match message:
        case Freeze() | Commit() | Verdict():
            return peer == context.ledger
        case Decision() | CheckpointDone():
            return peer == plan.decider
        case StepOpened():
            return peer in (plan.decider, context.ledger)
        case StepClosed():  # a fellow says it to us as to anybody who may compute for it
            return peer == plan.decider or peer in context.stage_servers
        case Stored() | PartialNorm() | Committed():
            return peer in context.stage_servers and plan.shard_of(peer) == message.shard
        case StageFrozen() | StageCommitted():
            return 0 <= message.stage < len(plan.stages) and peer == plan.ledger_of(message.stage)
        case CheckpointPart():
            return (plan.stage_of(peer), plan.shard_of(peer)) == (message.stage, message.shard)
        case Activation():
            return stage > 0 and peer == plan.back_of(stage - 1, message.task.microbatch)
        case Gradient():
            return not context.is_last and peer == plan.front_of(stage + 1, message.task.microbatch)
        case Labels():
            return peer == plan.front_of(0, message.task.microbatch)
        case ServerReady() | Held():
            return plan.stage_of(peer) is not None
        case _:
            return False
