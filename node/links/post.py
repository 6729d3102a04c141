"""Notes to peers by way of the coordinator, and the answers that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import randbits
from typing import NamedTuple

import trio

from node.links.ladder import COORDINATOR_AWAY
from node.links.notes import AnyNote, No, write_note
from protocol.base.errors import DialError
from protocol.base.ids import NodeId

ANSWER_S = 4.0
"""For a peer's answer: gathering of its candidates included (up to 1.5 s), two trips through the coordinator."""


class Heard(NamedTuple):
    """An answer, and the host at which the coordinator sees whoever gave it."""

    note: AnyNote
    seen_from: str


@dataclass(slots=True)
class _Pending:
    peer: NodeId
    answer: Heard | None = None
    arrived: trio.Event = field(default_factory=trio.Event)


class Post:
    """`send(peer, content)` hands a signal to the coordinator; False when there is no link to it."""

    def __init__(self, send: Callable[[NodeId, bytes], bool]) -> None:
        self._send = send
        self._pending: dict[int, _Pending] = {}

    def tell(self, peer: NodeId, note: AnyNote) -> None:
        """A note that wants no answer. Raises `DialError`."""
        if not self._send(peer, write_note(note)):
            raise DialError(COORDINATOR_AWAY)

    async def ask(self, peer: NodeId, make: Callable[[int], AnyNote], *, seconds: float = ANSWER_S) -> Heard:
        """The peer's answer to `make(number)`. Raises `DialError` when there is none, or it is a no."""
        number = randbits(62)
        pending = self._pending[number] = _Pending(peer)
        try:
            self.tell(peer, make(number))
            with trio.fail_after(seconds):
                await pending.arrived.wait()
        except trio.TooSlowError:
            raise DialError("the peer did not answer the signal") from None
        finally:
            del self._pending[number]
        if pending.answer is None:
            raise DialError("the coordinator has no link to the peer")
        if isinstance(pending.answer.note, No):
            raise DialError(f"the peer says: {pending.answer.note.reason}")
        return pending.answer

    def answered(self, peer: NodeId, note: AnyNote, seen_from: str) -> None:
        """An answer has come; one that nobody waits for, or that is another's, is forgotten."""
        pending = self._pending.get(note.number)
        if pending is not None and pending.peer == peer:
            pending.answer = Heard(note, seen_from)
            pending.arrived.set()

    def returned(self, peer: NodeId) -> None:
        """The coordinator could not hand over what we wrote to `peer`."""
        for pending in self._pending.values():
            if pending.peer == peer:
                pending.arrived.set()
