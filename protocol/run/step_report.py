"""What a step came to, by stage, and what the decider tells the coordinator of it."""

from __future__ import annotations

import msgspec

from protocol.base.bounded import Items, Number, Result
from protocol.base.message import Message, Work
from protocol.run.news import Share
from protocol.run.validation import ValidationLoss


class StageSum(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a stage's step came to, as its ledger told it."""

    square_norm: Result
    finite: bool
    loss_sum: Result


class StepReport(Work, frozen=True, kw_only=True):
    """The decider says that a step is closed everywhere. Repeated until acknowledged, so none is missed.

    Fenced like work: a report that was under way while the run went back to a checkpoint must not count. After a
    link-up, and when an acknowledgement names an earlier step, the decider repeats all that it still has, in order. The
    norm is that before clipping, `duration_s` its own from opening to closing, `changes` how many were in force.
    """

    step: Number
    loss: Result
    """Mean nats per token over the whole batch."""
    tokens: Number
    gradient_norm: Result
    clip_factor: float
    skipped: bool
    learning_rate: float
    duration_s: float
    shares: Items[Share] = ()
    """Who computed the step, by the ledgers of all stages: what credit is given for. No node twice."""
    changes: Number = 0
    validations: Items[ValidationLoss] = ()
    """Of the version that the step ran on; with the run's last step those of the versions that no step runs on, too."""


class StepReportStored(Message, frozen=True, kw_only=True):
    """The coordinator has stored reports up to and including `step`."""

    step: Number
