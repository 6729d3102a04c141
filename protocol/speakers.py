"""Who may say what to whom, by role: the one table that every link asks. What is not in it is refused."""

from __future__ import annotations

from protocol.messages import (
    Activation,
    Allowance,
    Audit,
    Audited,
    AuditOver,
    AuditReport,
    Blamed,
    Bye,
    CheckpointDone,
    CheckpointPart,
    Commit,
    Committed,
    Contribute,
    CoordinatorSeen,
    DataReady,
    Decision,
    DrainOrder,
    Evaluated,
    FetchAudited,
    FetchInput,
    FetchParameters,
    FetchSpans,
    Flush,
    Forget,
    Freeze,
    Gradient,
    Held,
    InputAnswer,
    InputGradient,
    Join,
    Labels,
    Lease,
    LeaseReturned,
    Leave,
    LinkReport,
    MeasureAsk,
    MeasureData,
    MeasureGot,
    Message,
    News,
    NodeReport,
    Output,
    Parameters,
    PartialNorm,
    Ping,
    PlanChanged,
    Pong,
    Reach,
    Ready,
    Refused,
    Relays,
    Renewed,
    Revoked,
    RunFinished,
    ServerReady,
    Signal,
    Spans,
    StageCommitted,
    StageFrozen,
    StageKey,
    StepClosed,
    StepOpened,
    StepReport,
    StepReportStored,
    Stored,
    Summed,
    Survey,
    Tail,
    Validated,
    Verdict,
    VersionReady,
    Welcome,
    Wrote,
)

ROLES = ("coordinator", "server", "volunteer", "auditor")
_NODE = ("server", "volunteer", "auditor")

MAY_SEND: dict[type[Message], tuple[tuple[str, str], ...]] = {}
"""(sender's role, receiver's role) pairs that may exchange a kind of message. What is not here is refused."""


def _may(pairs: tuple[tuple[str, str], ...], *kinds: type[Message]) -> None:
    for kind in kinds:
        MAY_SEND[kind] = pairs


_may(tuple((a, b) for a in ROLES for b in ROLES), Ping, Pong, Bye)
_may(tuple((a, "coordinator") for a in _NODE), Join, NodeReport, LinkReport, Leave)
_may((("server", "coordinator"),), DataReady, StepReport, Wrote, Blamed)
_may((("coordinator", "volunteer"),), News)
_may(tuple(("coordinator", b) for b in _NODE), FetchSpans)
_may(tuple((a, "coordinator") for a in _NODE), Spans)
_may(tuple(("coordinator", b) for b in _NODE), Welcome, Refused, PlanChanged, RunFinished, DrainOrder, Reach, Relays)
_may((*((a, "coordinator") for a in _NODE), *(("coordinator", b) for b in _NODE)), Signal)
_may((*(("coordinator", b) for b in _NODE), *(("server", b) for b in _NODE)), Revoked)
_LINKED = (("volunteer", "server"), ("server", "volunteer"), ("server", "server"), ("auditor", "server"),
           ("server", "auditor"))  # fmt: skip
_may(_LINKED, Renewed)
_may((("server", "server"),), CoordinatorSeen)
_may((("coordinator", "server"),), StepReportStored, Survey)
_may(_LINKED, MeasureAsk, MeasureData, MeasureGot)
# A server with a device computes as a volunteer does, so it speaks that conversation with its fellow servers.
_may((("volunteer", "server"), ("server", "server")), Summed, LeaseReturned, Output, InputGradient, Evaluated,
     FetchInput, Contribute)  # fmt: skip
_may((("server", "volunteer"), ("server", "server")), Lease, Flush, Allowance, Forget, InputAnswer, Verdict)
# An auditor computes what others have done, and nothing of its own: it needs the parameters, and gives opinions.
_may((("volunteer", "server"), ("server", "server"), ("auditor", "server")), Ready, FetchParameters)
_may((("server", "volunteer"), ("server", "server"), ("server", "auditor")), Parameters, VersionReady, StepClosed)
_may((("server", "server"), ("server", "auditor")), Audit, AuditOver, Audited)
_may((("server", "server"), ("auditor", "server")), FetchAudited, AuditReport)
_may((("server", "server"),), ServerReady, StageKey, Activation, Labels, Gradient, Held, Stored, StepOpened, Tail,
     Freeze, PartialNorm, StageFrozen, Validated, Decision, Commit, Committed, StageCommitted, CheckpointPart,
     CheckpointDone)  # fmt: skip
