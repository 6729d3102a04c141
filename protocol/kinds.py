"""Every kind of message in one table: who may send it to whom, who takes it, and what its tensors count as.

A row stands for a kind; what is not in a row is refused. Bounds stand beside the fields, in the message's own class
(`protocol.base.bounded`). What a role may say is narrowed on a server by the *place* of the sender in the plan: a
server may talk to any server, but only the stage's ledger may say what counts (`node.server.senders`).

MESSAGES.md shows all of it, with the bounds. To add a kind: its class, a row here, a handler, a line in CHANGES.md.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from protocol import messages as m

ROLES = ("coordinator", "server", "volunteer", "auditor")

HANDLERS = {
    "coordinator": "coordinator.live.core",
    "node": "node.core",
    "driver": "node.process.driver",
    "connector": "node.links.connector",
    "meter": "node.measure.meter",
    "front": "node.server.front",
    "back": "node.server.back",
    "pools": "node.server.pool",
    "shard": "node.server.shard",
    "ledger": "node.server.ledger",
    "decider": "node.server.decider",
    "buddy": "node.server.buddy",
    "audits": "node.server.pins",
    "desk": "node.server.audit_desk",
    "tails": "node.server.tails",
    "guard": "node.server.guard",
    "server": "node.server.intake",
    "volunteer": "node.volunteer.volunteer",
    "auditor": "node.volunteer.auditor",
}
"""Who takes messages, and the module in which to read on. Servers' roles get theirs from `node.server.intake`."""
OF_SERVER = (
    "front", "back", "pools", "shard", "ledger", "decider", "buddy", "audits", "desk", "tails", "guard", "server",
)  # fmt: skip
"""Handlers on a server, and …"""
OF_DEVICE = ("volunteer", "auditor")
"""… those beside a device, on a volunteer, an auditor, or a server that computes."""

Place = Literal[
    "",  # the receiver is no server's role, or the role says it all
    "worker",  # computes for the stage: a volunteer, or a server of the stage
    "fellow",  # a server of the stage
    "own shard",  # the server of the stage that holds the shard which the message names
    "any shard",  # the server that holds the shard of the stage which the message names
    "server",  # has a place in the plan
    "buddy",  # keeps copies of the receiver's shard
    "ledger",  # the stage's
    "ledger of stage",  # that of the stage which the message names
    "decider",
    "decider or ledger",
    "closes",  # the decider or a fellow; to the decider itself any server of the plan
    "back before",  # keeps what leaves the visit before the task's
    "front after",  # keeps what comes into the visit after the task's
    "front of task",
    "front of route",  # keeps what comes into the first visit of the task's microbatch
]
Traffic = Literal["control", "activation", "gradient", "weights", "measuring", "data", "checkpoint"]


class Kind(NamedTuple):
    """A row of the table.

    Attributes:
        message: the kind.
        ways: (sender's role, receiver's role) pairs that may exchange it.
        handlers: who takes it, names of `HANDLERS`.
        place: on a server, where in the plan the sender must stand.
        carries: what its tensors count as in barnraise_transport_bytes_total; a lease and an audited task count as
            what they hold (`protocol.link.codec.traffic_kind`).
        is_long: it holds a good part of a stage, or fills the line for a while: the rest takes turns with it, but a
            volunteer's results, which go before the sum of gradients of their step (`protocol.link.line`).
    """

    message: type[m.Message]
    ways: tuple[tuple[str, str], ...]
    handlers: tuple[str, ...]
    place: Place = ""
    carries: Traffic = "control"
    is_long: bool = False


_NODE = ("server", "volunteer", "auditor")
_C, _S, _V, _A = ROLES
ALL = tuple((a, b) for a in ROLES for b in ROLES)
UP = tuple((a, _C) for a in _NODE)
SERVER_UP = ((_S, _C),)
DOWN = tuple((_C, b) for b in _NODE)
LINKED = ((_V, _S), (_S, _V), (_S, _S), (_A, _S), (_S, _A))
# A server with a device computes as a volunteer does, so it speaks that conversation with its fellow servers.
BRING = ((_V, _S), (_S, _S))
GIVE = ((_S, _V), (_S, _S))
# An auditor computes what others have done, and nothing of its own: it needs the parameters, and gives opinions.
ASK = (*BRING, (_A, _S))
TELL = (*GIVE, (_S, _A))
AMONG = ((_S, _S),)
TO_AUDIT = (*AMONG, (_S, _A))
FROM_AUDIT = (*AMONG, (_A, _S))

KINDS: tuple[Kind, ...] = (
    # ---- every link
    Kind(m.Ping, ALL, ("node", "coordinator")),
    Kind(m.Pong, ALL, ("coordinator",)),  # to a node it says that the link lives, by having come
    Kind(m.Bye, ALL, ("node", "coordinator")),
    # ---- node and coordinator
    Kind(m.Join, UP, ("coordinator",)),
    Kind(m.Welcome, DOWN, ("driver", "node")),
    Kind(m.Refused, DOWN, ("node",)),
    Kind(m.PlanChanged, DOWN, ("driver", "connector", "node")),
    Kind(m.Survey, ((_C, _S),), ("node",)),
    Kind(m.DataReady, SERVER_UP, ("coordinator",)),
    Kind(m.StepReport, SERVER_UP, ("coordinator",)),
    Kind(m.StepReportStored, ((_C, _S),), ("node",)),
    Kind(m.NodeReport, UP, ("coordinator",)),
    Kind(m.LinkReport, UP, ("coordinator",)),
    Kind(m.RunFinished, DOWN, ("node",)),
    Kind(m.DrainOrder, DOWN, ("node",)),
    Kind(m.News, ((_C, _V),), ("node",)),
    Kind(m.Wrote, SERVER_UP, ("coordinator",)),
    Kind(m.Blamed, SERVER_UP, ("coordinator",)),
    Kind(m.Leave, UP, ("coordinator",)),
    Kind(m.FetchSpans, DOWN, ("driver",)),
    Kind(m.Spans, UP, ("coordinator",)),
    # A coordinator that lost its database hears of the bans that it has signed from whoever remembers them.
    Kind(m.Revoked, (*DOWN, *((_S, b) for b in _NODE), (_S, _C)), ("node", "coordinator")),
    Kind(m.Renewed, LINKED, ("driver",)),
    Kind(m.CoordinatorSeen, AMONG, ("node",)),
    Kind(m.Reach, DOWN, ("connector",)),
    Kind(m.Relays, DOWN, ("connector",)),
    Kind(m.Signal, (*UP, *DOWN), ("connector", "coordinator")),
    # ---- measuring
    Kind(m.MeasureAsk, LINKED, ("meter",)),
    Kind(m.MeasureData, LINKED, ("meter",), carries="measuring", is_long=True),
    Kind(m.MeasureGot, LINKED, ("meter",)),
    # ---- volunteer and server
    Kind(m.Ready, ASK, ("server", "front", "back"), "worker"),
    Kind(m.Lease, GIVE, ("volunteer",), carries="activation"),
    Kind(m.Summed, BRING, ("pools",), "worker"),
    Kind(m.Flush, GIVE, ("volunteer",)),
    Kind(m.Allowance, GIVE, ("volunteer",)),
    Kind(m.LeaseReturned, BRING, ("pools",), "worker"),
    Kind(m.Output, BRING, ("back", "guard"), "worker", "activation"),
    Kind(m.InputGradient, BRING, ("front", "guard"), "worker", "gradient"),
    Kind(m.Evaluated, BRING, ("front",), "worker"),
    Kind(m.Forget, GIVE, ("volunteer",)),
    Kind(m.FetchInput, BRING, ("front", "back"), "worker"),
    Kind(m.InputAnswer, GIVE, ("volunteer",), carries="activation"),
    Kind(m.FetchParameters, ASK, ("shard",), "worker"),
    Kind(m.Parameters, TELL, ("volunteer",), carries="weights", is_long=True),
    Kind(m.VersionReady, TELL, ("volunteer",)),
    Kind(m.Contribute, BRING, ("shard", "pools"), "worker", "gradient", is_long=True),
    Kind(m.Verdict, GIVE, ("shard", "guard", "volunteer"), "ledger"),
    # ---- server and server
    Kind(m.ServerReady, AMONG, ("server",), "server"),
    Kind(m.StageKey, AMONG, ("server",), "ledger"),
    Kind(m.Activation, AMONG, ("front",), "back before", "activation"),
    Kind(m.Labels, AMONG, ("front",), "front of route", "data"),
    Kind(m.Gradient, AMONG, ("back",), "front after", "gradient"),
    Kind(m.Held, AMONG, ("front", "back"), "server"),
    Kind(m.Stored, AMONG, ("ledger",), "own shard"),
    Kind(m.StepOpened, AMONG, ("server",), "decider or ledger"),
    Kind(m.StepClosed, TELL, ("server", "volunteer"), "closes"),
    Kind(m.Tail, AMONG, ("tails",), "fellow"),
    Kind(m.Freeze, AMONG, ("shard",), "ledger"),
    Kind(m.FrozenList, AMONG, ("shard",), "own shard"),
    Kind(m.PartialNorm, AMONG, ("ledger",), "own shard"),
    Kind(m.StageFrozen, AMONG, ("decider", "ledger"), "ledger of stage"),
    Kind(m.Validated, AMONG, ("decider",), "front of task"),
    Kind(m.Decision, AMONG, ("ledger",), "decider"),
    Kind(m.Commit, AMONG, ("shard",), "ledger"),
    Kind(m.Committed, AMONG, ("ledger",), "own shard"),
    Kind(m.StageCommitted, AMONG, ("decider",), "ledger of stage"),
    Kind(m.CheckpointPart, AMONG, ("decider",), "any shard"),
    Kind(m.CheckpointDone, AMONG, ("node",), "decider"),
    Kind(m.ShardCopy, AMONG, ("buddy",), "any shard", "checkpoint", is_long=True),
    Kind(m.CopyKept, AMONG, ("buddy",), "buddy"),
    Kind(m.FetchCopy, AMONG, ("buddy",), "any shard"),
    Kind(m.CopyGiven, AMONG, ("buddy",), "buddy", "checkpoint", is_long=True),
    # ---- audits
    Kind(m.Audit, TO_AUDIT, ("audits", "pools", "auditor"), "ledger"),
    Kind(m.AuditOver, TO_AUDIT, ("audits", "pools", "auditor"), "ledger"),
    Kind(m.FetchAudited, FROM_AUDIT, ("audits",), "fellow"),
    Kind(m.Audited, TO_AUDIT, ("auditor",), carries="activation"),
    Kind(m.AuditReport, FROM_AUDIT, ("desk",), "fellow"),
)  # fmt: skip

OF: dict[type[m.Message], Kind] = {kind.message: kind for kind in KINDS}
"""A kind's row."""
MESSAGES: tuple[type[m.Message], ...] = tuple(kind.message for kind in KINDS)
"""All kinds, in the order of the table, which is that of the golden messages."""
MAY_SEND: dict[type[m.Message], tuple[tuple[str, str], ...]] = {kind.message: kind.ways for kind in KINDS}
"""(sender's role, receiver's role) pairs that may exchange a kind of message. What is not here is refused."""


def taken_by(*handlers: str) -> tuple[type[m.Message], ...]:
    """The kinds that any of these takes."""
    return tuple(kind.message for kind in KINDS if not set(kind.handlers).isdisjoint(handlers))
