"""Messages about how a run goes and who has given what: for people, not for the arithmetic."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.base.bounded import Bytes, Number, Sentence, Text
from protocol.base.ids import NodeId
from protocol.base.limits import CURVE_MAX
from protocol.base.message import Message


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks of one step whose weight gradients, brought by `node`, a ledger has accepted."""

    node: NodeId
    tasks: Number
    audited: Number = 0
    """Tasks of its, of this step or earlier ones, that audits have found right since its last share."""


class News(Message, frozen=True, kw_only=True):
    """Now and then, to a volunteer: how the run goes, and what the receiver has given by the ledgers' count."""

    step: Number
    """The newest closed step, or -1."""
    curve: Annotated[tuple[tuple[Number, float], ...], Meta(max_length=CURVE_MAX)] = ()
    """(step, mean loss in nats per token) of the whole run in at most `CURVE_MAX` even pieces, oldest first; the
    first is the first step's own loss, older coordinators tell the mean of its piece."""
    sample: Sentence = ""
    """What the model writes; empty: nobody has let it write yet."""
    sample_step: Number = -1
    """The checkpoint that wrote it."""
    hour_ratio: float = 0.0
    """The receiver's part of all tasks of the last hour, 0 to 1."""
    step_tasks: Number = 0
    """Its tasks in `step`."""
    thanks: Bytes = b""
    """What it has given for ever, signed (`protocol.trust.thanks`); empty: nothing yet."""
    build: Text = ""
    """The coordinator's, so that an owner hears of a newer one; empty: not said."""
    validated_step: Number = -1
    """The version whose loss on text that was kept aside is known last, by the steps that made it; -1: none is."""
    validation_loss: float = 0.0
    """That loss, in nats per token."""


class Wrote(Message, frozen=True, kw_only=True):
    """A server of the run has let the model of a checkpoint write a little: for people to see what it has learnt."""

    step: Number
    sample: Sentence
