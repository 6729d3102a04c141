"""What a volunteer tells servers of its leases: which it gives back, and which it has summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from node.machine.outbox import Outbox
from protocol.base.ids import NodeId, TaskId, Ticket
from protocol.messages import Lease, LeaseReturned, Ready, Summed
from protocol.run.plan import Plan


class Words:
    """`linked`: servers of the stage with a live link; nobody else is told anything."""

    def __init__(self, out: Outbox, linked: dict[NodeId, bool]) -> None:
        self._out = out
        self._linked = linked
        self.generation = -1
        """Of the ledgers."""
        self.unasked: dict[NodeId, None] = {}
        """Servers that have just begun to take work, and have heard nothing since that we work for them."""

    def greet(self, server: NodeId, hello: bool, graphs: dict[TaskId, Ticket], summed: dict[TaskId, Ticket]) -> None:
        """Asks whether the shard is ready (`hello`), and says what is still here."""
        kept, tickets = tuple(graphs), tuple(graphs.values())
        here = Ready(ledger_generation=self.generation, hello=hello, slots=0, graphs=kept, tickets=tickets)
        self._out.send(server, here)
        self.tell_summed(server, summed, complete=True)

    def ask(self, server: NodeId, ready: Ready) -> None:
        """Gives it slots."""
        self._out.send(server, ready)
        self.unasked.pop(server, None)

    def take_unasked(self) -> tuple[NodeId, ...]:
        unasked = tuple(self.unasked)
        self.unasked.clear()
        return unasked

    def give_back(self, server: NodeId, tasks: tuple[TaskId, ...], reason: str) -> None:
        if tasks and server in self._linked:
            self._out.send(server, LeaseReturned(ledger_generation=self.generation, tasks=tasks, reason=reason))

    def reaches(self, server: NodeId) -> bool:
        """Whether what is said to it now can arrive."""
        return server in self._linked

    def give_untaken_back(self, forwards: Iterable[TaskId], plan: Plan) -> None:
        """Their outputs never left, so their leases are still ours: each front gives its own to somebody at once, and
        not when the lease's time is over."""
        for task in forwards:
            front = plan.front_of(task.step, task.microbatch, task.position)
            self.give_back(front, (task,), "nobody took its output")

    def give_all_back(self, tasks: tuple[TaskId, ...], reason: str) -> None:
        """To whoever gave them."""
        for server in self._linked:
            self.give_back(server, tasks, reason)

    def say_summed(self, issuer: NodeId, lease: Lease, has: Callable[[TaskId], bool]) -> None:
        """The lease's result clock may stop: what it waits for from here on is our contribution. `has`: whether that
        has a task's weight gradient, or will have it."""
        summed = {task: lease.ticket for task in lease.tasks if task.op == "B" and has(task)}
        if summed and issuer in self._linked:
            self.tell_summed(issuer, summed, complete=False)

    def tell_summed(self, server: NodeId, summed: dict[TaskId, Ticket], complete: bool) -> None:
        tasks, tickets = tuple(summed), tuple(summed.values())
        words = Summed(ledger_generation=self.generation, tasks=tasks, tickets=tickets, complete=complete)
        self._out.send(server, words)
