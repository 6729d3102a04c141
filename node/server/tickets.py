"""Lease tickets: a node's proof that a server of the stage gave it the work whose result it brings.

A ticket is a MAC (keyed BLAKE2b, RFC 7693) over ledger generation, node, task and fence, under a key that only the
servers of the stage have. Whoever hands out a lease makes it, any server of the stage can check it, also after a
restart and without asking who made it: the ledger draws the key once for its generation, and every server of the
stage keeps it on its disk. So a result counts only from a node that really had the lease, and nobody can name a step
that has not begun, because nobody has a ticket for it.

Of several leases of one task any may answer, whichever comes first: an older one whose worker was slow is as good as
the newest, and once one has answered the others are too late (the pools and the ledger see to that).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Sequence

import msgspec

from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import TICKET_BYTES, NodeId, TaskId, Ticket
from protocol.messages import Contribute, Evaluated, FetchInput, InputGradient, Output, Ready, Summed, Work

KEY_BYTES = 32
NEED_LEASE = (Output, InputGradient, Evaluated, FetchInput, Contribute, Summed)
"""What only somebody with a lease can say."""


class TicketOffice:
    """Makes and checks the tickets of one stage and ledger generation.

    Args:
        first_fence: fences of this server begin above it. Drawn anew for each start of a process, so that a ticket
            that was made before a restart is never made a second time.
    """

    def __init__(self, generation: int, first_fence: int = 0) -> None:
        self._generation = generation
        self._key = b""
        self._fence = first_fence

    @property
    def open(self) -> bool:
        """Whether the key is known: before, no lease is given and no result can be checked."""
        return bool(self._key)

    @property
    def key(self) -> bytes:
        return self._key

    def set_key(self, key: bytes) -> None:
        self._key = key

    def next_fence(self) -> int:
        """A number that no lease of this server had before."""
        self._fence += 1
        return self._fence

    def issue(self, node: NodeId, task: TaskId, fence: int) -> Ticket:
        """The ticket of a lease; `task` is the last of its tasks: a forward, a backward or a loss to validate."""
        return Ticket(fence, self._mac(node, task, fence))

    def check(self, node: NodeId, task: TaskId, ticket: Ticket) -> None:
        """Raises `RemoteProtocolError` ("signature") unless `node` was given a lease of `task` with this fence."""
        if not hmac.compare_digest(self._mac(node, task, ticket.fence), ticket.mac):
            raise RemoteProtocolError("signature", f"no lease of {task} with fence {ticket.fence} was given to it")

    def check_message(self, peer: NodeId, message: Work) -> None:
        """The same for everything in a message that needs a lease."""
        if isinstance(message, FetchInput):
            self._check_fetch(peer, message)
            return
        for task, ticket in _claims(message):
            self.check(peer, task, ticket)

    def _check_fetch(self, peer: NodeId, message: FetchInput) -> None:
        """What goes into a forward is asked for by who recomputes for its backward, or has the forward's own lease of
        a sample in segments."""
        task = message.task.whole
        if task.op == "F" and hmac.compare_digest(self._mac(peer, task, message.ticket.fence), message.ticket.mac):
            return
        self.check(peer, msgspec.structs.replace(task, op="B"), message.ticket)

    def _mac(self, node: NodeId, task: TaskId, fence: int) -> bytes:
        words = msgspec.msgpack.encode((self._generation, node, task, fence))
        return hashlib.blake2b(words, digest_size=TICKET_BYTES, key=self._key, person=b"br-lease-ticket").digest()


def _claims(message: Work) -> Iterator[tuple[TaskId, Ticket]]:
    """What a message says its sender was given. Raises `RemoteProtocolError` ("decode") where tickets are missing."""
    match message:
        case Output() | InputGradient() | Evaluated():
            yield message.task.whole, message.ticket
        case Ready():
            yield from _pairs(message.graphs, message.tickets)
        case Contribute() | Summed():
            yield from _pairs(leased_tasks(message.tasks), message.tickets)
        case _:
            pass


def leased_tasks(tasks: Sequence[TaskId]) -> tuple[TaskId, ...]:
    """The tasks that the tickets of a contribution name, in its order: the backwards. A loss has no ticket of its own,
    since it is leased together with the backward that follows it.

    Raises:
        RemoteProtocolError: ("decode") a loss without its backward, or a task that leaves no gradient: no ticket would
            be asked for it, and whoever has none could fill the disk.
    """
    if other := next((task for task in tasks if task.op not in ("B", "L")), None):
        raise RemoteProtocolError("decode", f"{other} leaves no weight gradient")
    backwards = tuple(task for task in tasks if task.op == "B")
    begun = {(task.step, task.microbatch, task.position + 1) for task in backwards}
    for task in tasks:
        if task.op == "L" and (task.step, task.microbatch, task.position) not in begun:
            raise RemoteProtocolError("decode", f"{task} without the backward that was leased with it")
    return backwards


def _pairs(tasks: Sequence[TaskId], tickets: Sequence[Ticket]) -> Iterator[tuple[TaskId, Ticket]]:
    if len(tasks) != len(tickets):
        raise RemoteProtocolError("decode", f"{len(tickets)} tickets for {len(tasks)} leases")
    yield from zip(tasks, tickets, strict=True)
