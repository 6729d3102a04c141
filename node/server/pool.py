"""A pool of unfinished tasks: what is free, who has a lease, what still has to come back.

One entry is one unit of work: an F, a B, or the F, L and B of a route's end. It is finished when its result (the
output, or the input gradient) is held by a server and its weight gradient is covered by the ledger; each of the two
can be lost and needed again on its own (state-and-trust 4.1). A fence number tells a lease from the one before.

Leases only save work. That no gradient counts twice is the ledger's doing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node.waits import Wait, work_name
from protocol.ids import NodeId, TaskId, TensorRef


@dataclass(slots=True)
class Entry:
    """One unit of work. It is leased when `worker` is set, and finished when it needs nothing any more."""

    tasks: tuple[TaskId, ...]
    needs_result: bool
    needs_gradient: bool
    tensors: tuple[TensorRef, ...] | None = None
    """What goes out with the lease; None while it has not all come."""
    preferred: NodeId | None = None
    """The volunteer that still has the graph: it gets the task first, and without using a slot."""
    worker: NodeId | None = None
    fence: int = 0
    deadline: float = 0.0
    issued_count: int = 0

    @property
    def finished(self) -> bool:
        return not (self.needs_result or self.needs_gradient)

    @property
    def free(self) -> bool:
        return self.worker is None and self.tensors is not None and not self.finished


@dataclass(slots=True)
class Worker:
    """A volunteer with a live link to this server."""

    node: NodeId
    is_server: bool
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that the pool has just given."""

    entry: Entry
    worker: NodeId
    has_graph: bool
    more: bool


class Pool:
    """The pool of one role of one server.

    Args:
        lease_s: after so many seconds an unfinished task goes to somebody else.
        collocated: `always`, `never`, or `when_empty`: servers get leases only while no volunteer is linked.
    """

    def __init__(self, lease_s: float, collocated: str) -> None:
        self._lease_s = lease_s
        self._collocated = collocated
        self._entries: dict[TaskId, Entry] = {}
        self._of_task: dict[TaskId, Entry] = {}
        self._workers: dict[NodeId, Worker] = {}
        self._fence = 0
        self._dirty = False
        """Something has changed since the last grant that may allow another one."""
        self.reissued_count = 0

    # ---- workers -------------------------------------------------------------------------------------------------

    def worker_here(self, node: NodeId, is_server: bool) -> None:
        """A link to somebody who may compute is up: it starts without slots."""
        self._dirty = True
        self._workers[node] = Worker(node, is_server)

    def worker_gone(self, node: NodeId) -> None:
        """Its leases are free at once, and its graphs are lost."""
        self._dirty = True
        self._workers.pop(node, None)
        for entry in self._entries.values():
            if entry.preferred == node:
                entry.preferred = None
            if entry.worker == node:
                entry.worker = None

    def add_slots(self, node: NodeId, slots: int, slots_max: int) -> None:
        """The worker takes `slots` more leases."""
        self._dirty = True
        worker = self._workers.get(node)
        if worker is None:
            return
        worker.slots = min(worker.slots + slots, slots_max)

    def prefer(self, task: TaskId, node: NodeId) -> bool:
        """`node` has the graph that this backward needs. Returns whether it will be asked for it."""
        entry = self._of_task.get(task)
        if entry is None or entry.finished or node not in self._workers:
            return False
        if entry.preferred is None:
            entry.preferred = node
        return entry.preferred == node

    @property
    def volunteer_count(self) -> int:
        return sum(not worker.is_server for worker in self._workers.values())

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        self._dirty = True
        assert entry.tasks[0] not in self._of_task, f"{entry.tasks[0]} is in the pool already"
        self._entries[entry.tasks[0]] = entry
        for task in entry.tasks:
            self._of_task[task] = entry

    def supply(self, task: TaskId, tensors: tuple[TensorRef, ...]) -> None:
        """All that the task needs has come: it can be leased."""
        self._dirty = True
        entry = self._of_task.get(task)
        if entry is not None:
            entry.tensors = tensors

    def result_held(self, task: TaskId) -> None:
        entry = self._of_task.get(task)
        if entry is not None and entry.needs_result:
            entry.needs_result = False
            self._release_if_finished(entry)

    def result_lost(self, task: TaskId) -> None:
        """The server that held the result has lost it: the task has to be done again, perhaps for that alone."""
        self._dirty = True
        entry = self._of_task.get(task)
        if entry is not None and not entry.needs_result:
            entry.needs_result = True
            entry.worker = None

    def covered(self, tasks: Iterable[TaskId]) -> None:
        """The ledger has accepted a contribution with these tasks."""
        for task in tasks:
            entry = self._of_task.get(task)
            if entry is not None and entry.needs_gradient:
                entry.needs_gradient = False
                self._release_if_finished(entry)

    def give_back(self, tasks: Iterable[TaskId], node: NodeId) -> None:
        """`node` will not finish these, or the ledger refused what it sent for them."""
        self._dirty = True
        for task in tasks:
            entry = self._of_task.get(task)
            if entry is None:
                continue
            if entry.worker == node:
                entry.worker = None
            if entry.preferred == node:
                entry.preferred = None

    def drop_step(self, step: int) -> None:
        """Steps up to `step` are closed."""
        for key in [key for key in self._entries if key.step <= step]:
            for task in self._entries.pop(key).tasks:
                del self._of_task[task]

    def needs_result(self, task: TaskId) -> bool:
        entry = self._of_task.get(task)
        return entry is not None and entry.needs_result

    # ---- leases --------------------------------------------------------------------------------------------------

    def grant(self, now: float) -> list[Grant]:
        """Gives what is free to who may have it, older steps first; each grant is a new lease."""
        if not self._dirty:
            return []
        self._dirty = False
        grants = []
        alone = self._collocated == "when_empty" and self.volunteer_count == 0
        servers_may = self._collocated == "always" or alone
        for entry in sorted((e for e in self._entries.values() if e.free), key=lambda e: e.tasks[0]):
            worker, has_graph = self._choose(entry, servers_may)
            if worker is None:
                continue
            if not has_graph:
                worker.slots -= 1
            self._fence += 1
            entry.worker, entry.fence, entry.deadline = worker.node, self._fence, now + self._lease_s
            entry.issued_count += 1
            self.reissued_count += entry.issued_count > 1
            grants.append(Grant(entry, worker.node, has_graph, more=False))
        return [
            Grant(grant.entry, grant.worker, grant.has_graph, self._more_for(grant.worker, grant.entry.tasks[0].step))
            for grant in grants
        ]

    def _choose(self, entry: Entry, servers_may: bool) -> tuple[Worker | None, bool]:
        if entry.preferred is not None:
            return self._workers.get(entry.preferred), True
        best: Worker | None = None
        for worker in self._workers.values():
            if worker.slots == 0 or (worker.is_server and not servers_may):
                continue
            if best is None or worker.slots > best.slots:
                best = worker
        return best, False

    def _more_for(self, node: NodeId, step: int) -> bool:
        """Whether `node` can still expect work of the step from this pool."""
        return any(
            entry.worker is None and not entry.finished and entry.preferred in (None, node)
            for entry in self._entries.values()
            if entry.tasks[0].step == step
        )

    def expire(self, now: float) -> list[tuple[Entry, NodeId]]:
        """Takes back the leases whose time is over; says whose they were."""
        late = []
        for entry in self._entries.values():
            if entry.worker is not None and entry.deadline <= now:
                late.append((entry, entry.worker))
                entry.preferred = None
                entry.worker = None
                self._dirty = True
        return late

    def next_deadline(self) -> float | None:
        return min((e.deadline for e in self._entries.values() if e.worker is not None), default=None)

    # ---- what an operator asks -----------------------------------------------------------------------------------

    def waiting_for(self, own: NodeId) -> Wait | None:
        """Why the oldest unfinished task is not finished, or nothing. `own`: the server itself, which may compute."""
        open_entries = [entry for entry in self._entries.values() if not entry.finished]
        if not open_entries:
            return None
        entry = min(open_entries, key=lambda e: e.tasks[0])
        step, work = entry.tasks[0].step, work_name(entry.tasks)
        if entry.tensors is None:
            return Wait(step, f"input for the {work}")
        if entry.worker is not None:
            what = work if entry.needs_result else f"weight gradient of microbatch {entry.tasks[0].microbatch}"
            return Wait(step, f"its own {what}" if entry.worker == own else f"{what} by {entry.worker[:8]}")
        if not self._workers or (self.volunteer_count == 0 and self._collocated == "never"):
            return Wait(step, f"a volunteer for the {work}")
        return Wait(step, f"a volunteer with a free slot for the {work}")

    def counts(self) -> dict[str, int]:
        """Unfinished units by what they wait for."""
        result = {"input": 0, "free": 0, "leased": 0}
        for entry in self._entries.values():
            if not entry.finished:
                key = "leased" if entry.worker is not None else "free" if entry.tensors is not None else "input"
                result[key] += 1
        return result

    def check(self) -> None:
        for entry in self._entries.values():
            assert not (entry.finished and entry.worker is not None), f"{entry.tasks[0]} is finished but leased"
            assert entry.worker is None or entry.worker in self._workers, f"{entry.tasks[0]} is leased to a ghost (L2)"
            assert entry.preferred is None or entry.preferred in self._workers, f"{entry.tasks[0]} prefers a ghost"

    def _release_if_finished(self, entry: Entry) -> None:
        if entry.finished:
            entry.worker = None
