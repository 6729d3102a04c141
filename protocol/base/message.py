"""What every message is; the kinds are in `protocol.messages`, those about trust in `protocol.trust.messages`."""

from __future__ import annotations

import msgspec

from protocol.base.bounded import Number


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The base of all messages; the class name is the tag on the wire."""


class Work(Message, frozen=True, kw_only=True):
    """A message about training work: fenced by the generation of the ledgers."""

    ledger_generation: Number
