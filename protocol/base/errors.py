"""Errors, sorted by whose fault they are: the operator's, a peer's, or our own.

A bad peer can only ever cause `RemoteProtocolError`; our own mistakes are `LocalProtocolError` or a failed
assertion.
"""

from __future__ import annotations


class BadInputError(ValueError):
    """A file, an option or a value from the person at the keyboard is wrong.

    The message is one sentence that names the field; the command line prints it and exits with code 2.
    """


class ProtocolError(Exception):
    """Somebody broke the protocol. Raised only as one of its two children."""


class LocalProtocolError(ProtocolError):
    """We did: a bug of ours, never something that a peer can cause."""


class RemoteProtocolError(ProtocolError):
    """The peer did: its link is closed, the reason is logged and counted, nobody else is touched.

    Args:
        reason: one of the few words that the counters know (`protocol.base.limits.REJECT_REASONS`).
        detail: what was wrong, for the log; never sent to the peer.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class DialError(Exception):
    """No way led to the peer; the text says what each answered."""
