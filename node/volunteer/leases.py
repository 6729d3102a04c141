"""What a volunteer holds of others' leases, and which of them is the most urgent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node.volunteer.tenancy import Tenancy
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import Lease, Verdict
from protocol.run.course import VALIDATION_FIRST


@dataclass(slots=True)
class Held:
    """A lease that has not run yet."""

    lease: Lease
    issuer: NodeId
    received: float
    input: TensorRef | None
    """What the forward part needs; None while a recomputation waits for it, or where the graph is kept."""
    gives_slot: bool
    """Whether it used up one of the slots that we gave."""
    wants_gradient: bool
    place: int
    """Which of our places (stage and ledgers) it belongs to: work for an earlier one is thrown away."""
    tenancy: Tenancy | None = None
    """Of a sample in segments: what of it is still to do."""
    stalled: bool = False
    """The front has not the input that it needs: it comes when it is made again, and meanwhile this holds no slot."""

    is_old: bool = False
    """The link that it came by has ended: its issuer may have given it away meanwhile, or know of none."""

    @property
    def takes_slot(self) -> bool:
        """Whether no other lease should come in its place yet."""
        if self.tenancy is not None:
            return self.gives_slot and not (self.stalled and not self.tenancy.begun)
        return self.gives_slot and not (self.stalled and self.input is None)

    @property
    def is_begun(self) -> bool:
        """Whether it is a sample in segments, and the device has done the first of them."""
        return self.tenancy is not None and self.tenancy.begun

    @property
    def keeps_graph(self) -> bool:
        """Whether the device has something of it between two jobs, in the room of a forward's graph."""
        tenancy = self.tenancy
        return tenancy is not None and tenancy.begun and self.lease.tasks[0].op == "B" and not tenancy.passes_through


def is_validation(lease: Lease) -> bool:
    """Whether nobody trains on it: a forward that leaves nothing behind."""
    return lease.tasks[0].microbatch >= VALIDATION_FIRST


def leaves_graph(lease: Lease) -> bool:
    """Whether it is a forward of a route that goes on: its graph stays here until the backward."""
    return len(lease.tasks) == 1 and lease.tasks[0].op == "F" and not is_validation(lease)


def forward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "F", task.segment, task.slice)


def backward_of(task: TaskId) -> TaskId:
    return TaskId(task.step, task.microbatch, task.position, "B", task.segment, task.slice)


class AskedAgain:
    """Tasks that were leased to us while their weight gradient waits for a verdict."""

    def __init__(self) -> None:
        self._leases: dict[TaskId, tuple[NodeId, tuple[TaskId, ...]]] = {}
        """(issuer, the lease's tasks)"""

    def add(self, tasks: Iterable[TaskId], issuer: NodeId, lease: Lease) -> None:
        self._leases.update((task, (issuer, lease.tasks)) for task in tasks)

    def settle(self, verdict: Verdict) -> tuple[tuple[NodeId, tuple[TaskId, ...]], ...]:
        """What must go back to whom now: (issuer, the lease's tasks).

        A refusal and the new lease that follows it come by two links: the lease may have come first, and was taken
        for one of work that is done. Its issuer counts on us, so it hears that it must ask again.
        """
        returned: dict[tuple[NodeId, tuple[TaskId, ...]], None] = {}
        for task in verdict.tasks:
            asked = self._leases.pop(task, None)
            if asked is not None and not verdict.accepted:
                returned[asked] = None
        return tuple(returned)

    def forget(self, step: int | None) -> None:
        """Steps up to `step` are closed; None: all."""
        for task in [task for task in self._leases if step is None or task.step <= step]:
            del self._leases[task]
