"""What two nodes that want a link write into signals: the form of `Signal.content`.

Nothing here is proven. A note may come from whoever carries signals, so the worst that acting upon it may cost is an
attempt: a connection to an address that could be public, a leg to a server of the plan, a puncher's answer (whose
offers are signed by themselves). The handshake decides whether there is a link.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from protocol.base.errors import BadInputError, LocalProtocolError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import ADDRESSES_MAX, CREDENTIAL_BYTES_MAX, NUMBER_MAX
from protocol.link.relay import MEETING_BYTES
from protocol.trust.membership import check_address

NOTE_BYTES_MAX = CREDENTIAL_BYTES_MAX
"""What `Signal.content` may hold."""
_ADDRESS_BYTES_MAX = 1024
"""Of all addresses in one note, which leaves room for the rest."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
_Addresses = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=256)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)]
_Node = Annotated[NodeId, msgspec.Meta(pattern=r"^[a-z2-7]{52}\Z")]
_Sealed = Annotated[bytes, msgspec.Meta(min_length=1, max_length=NOTE_BYTES_MAX)]


class Note(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all notes."""

    number: _Number
    """Drawn by whoever asks; an answer repeats it, so that a late one is told from a fresh one."""


class Knock(Note, frozen=True, array_like=True, tag="knock"):
    """I want a link with you: dial me if you can."""

    addresses: _Addresses
    """Where anybody can dial the sender."""
    local_addresses: _Addresses
    """Where its own network can."""


class KnockAnswer(Note, frozen=True, array_like=True, tag="here"):
    """I have heard; here is where I can be dialled."""

    addresses: _Addresses
    local_addresses: _Addresses


class Offer(Note, frozen=True, array_like=True, tag="offer"):
    """A puncher's signed offer."""

    content: _Sealed


class Answer(Note, frozen=True, array_like=True, tag="answer"):
    """The signed answer to an `Offer`."""

    content: _Sealed


class Meet(Note, frozen=True, array_like=True, tag="meet"):
    """Come to this server of the run; I shall be there under this meeting number."""

    relay: _Node
    meeting: Annotated[bytes, msgspec.Meta(min_length=MEETING_BYTES, max_length=MEETING_BYTES)]


class No(Note, frozen=True, array_like=True, tag="no"):
    """I will not, or cannot."""

    reason: Annotated[str, msgspec.Meta(max_length=256)]


AnyNote = Knock | KnockAnswer | Offer | Answer | Meet | No
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyNote] = msgspec.msgpack.Decoder(AnyNote)


def write_note(note: AnyNote) -> bytes:
    """The content of a signal. Raises `LocalProtocolError` when it does not fit into one."""
    content = _encoder.encode(note)
    if len(content) > NOTE_BYTES_MAX:
        raise LocalProtocolError(f"a {type(note).__name__} of {len(content)} bytes")
    return content


def read_note(content: bytes) -> AnyNote:
    """What a peer wrote. Raises `RemoteProtocolError` ("size" or "decode")."""
    if len(content) > NOTE_BYTES_MAX:
        raise RemoteProtocolError("size", f"a note of {len(content)} bytes")
    try:
        note = _decoder.decode(content)
        if isinstance(note, Knock | KnockAnswer):
            for address in (*note.addresses, *note.local_addresses):
                check_address(address)
    except (msgspec.MsgspecError, RecursionError, ValueError, BadInputError) as error:
        raise RemoteProtocolError("decode", f"a note: {error}") from None
    return note


def fitting(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """As many addresses, best first, as one list of a note may take."""
    kept: list[str] = []
    for address in addresses[:ADDRESSES_MAX]:
        if sum(map(len, kept)) + len(address) > _ADDRESS_BYTES_MAX // 2:
            break
        kept.append(address)
    return tuple(kept)
