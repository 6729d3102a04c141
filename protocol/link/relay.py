"""What two nodes say to a server that shall carry bytes between them: the form of a relay leg.

    node                                              server
      preamble: name of this protocol, meeting  ──▶
      handshake of `protocol.trust.handshake`, with the meeting in its prologue
                                                ◀──   one byte: 0 go, or why not
      bytes of the link, untouched              ◀─▶   bytes of the link, untouched

Both nodes come with the same meeting number, which they agreed on over a signal. The handshake proves to the server
that both are members of the run, and to them that it is the server they chose. What they then say to each other
begins with a handshake of their own, so the server sees ciphertext, and a wrong guest at a meeting is found out.
"""

from __future__ import annotations

from protocol.base.errors import RemoteProtocolError

MAGIC = b"brrelay1"
"""Comes first. A handshake begins with the length of its first message, a zero byte, so the two cannot be confused."""
MEETING_BYTES = 16
PREAMBLE_BYTES = len(MAGIC) + MEETING_BYTES

REFUSALS = (
    "",
    "full",  # it carries as many sessions as it will
    "busy",  # this node has as many sessions or legs that wait as one may have
    "quota",  # it has relayed as many bytes as its owner allows
    "alone",  # the other node did not come
    "taken",  # the meeting has its two nodes already
    "ending",  # the server ends
)
"""Answers of a relay, by their byte; the first one means go."""


def preamble(meeting: bytes) -> bytes:
    """The first bytes of a leg. `meeting`: 16 random bytes."""
    assert len(meeting) == MEETING_BYTES
    return MAGIC + meeting


def split_preamble(data: bytes) -> tuple[bytes, bytes] | None:
    """(meeting, what came behind the preamble); None when more bytes are needed. Raises `RemoteProtocolError`."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise RemoteProtocolError("decode", "not the preamble of a relay leg")
    if len(data) < PREAMBLE_BYTES:
        return None
    return data[len(MAGIC) : PREAMBLE_BYTES], data[PREAMBLE_BYTES:]


def leg_prologue(meeting: bytes) -> bytes:
    """Of the handshake between a node and the relay."""
    return b"relay leg" + meeting


def link_prologue(meeting: bytes) -> bytes:
    """Of the handshake between the two nodes, through the relay."""
    return b"relayed" + meeting


def refusal_of(answer: int) -> str:
    """Why the relay does not carry us; empty: it does. Raises `RemoteProtocolError`."""
    if answer >= len(REFUSALS):
        raise RemoteProtocolError("decode", f"a relay answered {answer}")
    return REFUSALS[answer]
