"""What a volunteer tells servers of its leases: which it gives back, and which it has summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from node.machine.outbox import Outbox
from protocol.base.ids import NodeId, TaskId, TensorRef, Ticket
from protocol.messages import Evaluated, InputGradient, Lease, LeaseReturned, Output, Ready, Summed
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
        self._brought: dict[TaskId, tuple[NodeId, NodeId]] = {}
        """Tasks of open steps whose result another server than the one that leased them was sent: (to whom, who)."""

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

    def give_back(self, server: NodeId, tasks: tuple[TaskId, ...], reason: str, *, result_only: bool = False) -> None:
        if tasks and server in self._linked:
            generation = self.generation
            said = LeaseReturned(ledger_generation=generation, tasks=tasks, reason=reason, result_only=result_only)
            self._out.send(server, said)

    def reaches(self, server: NodeId) -> bool:
        """Whether it takes what is sent to it now."""
        return self._linked.get(server, False)

    def bring(self, task: TaskId, lease: Lease, issuer: NodeId, result: TensorRef) -> None:
        """A result, of all or of one segment: an output to the back server of its visit, an input gradient to the front
        one."""
        kind, to = (Output, lease.back) if task.op == "F" else (InputGradient, lease.front)
        self._out.send(to, kind(ledger_generation=self.generation, task=task, ticket=lease.ticket, tensors=(result,)))
        if issuer != to:
            self._brought[task.whole] = to, issuer

    def bring_evaluated(self, lease: Lease, issuer: NodeId, result: TensorRef | float) -> None:
        """A forward of the validation: its output goes on, its loss stays where labels are."""
        if isinstance(result, TensorRef):
            self.bring(lease.tasks[0], lease, issuer, result)
            return
        task, ticket = lease.tasks[1], lease.ticket
        loss = Evaluated(ledger_generation=self.generation, task=task, ticket=ticket, loss_sum=result)
        self._out.send(lease.front, loss)

    def server_begins(self, server: NodeId | None, has: Callable[[TaskId], bool]) -> None:
        """It takes work (again; None: all, at other nodes). What it was sent before may have been lost on the way, or
        came when it took none. Nobody has a copy, and whoever waits for it has heard of no broken link: so he gets his
        leases back, and gives those away that he still waits for. `has`: whether a forward is still here, which is
        asked for by its graph."""
        for task in [task for task, (to, _) in self._brought.items() if server in (None, to)]:
            if task.op == "B" or not has(task):
                self.give_back(self._brought.pop(task)[1], (task,), "its result may be lost", result_only=True)

    def leased_anew(self, task: TaskId) -> None:
        """Its result is still to come."""
        self._brought.pop(task, None)

    def link_down(self, issuer: NodeId) -> None:
        """It has given its leases to others: what is said of them afterwards would take newer ones away."""
        self._brought = {task: told for task, told in self._brought.items() if told[1] != issuer}

    def forget_steps(self, step: int | None) -> None:
        """Steps up to `step` (None: all) are closed."""
        self._brought = {task: told for task, told in self._brought.items() if step is not None and task.step > step}

    def give_untaken_back(self, forwards: Iterable[TaskId], plan: Plan) -> None:
        """Their outputs never left, so their leases are still ours: each front gives its own to somebody at once, and
        not when the lease's time is over."""
        for task in forwards:
            front = plan.front_of(task.step, task.microbatch, task.position)
            self.give_back(front, (task,), "nobody took its output")

    def give_all_back(self, tasks: tuple[TaskId, ...], reason: str) -> None:
        """To whoever gave them; and with its device it loses its links, so that nothing else is waited for."""
        self._brought.clear()
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
