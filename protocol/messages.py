"""Every message, by conversation. Bounds stand in the types of fields; who may send and take what, in `protocol.kinds`.

A message with tensors carries their references in `tensors`; the bytes follow in frames of their own, and the
message is delivered when all have arrived. A message without tensors never waits behind bytes, so it may overtake an
earlier one that has some: machines must not rely on the order of the two kinds. `ledger_generation` fences work.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.base.bounded import (
    Addresses,
    Bytes,
    Contributions,
    Counters,
    Items,
    Losses,
    Nodes,
    Number,
    PublicName,
    Result,
    Sentence,
    Tasks,
    Tensors,
    Text,
    Tickets,
)
from protocol.base.ids import ContributionId, NodeId, TaskId, Ticket
from protocol.base.limits import COPIES_MAX, JOIN_CHECKPOINTS_MAX, RELAYS_MAX
from protocol.base.message import Message as Message
from protocol.base.message import Work as Work
from protocol.link.messages import Fellow as Fellow
from protocol.link.messages import LinkFigures as LinkFigures
from protocol.link.messages import LinkReport as LinkReport
from protocol.link.messages import MeasureAsk as MeasureAsk
from protocol.link.messages import MeasureData as MeasureData
from protocol.link.messages import MeasureGot as MeasureGot
from protocol.link.messages import Survey as Survey
from protocol.run.audits import Audit as Audit
from protocol.run.audits import Audited as Audited
from protocol.run.audits import AuditOver as AuditOver
from protocol.run.audits import AuditReport as AuditReport
from protocol.run.audits import Blamed as Blamed
from protocol.run.audits import FetchAudited as FetchAudited
from protocol.run.changes import RunChange
from protocol.run.news import News as News
from protocol.run.news import Share as Share
from protocol.run.news import Wrote as Wrote
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.run.saves import CheckpointDone as CheckpointDone
from protocol.run.saves import CheckpointPart as CheckpointPart
from protocol.run.saves import CopyGiven as CopyGiven
from protocol.run.saves import CopyKept as CopyKept
from protocol.run.saves import FetchCopy as FetchCopy
from protocol.run.saves import ShardCopy as ShardCopy
from protocol.run.spans import FetchSpans as FetchSpans
from protocol.run.spans import Spans as Spans
from protocol.run.step_report import StageSum as StageSum
from protocol.run.step_report import StepReport as StepReport
from protocol.run.step_report import StepReportStored as StepReportStored
from protocol.run.validation import Evaluated as Evaluated
from protocol.run.validation import Validated as Validated
from protocol.run.validation import ValidationLoss as ValidationLoss
from protocol.trust.messages import CoordinatorSeen as CoordinatorSeen
from protocol.trust.messages import Renewed as Renewed
from protocol.trust.messages import Revoked as Revoked

# ---- every link ------------------------------------------------------------------------------------------------


class Ping(Message, frozen=True, kw_only=True):
    """Asks for a `Pong`; sent on a link that has been quiet for `limits.ping_s`."""

    number: Number
    look: bool = False
    """From the coordinator, before it sends a run back: look which checkpoints can be read, and answer after that."""


class Pong(Message, frozen=True, kw_only=True):
    """Answers a `Ping`."""

    number: Number


class Bye(Message, frozen=True, kw_only=True):
    """The sender closes this link on purpose."""

    reason: Sentence


# ---- node and coordinator --------------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """A node asks to take part. Servers say what state they hold, so that a restarted run finds it.

    Repeated on the same link whenever what it says has changed: above all when a checkpoint has become readable,
    since a run that must go back goes to the newest one that all of its servers named.
    """

    role: Literal["server", "volunteer", "auditor"]
    addresses: Addresses
    """Where anybody can dial it, best first; empty when nobody can."""
    local_addresses: Addresses = ()
    """Where only its own network can: they count when the coordinator is in that network too."""
    build: Text
    tokens_per_s: float
    """What the self-benchmark gave (0: not measured)."""
    memory_bytes: Number
    stage: Number
    """The stage whose shard it holds on disk, or the stage it wishes for, or -1."""
    shard: Number
    """The shard it holds on disk, or -1."""
    version: Number
    """The newest version of that shard, or -1 when it holds none."""
    held_generation: Number
    """The ledger generation of what it holds on disk, or -1."""
    checkpoints: Annotated[tuple[Number, ...], Meta(max_length=JOIN_CHECKPOINTS_MAX)]
    """Steps of the complete checkpoints that it can read, newest first (at most `JOIN_CHECKPOINTS_MAX`)."""
    visit: bool = False
    """A volunteer that only looks: it is told the run and the plan, gets no stage, and leaves."""
    name: PublicName = ""
    """The public name that a volunteer's owner wants to be thanked by; empty: none."""
    plan: Plan | None = None
    """The plan that a server goes by or has kept, in the first of these on a link: a coordinator with an older database
    takes it over."""
    config_hash: Bytes = b""
    """Of the run that the plan is of; empty without one."""
    copies: Annotated[tuple[tuple[Number, Number, Number, Number], ...], Meta(max_length=COPIES_MAX)] = ()
    """(stage, shard, version, ledger generation) of others' shards held whole; of its own where just that is left."""


class Welcome(Message, frozen=True, kw_only=True):
    """The coordinator admits a node: its membership (signed, see `protocol.trust.membership`) and the run."""

    membership: Bytes
    config: RunConfig
    config_hash: Bytes
    vocabulary: Number
    """Size of the tokenizer's vocabulary, or 0 while no server of stage 0 has reported it."""


class Refused(Message, frozen=True, kw_only=True):
    """The coordinator does not admit a node, and says why."""

    reason: Sentence


class PlanChanged(Message, frozen=True, kw_only=True):
    """The plan in force. `stage` is the receiver's own (-1: none at present), with the reason."""

    plan: Plan
    stage: Number
    reason: Sentence


class DataReady(Message, frozen=True, kw_only=True):
    """A server of stage 0 has read the data: what it found, the same for all of them."""

    vocabulary: Number
    data_hash: Text
    token_count: Number


class NodeReport(Message, frozen=True, kw_only=True):
    """Every few seconds: what a node does, and what it waits for."""

    state: Literal["idle", "joining", "syncing", "training", "paused", "draining"]
    waiting_for: Sentence
    """Empty, or one sentence that names what and since when."""
    alert: Sentence = ""
    """Empty, or one sentence on what is wrong here while the work goes on: a disk that is full, above all."""
    ledger_generation: Number = -1
    """Of a server: the ledgers whose steps it counts."""
    linked: Nodes = ()
    """Of a server: its fellows in the plan that it has a link with. Nobody is given up whom they reach."""
    resting: Nodes = ()
    """Of a server for which no volunteer is of use at present: those who are given, or bring, nothing for a while."""
    counters: Counters
    """Totals since the process started; names of `protocol.base.limits.REPORT_COUNTERS`."""


class RunFinished(Message, frozen=True, kw_only=True):
    """The last step is closed, and the last checkpoint written: nodes may leave."""


class DrainOrder(Message, frozen=True, kw_only=True):
    """The operator wants this node to end what it has and go: a volunteer, or a server without a place."""

    reason: Sentence


class Leave(Message, frozen=True, kw_only=True):
    """A node says that it goes, after finishing what it had."""

    reason: Sentence


class Reach(Message, frozen=True, kw_only=True):
    """What helps a node to be reached. Sent after the welcome, and again before the credentials run out."""

    seen_from: Text
    """The host that its link to the coordinator comes from; empty: not known."""
    stun: Addresses
    """HOST:PORT of servers that say how a UDP socket looks from outside."""
    turn: Addresses
    """HOST:PORT of servers that relay UDP for whoever shows the credentials."""
    username: Text
    password: Text
    """For `turn`, made for this node."""
    valid_s: float
    """Life of the credentials in seconds from receipt; 0 when there are none."""


class Relay(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server that carries ciphertext between nodes that cannot reach each other."""

    node: NodeId
    addresses: Addresses
    """host:port, best first."""


class Relays(Message, frozen=True, kw_only=True):
    """Servers without a place in the plan, which relay and do nothing else. Replaces what was said before.

    Sent after the welcome when there are any, and whenever the receiver's have changed. The plan's servers relay too.
    """

    relays: Annotated[tuple[Relay, ...], Meta(max_length=RELAYS_MAX)]


class Signal(Message, frozen=True, kw_only=True):
    """What two nodes that have no link say to each other, carried by the coordinator, which does not read it.

    It proves nothing by having arrived: whoever carries it could have made it. Empty content: the coordinator could
    not hand over what was meant for `peer`.
    """

    peer: NodeId
    """On its way to the coordinator the receiver, from there on the sender."""
    content: Bytes
    seen_from: Text = ""
    """From the coordinator: the host that it sees the sender at, which the sender cannot choose."""


# ---- volunteer and server --------------------------------------------------------------------------------------


class Ready(Work, frozen=True, kw_only=True):
    """A volunteer takes so many more leases from this server, and says what it still holds.

    Each lease that needs a slot uses one up; a new link starts with none. `slots` are for work that leaves nothing
    behind (route ends, recomputation), `graph_slots` for forwards, whose graph stays until the backward: (position,
    slots) pairs, because room is never shared between positions (`Plan.graphs_max`), `validation_slots` for those of
    the validation, which leave none. `hello` asks for a `VersionReady` as soon as the shard can serve; with it go
    `graphs`, the forwards whose graph the volunteer keeps, and the tickets of their leases in the same order.
    """

    hello: bool
    slots: Number
    graph_slots: Items[tuple[Number, Number]] = ()
    validation_slots: Number = 0
    graphs: Tasks = ()
    tickets: Tickets = ()


class Lease(Work, frozen=True, kw_only=True):
    """A server gives work. `tasks` are done in order without anything in between leaving the volunteer.

    F: tensors (input). B: tensors (output gradient); `recompute` says that the input has to be fetched from
    `front`. F, L, B of a route's end together, or of the validation F and L: tensors (input, labels).

    Of a sample in segments it is about all of them, and what comes by segments comes here for the first that is done:
    the input of the first one, the output gradient of the last. The rest is asked for with `FetchInput`, and each
    segment's result is sent as soon as it is computed. Tokens and labels always come whole.
    """

    tasks: Tasks
    ticket: Ticket
    """Of the last of the tasks; goes back with every result."""
    version: Number
    deadline_s: float
    """Seconds from receipt until the volunteer gives up by itself (0.8 of the server's own)."""
    front: NodeId
    """Where the input gradient goes and the input is kept."""
    back: NodeId
    """Where the output goes."""
    recompute: bool
    need_input_gradient: bool
    need_weight_gradient: bool
    tensors: Tensors


class Summed(Work, frozen=True, kw_only=True):
    """Volunteer to the server that leased these: they are computed, their gradients lie in its sums or uploads, or will
    before the next of them leaves (split backward).

    From here on the lease waits for a contribution, not for a result. `complete`: a new link, and these are all that
    the volunteer has of this stage, whoever leased them.
    """

    tasks: Tasks
    tickets: Tickets
    complete: bool


class Flush(Work, frozen=True, kw_only=True):
    """A server has no more work of `step` for this volunteer: once all of its stage have said so, and all is computed,
    what is summed up is sent."""

    step: Number
    leases: Number
    """How many of the step this server has given on this link: they have tensors, so this word may overtake them."""


class Allowance(Work, frozen=True, kw_only=True):
    """A server tells a volunteer that it gets at most so many leases at once (0: none, -1: as many as it asks for), for
    so many seconds (0: until it has finished one), and why."""

    leases_max: Number
    seconds: float
    reason: Sentence


class LeaseReturned(Work, frozen=True, kw_only=True):
    """Leases given back unfinished; or, `result_only`, done and summed up, and the result perhaps lost on its way."""

    tasks: Tasks
    reason: Sentence
    result_only: bool = False


class Output(Work, frozen=True, kw_only=True):
    """A volunteer's forward result, to the back server."""

    task: TaskId
    ticket: Ticket
    tensors: Tensors


class InputGradient(Work, frozen=True, kw_only=True):
    """A volunteer's backward result, to the front server."""

    task: TaskId
    ticket: Ticket
    tensors: Tensors


class Forget(Work, frozen=True, kw_only=True):
    """A back server tells a volunteer that nobody will ask for the backward of these forwards from it."""

    tasks: Tasks


class FetchInput(Work, frozen=True, kw_only=True):
    """A volunteer that recomputes asks the front server for the input of a forward; the ticket is its backward's.

    Of a sample in segments any lease asks for what did not come with it: of a forward's segment the input from the
    front server, of a backward's the output gradient from the back server; the ticket is the lease's.
    """

    task: TaskId
    ticket: Ticket


class InputAnswer(Work, frozen=True, kw_only=True):
    """What a `FetchInput` asked for; no tensors when the server does not have it (any more, or yet: it follows)."""

    task: TaskId
    tensors: Tensors


class FetchParameters(Work, frozen=True, kw_only=True):
    """A volunteer asks a shard for its part of a version.

    With `[wire] parameters = "p12"`, `base` is an older version that it has, which may be told what changed; -1: none.
    """

    version: Number
    base: Number = -1


class Parameters(Work, frozen=True, kw_only=True):
    """A shard's part of a version; no tensors when the shard does not have that version.

    `base` as asked for: one tensor for each step from there to `version`, oldest first; -1: one tensor, the whole. With
    `gradients = "gi"` the version's grid comes last.
    """

    version: Number
    shard: Number
    base: Number = -1
    tensors: Tensors


class VersionReady(Work, frozen=True, kw_only=True):
    """A shard has a new version: a volunteer may fetch it before the first lease needs it."""

    version: Number


class Contribute(Work, frozen=True, kw_only=True):
    """One shard of a contribution: the sum of weight gradients over these tasks; `square_norm` is the receiver's."""

    contribution: ContributionId
    step: Number
    version: Number
    tasks: Tasks
    losses: Losses
    """Loss sums (nats) of the L tasks among `tasks`, in their order."""
    tickets: Tickets
    """Of the leases of the B tasks among `tasks`, in their order."""
    shard: Number
    square_norm: Result = 0.0
    tensors: Tensors


class Verdict(Work, frozen=True, kw_only=True):
    """The ledger's word on a contribution, to its sender, the shards and the pools of the stage.

    `doubted`: refused until somebody else has done the tasks, too; `blamed`: whose results for them this one has shown
    to be false.
    """

    contribution: ContributionId
    step: Number
    tasks: Tasks
    accepted: bool
    doubted: bool = False
    blamed: Nodes = ()
    number: Number
    """Its place among the accepted ones of the step, from 0: shards add them up in this order. -1: refused."""
    reason: Sentence


# ---- server and server -----------------------------------------------------------------------------------------


class ServerReady(Work, frozen=True, kw_only=True):
    """A server has its shard in memory and takes work. Its fellows answer with all that it must know (`sync`).

    Sent to every linked server when it becomes ready, and at link-up when it is.
    """

    version: Number


class StageKey(Work, frozen=True, kw_only=True):
    """Ledger to the servers of its stage: the key of the stage's lease tickets, the same for a whole generation."""

    key: Bytes


class Activation(Work, frozen=True, kw_only=True):
    """Back server to the next stage's front server: the input of `task` (an F, or the first of a route's end)."""

    task: TaskId
    tensors: Tensors


class Labels(Work, frozen=True, kw_only=True):
    """Front server of stage 0 to the one where the loss is computed."""

    task: TaskId
    """The L task."""
    tensors: Tensors


class Gradient(Work, frozen=True, kw_only=True):
    """Front server to the stage before's back server: the output gradient of `task` (a B)."""

    task: TaskId
    tensors: Tensors


class Held(Work, frozen=True, kw_only=True):
    """Says which tensors of open steps the sender has, or knows safe one hop further on.

    kind `input`: front to the back before (F and L inputs) and `labels` to stage 0; `gradient`: back to the front
    after (output gradients); `output`: back to front of the same stage (F done); `input_gradient`: front to back of
    the same stage (B's input gradient done). `complete` replaces everything said before (sent at link-up).
    """

    kind: Literal["input", "labels", "gradient", "output", "input_gradient"]
    tasks: Tasks
    complete: bool


class Stored(Work, frozen=True, kw_only=True):
    """Shard to ledger: this shard's part of a contribution is durable."""

    contribution: ContributionId
    step: Number
    version: Number
    tasks: Tasks
    losses: Losses
    shard: Number
    square_norm: Result = 0.0


class StepOpened(Work, frozen=True, kw_only=True):
    """Decider to ledgers, ledgers to their stage: work of `step` may begin. `closed` is the newest closed step."""

    step: Number
    closed: Number


class StepClosed(Work, frozen=True, kw_only=True):
    """Decider to ledgers, ledgers to their stage and volunteers: all stages committed; forget `step` and before."""

    step: Number


class Tail(Work, frozen=True, kw_only=True):
    """Server to its stage: every task of `step` that it has to give is given."""

    step: Number


class Freeze(Work, frozen=True, kw_only=True):
    """Ledger to shards: sum these contributions, in this order, and report the square norm."""

    step: Number
    contributions: Contributions


class FrozenList(Work, frozen=True, kw_only=True):
    """Shard to its stage's other shards: a digest of the contributions that `Freeze` or `Commit` named, in their order
    (`node.server.agreement`). A step is applied when all have told the same."""

    step: Number
    shard: Number
    digest: Bytes


class PartialNorm(Work, frozen=True, kw_only=True):
    """Shard to ledger: what `Freeze` asked for."""

    step: Number
    shard: Number
    square_norm: Result
    finite: bool


class StageFrozen(Work, frozen=True, kw_only=True):
    """Ledger to decider, and to the other ledgers, which hold the decider to it: every task of the stage's step is
    covered; the stage's square norm and loss."""

    stage: Number
    step: Number
    square_norm: Result
    finite: bool
    loss_sum: Result


class Decision(Work, frozen=True, kw_only=True):
    """Decider to ledgers: how the step ends. Durable before it is sent (4.3). It follows from what `stages` came to, in
    their order, and the run with these `changes`: whoever gets it computes it again (`node.server.judging`)."""

    step: Number
    clip_factor: float
    skipped: bool
    learning_rate: float = -1.0
    stages: Items[StageSum] = ()
    changes: Items[RunChange] = ()


class Commit(Work, frozen=True, kw_only=True):
    """Ledger to shards: apply these contributions in this order. The seal is durable before it is sent. Beside what a
    `Decision` says, the square `norms` of the stage's shards."""

    step: Number
    contributions: Contributions
    clip_factor: float
    skipped: bool
    learning_rate: float = -1.0
    stages: Items[StageSum] = ()
    changes: Items[RunChange] = ()
    norms: Items[Result] = ()


class Committed(Work, frozen=True, kw_only=True):
    """Shard to ledger: version step + 1 is durable, with this digest."""

    step: Number
    shard: Number
    digest: Bytes


class StageCommitted(Work, frozen=True, kw_only=True):
    """Ledger to decider: every shard of the stage has committed the step. `shares`: who computed it, no node twice."""

    stage: Number
    step: Number
    shares: Items[Share] = ()
