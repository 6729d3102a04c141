"""The credit of a whole run, signed by its coordinator: who gave how much, and how much of it was found right.

As a file it is JSON that people can read; the signature covers the ledger's canonical bytes. Anybody who knows the
coordinator's key (its node id) can check it, without asking anybody and for ever.
"""

from __future__ import annotations

import msgspec

from protocol.base.ids import NodeId
from protocol.trust.identity import Identity
from protocol.trust.signed_file import open_file, sign_file

CREDIT_LABEL = b"barnraise/credit/1\0"
"""Stands before every signed ledger: none can pass for a credential, nor the other way round."""
BYTES_MAX = 64 << 20
"""Of a file: 200,000 members of 300 bytes each."""


class CreditRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One member."""

    node: NodeId
    tasks: int
    """Whose weight gradients a ledger accepted."""
    tokens: int
    """Of those tasks, each on one stage."""
    audited: int
    """Tasks that were computed again and found right."""
    credited: int
    """Tasks that count: all, once enough of them were audited; none of whom audits or the operator put out."""
    since_unix_s: int
    until_unix_s: int
    why: str
    """Why nothing is credited, or nothing."""


class CreditLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one run, at one time."""

    run: str
    run_id: str
    """In hex."""
    written_unix_s: int
    rows: tuple[CreditRow, ...]


def sign_credit(ledger: CreditLedger, coordinator: Identity) -> bytes:
    """The file."""
    return sign_file("ledger", ledger, CREDIT_LABEL, coordinator)


def open_credit(data: bytes) -> tuple[CreditLedger, NodeId]:
    """The ledger of a file, and the coordinator that signed it: compare that with the one that you know.

    Raises:
        BadInputError: it is no such file, or was changed.
    """
    return open_file(data, "ledger", CreditLedger, CREDIT_LABEL, BYTES_MAX, "ledger of credit")
