"""What a volunteer has given to a run, signed by the run's coordinator: for the owner to keep and to show.

It counts what the stages' ledgers have accepted, never the volunteer's own word. Anybody who knows the coordinator's
public key can check it, without asking anybody and for ever: it has no end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import CREDENTIAL_BYTES_MAX, NUMBER_MAX, PUBLIC_NAME_MAX
from protocol.base.printable import is_printable
from protocol.trust.identity import SIGNATURE_BYTES, Identity, verify_signature
from protocol.trust.membership import RUN_ID_BYTES

THANKS_LABEL = b"barnraise/thanks/1\0"
"""Stands before every signed body: no thanks can pass for a credential, nor the other way round."""
_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Text = Annotated[str, msgspec.Meta(max_length=PUBLIC_NAME_MAX)]


class Thanks(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """One volunteer's contribution to one run since its beginning. 160 bytes, and the signature."""

    run_id: Annotated[bytes, msgspec.Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]
    run: _Text
    """The run's name."""
    node: Annotated[NodeId, msgspec.Meta(pattern=r"^[a-z2-7]{52}\Z")]
    name: _Text
    """The owner's public name when it was signed, or nothing."""
    tasks: _Number
    """Whose weight gradients a ledger accepted."""
    tokens: _Number
    """Of those tasks, each on one stage."""
    working_s: _Number
    """The length of all steps in which at least one task was accepted."""
    since_unix_s: _Number
    """When the first was, by the coordinator's clock."""
    until_unix_s: _Number
    """When this was signed."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Thanks)


def sign_thanks(thanks: Thanks, coordinator: Identity) -> bytes:
    """The canonical bytes, followed by the coordinator's signature over label and bytes."""
    body = _encoder.encode(thanks)
    return body + coordinator.sign(THANKS_LABEL + body)


def open_thanks(signed: bytes, coordinator_key: bytes) -> Thanks:
    """What `sign_thanks` made. Raises `RemoteProtocolError` with the reason "size", "signature" or "decode"."""
    if not SIGNATURE_BYTES < len(signed) <= CREDENTIAL_BYTES_MAX:
        raise RemoteProtocolError("size", f"thanks of {len(signed)} bytes")
    body, signature = signed[:-SIGNATURE_BYTES], signed[-SIGNATURE_BYTES:]
    if not verify_signature(coordinator_key, THANKS_LABEL + body, signature):
        raise RemoteProtocolError("signature", "thanks that the run's coordinator did not sign")
    try:
        thanks = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RemoteProtocolError("decode", f"thanks that cannot be read: {error}") from None
    if _encoder.encode(thanks) != body or not (is_printable(thanks.run) and is_printable(thanks.name)):
        raise RemoteProtocolError("decode", "thanks that are not in their canonical form")
    return thanks
