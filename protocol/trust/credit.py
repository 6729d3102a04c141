"""The credit of a whole run, signed by its coordinator: who gave how much, and how much of it was found right.

As a file it is JSON that people can read; the signature covers the ledger's canonical bytes. Anybody who knows the
coordinator's key (its node id) can check it, without asking anybody and for ever.
"""

from __future__ import annotations

import msgspec

from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.trust.identity import Identity, node_id, verify_signature

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


class _Signed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ledger: CreditLedger
    coordinator_key: bytes
    """In base64, as the signature."""
    signature: bytes


def sign_credit(ledger: CreditLedger, coordinator: Identity) -> bytes:
    """The file."""
    signature = coordinator.sign(CREDIT_LABEL + msgspec.json.encode(ledger))
    signed = _Signed(ledger=ledger, coordinator_key=coordinator.public_key, signature=signature)
    return msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"


def open_credit(data: bytes) -> tuple[CreditLedger, NodeId]:
    """The ledger of a file, and the coordinator that signed it: compare that with the one that you know.

    Raises:
        BadInputError: it is no such file, or was changed.
    """
    try:
        signed = msgspec.json.decode(data[: BYTES_MAX + 1], type=_Signed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadInputError(f"no ledger of credit: {error}") from None
    body = CREDIT_LABEL + msgspec.json.encode(signed.ledger)
    if len(signed.coordinator_key) != 32 or not verify_signature(signed.coordinator_key, body, signed.signature):
        raise BadInputError("the ledger of credit was changed after it was signed")
    return signed.ledger, node_id(signed.coordinator_key)
