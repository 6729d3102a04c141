"""What a volunteer has of others' work: leases that wait or run, and the graphs that its forwards left on the device.

A graph waits for its backward; who lacks one fetches the input and computes the forward again. Nothing here decides
when anything runs: it says what could.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from node.machine.jobs import DropGraphs
from node.machine.outbox import Outbox
from node.volunteer.leases import Held, backward_of, forward_of, is_validation
from node.volunteer.tenancy import Tenancy
from protocol.base.ids import NodeId, TaskId, Ticket
from protocol.messages import FetchInput, InputAnswer, Lease
from protocol.run.plan import Plan
from protocol.run.segments import SEGMENT_RUNS_MAX


class Holdings:
    """Of one device that works for one stage."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self.generation = -1
        """Of the ledgers."""
        self.leases: dict[TaskId, Held] = {}
        """Those that wait, by their first tasks."""
        self.graphs: dict[TaskId, Ticket] = {}
        """By forward."""
        self.unsent: set[TaskId] = set()
        """Of `graphs`: those whose output was ready while nobody was there who takes it, or may be lost with a link."""
        self.running: Held | None = None

    def all(self) -> list[Held]:
        """Leases that wait or run."""
        return [*self.leases.values(), *(() if self.running is None else (self.running,))]

    @property
    def of_tenant(self) -> Held | None:
        """What runs, if it is of a sample in segments."""
        return self.running if self.running is not None and self.running.tenancy is not None else None

    # ---- leases --------------------------------------------------------------------------------------------------

    def add(self, held: Held, segments: int = 1) -> None:
        """A new lease; one for the same work that waits here is replaced. `segments`: of its sample."""
        key = held.lease.tasks[0]
        self.unsent.discard(key)  # that lease is over
        before = self.leases.pop(key, None)
        if before is not None:
            self.drop(before)
        if segments > 1 and not is_validation(held.lease):
            if self.running is not None and self.is_running(key):
                assert self.running.tenancy is not None
                self.running.tenancy.replaced = True
            held.tenancy = Tenancy(held.lease, segments, key.op == "B" and forward_of(key) in self.graphs)
            self._ask(held)
        elif key.op == "F":
            held.input = held.lease.tensors[0]
        self.leases[key] = held

    def is_running(self, task: TaskId) -> bool:
        """Whether the device is at work on the lease that begins with `task`."""
        return self.running is not None and self.running.lease.tasks[0] == task

    def has_forward(self, task: TaskId) -> bool:
        """Whether it is still to be computed here, or its graph is kept."""
        return task in self.graphs or task in self.leases or self.is_running(task)

    def is_ending(self, task: TaskId, place: int) -> bool:
        """Whether the device is at work on the last job of the lease that begins with `task`: its weight gradient goes
        into a sum with it, so the same work must not begin anew. Of a sample in segments it may before; and what was
        begun at another place than `place` comes to nothing."""
        if self.running is None or self.running.place != place:
            return False
        tenancy = self.running.tenancy
        return self.is_running(task) and (tenancy is None or tenancy.over)

    def has_what_it_needs(self, held: Held) -> bool:
        """Whether its input or its graph is here, and of a sample in segments the next one's."""
        if held.tenancy is not None:
            return held.tenancy.ready() and (held.tenancy.begun or self._may_begin(held, held.tenancy))
        key = held.lease.tasks[0]
        return held.input is not None or (key.op == "B" and forward_of(key) in self.graphs)

    def _may_begin(self, held: Held, tenancy: Tenancy) -> bool:
        """Forward and backward of one visit share what the device has of it: one begins when the other has ended, or a
        forward when the backward can get no further. It is leased again when its output is lost, and before there is
        another one nothing will come that the backward waits for."""
        key, begun = held.lease.tasks[0], False
        for other in self.all():
            waits = other is not held and other.tenancy is not None and other.tenancy.begun
            if waits and forward_of(other.lease.tasks[0]) == forward_of(key):
                begun |= key.op == "B" or other is self.running or self._is_ready(other)
        return not begun and self._has_room(tenancy)

    def _is_ready(self, held: Held) -> bool:
        return held.tenancy is not None and held.tenancy.ready()

    def _has_room(self, tenancy: Tenancy) -> bool:
        """Of those that need room for a graph beside the counted ones, one may wait for parts of its input, and one
        more pass that has all: so what is complete never waits for what is not."""
        passing = [held for held in self.all() if held.tenancy and held.tenancy.begun and held.tenancy.passes_through]
        return not tenancy.passes_through or not passing or (len(passing) < SEGMENT_RUNS_MAX and tenancy.complete)

    def begin(self, held: Held) -> None:
        """The device starts with it; a backward uses its graph up."""
        key = held.lease.tasks[0]
        del self.leases[key]
        self.running = held
        if held.tenancy is not None:
            had = self.graphs.pop(forward_of(key), None) is not None
            if key.op == "F" and not held.tenancy.begun:
                for each in self.leases.values():  # it is made anew: a backward that counts on it begins from inputs
                    if each.tenancy is None or forward_of(each.lease.tasks[0]) != forward_of(key):
                        continue
                    if each.tenancy.begun:
                        self._out.compute(DropGraphs((forward_of(key),)))
                    if had or each.tenancy.begun:
                        each.tenancy.lose_graph()
                        self._ask(each)
        elif key.op == "B" and held.input is None:
            del self.graphs[forward_of(key)]

    def pause(self, now: float) -> None:
        """The device is done with one segment of what ran; the next one waits for its turn."""
        held, self.running = self.running, None
        assert held is not None
        held.received = now
        self.leases[held.lease.tasks[0]] = held

    def end(self) -> Held:
        """The device is done with what ran."""
        held, self.running = self.running, None
        assert held is not None
        self.drop(held)
        return held

    def take_late(self, now: float) -> list[Held]:
        """Leases that are over on our side."""
        late = [key for key, held in self.leases.items() if now >= held.received + held.lease.deadline_s]
        return self._take(late)

    def take_all(self) -> list[Held]:
        """All that have not begun."""
        return self._take(list(self.leases))

    def take_version(self, version: int) -> list[Held]:
        """All that wait to be computed on a version."""
        return self._take([key for key, held in self.leases.items() if held.lease.version == version])

    def _take(self, keys: list[TaskId]) -> list[Held]:
        taken = [self.leases.pop(key) for key in keys]
        for held in taken:
            self.drop(held)
        return taken

    def drop(self, held: Held) -> None:
        """Lets go of its tensors, and of what the device has of it while it waits."""
        if held.tenancy is not None:
            self._out.drop((*held.lease.tensors, *held.tenancy.tensors()))
            if held.tenancy.begun and not held.tenancy.over:
                self._out.compute(DropGraphs((forward_of(held.lease.tasks[0]),)))
            return
        own = () if held.input is None or held.input in held.lease.tensors else (held.input,)
        self._out.drop((*held.lease.tensors, *own))

    def first_deadline(self) -> float | None:
        if not self.leases:  # asked after every input
            return None
        return min((held.received + held.lease.deadline_s for held in self.leases.values()), default=None)

    def busy_steps(self) -> list[int]:
        """Steps of leases that wait, or run, and whose weight gradients are still to come."""
        here = (*self.leases.values(), *((self.running,) if self.running is not None else ()))
        training = [held.lease.tasks for held in here if not is_validation(held.lease)]
        return [tasks[0].step for tasks in training if tasks[0].op == "B" or len(tasks) > 1]

    # ---- inputs --------------------------------------------------------------------------------------------------

    def fetch_input(self, lease: Lease) -> None:
        fetch = FetchInput(ledger_generation=self.generation, task=forward_of(lease.tasks[0]), ticket=lease.ticket)
        self._out.send(lease.front, fetch)

    def fetch_missing_inputs(self, front: NodeId) -> None:
        """The front takes questions (again)."""
        for held in self.leases.values():
            if held.tenancy is not None:
                self._ask(held, front)
                continue
            missing = held.input is None and forward_of(held.lease.tasks[0]) not in self.graphs
            if held.lease.front == front and missing:
                self.fetch_input(held.lease)

    def _ask(self, held: Held, only: NodeId | None = None, part: TaskId | None = None) -> None:
        """Asks for all segments that have not come; `only`: of this server, `part`: only for this one."""
        assert held.tenancy is not None
        for server, task in held.tenancy.missing():
            if only in (None, server) and part in (None, task):
                fetch = FetchInput(ledger_generation=self.generation, task=task, ticket=held.lease.ticket)
                self._out.send(server, fetch)

    def _on_segment(self, message: InputAnswer, now: float) -> None:
        """A server answers once to whoever asks twice for the same, as a forward and a backward of one visit do. What
        has begun holds the other up, so it comes first, and the other asks again."""
        whole, task = message.task.whole, message.task
        same = [(held, held.tenancy) for held in self.all() if held.tenancy is not None]
        same = [each for each in same if msgspec.structs.replace(each[0].lease.tasks[0], op=whole.op) == whole]
        same.sort(key=lambda each: not each[1].begun)
        if not message.tensors:
            for held, tenancy in same:
                held.stalled |= any(missing == task for _, missing in tenancy.missing())
            return
        taken = next((held for held, tenancy in same if tenancy.take(task, message.tensors[0])), None)
        if taken is None:
            self._out.drop(message.tensors)
            return
        taken.received = now
        for held, _ in same:
            self._ask(held, part=task)

    def on_input(self, message: InputAnswer, now: float, segments: int = 1) -> None:
        """What was asked for. `segments`: of the run's samples; then a lease's time begins with the newest part."""
        if segments > 1:
            self._on_segment(message, now)
            return
        held = self.leases.get(backward_of(message.task))
        if held is None or held.input is not None:
            self._out.drop(message.tensors)
        elif message.tensors:
            held.input = message.tensors[0]
        else:
            held.stalled = True

    # ---- graphs --------------------------------------------------------------------------------------------------

    def keep_graph(self, forward: TaskId, ticket: Ticket, *, sent: bool) -> None:
        """The device has it. `sent`: somebody was there who takes its output."""
        self.graphs[forward] = ticket
        if not sent:
            self.unsent.add(forward)

    def link_down(self, peer: NodeId, plan: Plan | None, linked: Container[NodeId]) -> None:
        """What was on its way to a back server may be lost. Whether an output was, it says when it is back: by whether
        it asks for the backward. A front whose link ends has given its leases to others. `linked`: who is left."""
        for task in self.graphs:
            visit = task.step, task.microbatch, task.position
            if plan is None or plan.front_of(*visit) not in linked:
                self.unsent.discard(task)
            elif plan.back_of(*visit) == peer:
                self.unsent.add(task)
        for held in self.all():
            held.is_old |= held.issuer == peer
            if held.tenancy is not None and held.tenancy.begun and peer in (held.lease.front, held.lease.back):
                held.tenancy.unsent = held.lease.front in linked

    def forget_graphs(self, tasks: Iterable[TaskId]) -> list[TaskId]:
        """Graphs that nobody will ask for make room, unless a lease for one has come by the same link; which of their
        outputs never left."""
        wanted = {key for key, held in self.leases.items() if not held.is_old}
        wanted |= set() if self.running is None else {backward_of(self.running.lease.tasks[0])}
        found = tuple(task for task in tasks if task in self.graphs and backward_of(task) not in wanted)
        self._take([backward_of(task) for task in found if backward_of(task) in self.leases])
        unsent = [task for task in found if task in self.unsent]
        self._drop_graphs(found)
        return unsent

    def make_room(self) -> None:
        """All graphs go; leases that count on one fetch the input instead."""
        forwards = tuple(self.graphs)
        self._drop_graphs(forwards)
        for key, held in self.leases.items():
            if held.tenancy is not None:
                if held.tenancy.begun or (key.op == "B" and forward_of(key) in forwards):
                    self._out.compute(DropGraphs((forward_of(key),)))
                    held.tenancy.lose_graph()
                    self._ask(held)
            elif key.op == "B" and held.input is None and forward_of(key) in forwards:
                self.fetch_input(held.lease)

    def forget_steps(self, step: int | None) -> None:
        """Steps up to `step` (None: all) are closed."""
        self._take([key for key in self.leases if step is None or key.step <= step])
        self._drop_graphs(tuple(task for task in self.graphs if step is None or task.step <= step))

    def _drop_graphs(self, tasks: tuple[TaskId, ...]) -> None:
        for task in tasks:
            del self.graphs[task]
        self.unsent &= self.graphs.keys()
        if tasks:
            self._out.compute(DropGraphs(tasks))

    def lose_all(self) -> list[Held]:
        """The device is gone, and all graphs with it: returns every lease that waited or ran."""
        held = self.all()
        self.leases, self.running = {}, None
        self.graphs.clear()
        self.unsent.clear()
        for one in held:
            if one.tenancy is not None:
                one.tenancy.lose_graph()
            self.drop(one)
        return held

    def check(self, closed: int) -> None:
        for key in self.leases:
            assert key.step > closed, f"a lease of closed step {key.step} is kept"
        for task in self.graphs:
            assert task.step > closed, f"a graph of closed step {task.step} is kept (L3)"
