"""What a run has undone, signed by its coordinator: whose work, back to where, and how many steps were done again.

Like the ledger of credit (`protocol.trust.credit`) a file of JSON that anybody can check without asking anybody.
"""

from __future__ import annotations

import msgspec

from protocol.base.ids import NodeId
from protocol.trust.identity import Identity
from protocol.trust.signed_file import open_file, sign_file

VOIDED_LABEL = b"barnraise/voided/1\0"
"""Stands before every signed list: none can pass for anything else that a coordinator signs."""
BYTES_MAX = 16 << 20
"""Of a file: each row names some members."""


class VoidRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One order of the operator."""

    nodes: tuple[NodeId, ...]
    reason: str
    first_step: int
    """The first step that any of them could have had a part in, counted from 0."""
    restore_step: int
    """The checkpoint that the run went back to; -1: its beginning."""
    lost_steps: int
    """Closed steps that were thrown away, and done again without them."""
    at_unix_s: int


class VoidList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one run, at one time, oldest first."""

    run: str
    run_id: str
    """In hex."""
    written_unix_s: int
    rows: tuple[VoidRow, ...]


def sign_voided(voided: VoidList, coordinator: Identity) -> bytes:
    """The file."""
    return sign_file("voided", voided, VOIDED_LABEL, coordinator)


def open_voided(data: bytes) -> tuple[VoidList, NodeId]:
    """The list of a file, and the coordinator that signed it: compare that with the one that you know.

    Raises:
        BadInputError: it is no such file, or was changed.
    """
    return open_file(data, "voided", VoidList, VOIDED_LABEL, BYTES_MAX, "list of what was undone")
