"""Messages of audits: work that is computed again by somebody reliable, after its result has come.

ledger ── Audit ──▶ the stage's servers (keep), and who is named, a server or an auditor (compute again)
auditor ── FetchAudited ──▶ servers ── Audited ──▶ auditor ── AuditReport ──▶ ledger
ledger ── AuditOver ──▶ the stage's servers and the auditor (let go, and who lied gets nothing)
ledger ── Blamed ──▶ coordinator (which bans)
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.base.bounded import Bytes, Items, Losses, Nodes, Number, Sentence, Tasks, Tensors, Text
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.message import Message, Work

Kept = Literal["input", "labels", "output_gradient", "output", "input_gradient", "part"]
"""What a server keeps of an audited task: what went in, and what members say came out; a shard its part of the sum."""
Claim = Literal["gradient", "loss", "output", "input_gradient", "lean"]
"""What a member can be wrong in. `lean`: its gradients, on average over many audits that passed."""
AUDIT_SLICE = 1
"""Tasks of an audit carry this in the field `slice`, so that a graph of theirs is never taken for a lease's."""
RESIDUAL_PARTS = 17
"""Numbers that a signed difference is told in: along the gradient, and in 16 directions that the stage keeps secret."""


class Audit(Work, frozen=True, kw_only=True):
    """Ledger to the servers of its stage, when the contribution lies durably on all shards: keep what belongs to these
    tasks until `AuditOver`. To the one named in `auditor`, later: compute them again."""

    contribution: ContributionId
    step: Number
    version: Number
    tasks: Tasks
    losses: Losses
    """Those of the L tasks among `tasks`, as they were claimed."""
    auditor: NodeId | None
    attempt: Number
    """0 while there is no auditor; 1, and 2 when the first found something and a second opinion is asked for."""
    directions: Bytes = b""
    """To an auditor: the seed of the directions in which it tells the gradient's signed difference."""


class AuditOver(Work, frozen=True, kw_only=True):
    """Ledger to the servers of its stage: nothing need be kept for it any more. `blamed`: who was found out."""

    contribution: ContributionId
    step: Number
    blamed: Nodes


class FetchAudited(Work, frozen=True, kw_only=True):
    """An auditor asks a server for what it keeps of a task (a backward); no task: for its part of the contribution."""

    contribution: ContributionId
    task: TaskId | None


class Audited(Work, frozen=True, kw_only=True):
    """The answer: of each tensor what it is, and who brought it; empty where the server keeps nothing (any more)."""

    contribution: ContributionId
    task: TaskId | None
    kept: Items[Kept]
    brought_by: Items[Text]
    """In the order of `kept`; empty text: a server's own."""
    tensors: Tensors


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far a member's claim lies from what was computed again: relative L2, at most 1e30."""

    claim: Claim
    node: NodeId
    task: TaskId
    """The one that differs most; of a gradient the first."""
    value: float
    residual: Items[float] = ()
    """Of a gradient: claimed less computed, over the length of what was computed, in `RESIDUAL_PARTS` numbers."""


class AuditReport(Work, frozen=True, kw_only=True):
    """Auditor to ledger: the largest difference of each member and kind of claim; `reason`: why there are none."""

    contribution: ContributionId
    step: Number
    attempt: Number
    differences: Items[Difference]
    reason: Sentence = ""


class Blamed(Message, frozen=True, kw_only=True):
    """Ledger to coordinator: two recomputations found a member's result false. Repeated at link-up."""

    node: NodeId
    contribution: ContributionId
    step: Number
    claim: Claim
    task: TaskId
    difference: float
    """The smaller one of the two."""
    auditors: Nodes
