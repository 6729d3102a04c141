"""Files of JSON that a coordinator signs: people can read them, and anybody who knows its key can check them for ever.

    {NAME: the statement, "coordinator_key": base64, "signature": base64}

The signature covers a label, which no other kind of statement has, and the statement's canonical bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.trust.identity import Identity, node_id, verify_signature

_S = TypeVar("_S", bound=msgspec.Struct)


def sign_file(name: str, statement: msgspec.Struct, label: bytes, coordinator: Identity) -> bytes:
    """The file."""
    signature = coordinator.sign(label + msgspec.json.encode(statement))
    signed = {name: statement, "coordinator_key": coordinator.public_key, "signature": signature}
    return msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"


def open_file(data: bytes, name: str, kind: type[_S], label: bytes, bytes_max: int, what: str) -> tuple[_S, NodeId]:
    """The statement of a file, and the coordinator that signed it: compare that with the one that you know.

    Args:
        what: the statement's name for people, without its article.

    Raises:
        BadInputError: it is no such file, or was changed.
    """
    fields = [(name, kind), ("coordinator_key", bytes), ("signature", bytes)]
    signed_kind = msgspec.defstruct("Signed", fields, forbid_unknown_fields=True)
    try:
        signed: Any = msgspec.json.decode(data[: bytes_max + 1], type=signed_kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadInputError(f"no {what}: {error}") from None
    statement: _S = getattr(signed, name)
    body = label + msgspec.json.encode(statement)
    if len(signed.coordinator_key) != 32 or not verify_signature(signed.coordinator_key, body, signed.signature):
        raise BadInputError(f"the {what} was changed after it was signed")
    return statement, node_id(signed.coordinator_key)
