"""Weight gradients that a volunteer owes: of backwards whose input gradient it has sent already (split backward).

A weight gradient is nobody's next input, so it is computed when nothing else is ready, and at the latest when memory or
the step's end asks for it. Its sum is not cut before (`Gradients.accumulator_for`), so a contribution names a task only
when all of it is in the sum; and it goes with the device, as the sum does: then the task's whole backward is redone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from node.machine.jobs import OWED_ENDS_MAX, WeightGradient
from node.volunteer.leases import Held
from protocol.base.ids import NodeId, TaskId, Ticket


@dataclass(frozen=True, slots=True)
class Owed:
    """What is needed to finish one backward."""

    job: WeightGradient
    tasks: tuple[TaskId, ...]
    """What the contribution names: its B, or L and B."""
    losses: tuple[float, ...]
    ticket: Ticket
    issuer: NodeId
    lease_tasks: tuple[TaskId, ...]
    place: int

    @property
    def is_end(self) -> bool:
        """Whether it is a route's end."""
        return len(self.lease_tasks) > 1


def owed_of(held: Held, job: WeightGradient, tasks: tuple[TaskId, ...], losses: tuple[float, ...]) -> Owed:
    """What is left of a lease whose result was sent."""
    lease = held.lease
    return Owed(job, tasks, losses, lease.ticket, held.issuer, lease.tasks, held.place)


class OwedQueue:
    """Those that wait, oldest first, and the one that the device is at."""

    def __init__(self) -> None:
        self._waiting: dict[TaskId, Owed] = {}
        """By B."""
        self.running: Owed | None = None

    def add(self, owed: Owed) -> None:
        self._waiting[owed.job.task] = owed

    def all(self) -> list[Owed]:
        """Those that wait or run."""
        return [*self._waiting.values(), *(() if self.running is None else (self.running,))]

    @property
    def steps(self) -> list[int]:
        return [owed.job.task.step for owed in self.all()]

    @property
    def tickets(self) -> dict[TaskId, Ticket]:
        """By B."""
        return {owed.job.task: owed.ticket for owed in self.all()}

    def graphs(self) -> list[TaskId]:
        """Backwards of forwards whose graph lives on for them."""
        return [owed.job.task for owed in self.all() if not owed.is_end]

    def has(self, task: TaskId) -> bool:
        return any(task in owed.tasks for owed in self.all())

    def next(self) -> Owed | None:
        """The one of the oldest step."""
        return min(self._waiting.values(), key=lambda owed: owed.job.task.step, default=None)

    def presses(self, step: int, graph_count: int, graphs_max: int | None) -> bool:
        """Whether one has to be done before other work of `step`: a step waits for it, or there is no room."""
        first = self.next()
        if first is None:
            return False
        full = graphs_max is not None and graph_count + len(self.graphs()) >= graphs_max
        return first.job.task.step < step or full or sum(owed.is_end for owed in self.all()) >= OWED_ENDS_MAX

    def begin(self, owed: Owed) -> None:
        self.running = self._waiting.pop(owed.job.task)

    def end(self) -> Owed:
        owed, self.running = self.running, None
        assert owed is not None
        return owed

    def take_steps(self, first: int, last: int | None) -> list[Owed]:
        """Of steps `first` to `last` (None: all from there on) nothing is wanted any more: what had not begun."""
        old = [task for task in self._waiting if first <= task.step and (last is None or task.step <= last)]
        return [self._waiting.pop(task) for task in old]

    def lose_all(self) -> list[Owed]:
        """The device is gone."""
        lost = self.all()
        self._waiting, self.running = {}, None
        return lost

    def check(self, closed: int, tasks_in_sums: Iterable[TaskId]) -> None:
        for task in self._waiting:
            assert task.step > closed, f"a weight gradient of closed step {task.step} is owed"
        both = [task for task in tasks_in_sums if task in self._waiting]
        assert not both, f"{both[0]} is owed, and named by a contribution (C8)"
