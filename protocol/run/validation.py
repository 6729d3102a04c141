"""What is said about the validation: loss sums of forwards that nobody trains on (`RunConfig.validates`)."""

from __future__ import annotations

import msgspec

from protocol.base.bounded import Number, Result
from protocol.base.ids import TaskId, Ticket
from protocol.base.message import Work


class Evaluated(Work, frozen=True, kw_only=True):
    """Volunteer to the front server of a route's end: the loss of a microbatch of the validation."""

    task: TaskId
    """The L task; the ticket is its lease's."""
    ticket: Ticket
    loss_sum: Result
    """Nats, over all labels of the microbatch; it may not be finite."""


class Validated(Work, frozen=True, kw_only=True):
    """Front server of a route's end to the decider: the same, of a version that all servers have committed."""

    task: TaskId
    loss_sum: Result


class ValidationLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a version of the weights comes to on text that was kept aside."""

    version: Number
    """Steps that made it."""
    loss: Result
    """Mean nats per token."""
    tokens: Number
