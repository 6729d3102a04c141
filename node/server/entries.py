"""What a pool is made of: units of work, those who do them, and what was just given to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.base.ids import NodeId, TaskId, TensorRef


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
    summed: bool = False
    """The worker has computed it: its weight gradient lies in the worker's sum."""
    issued_count: int = 0
    granted_at: float = 0.0
    late: dict[NodeId, float] = field(default_factory=dict)
    """Workers that had it and neither finished nor kept it, and when they had got it."""
    late_at: float = 0.0
    """When that happened last …"""
    late_count: int = 0
    """… and how often."""

    @property
    def step(self) -> int:
        return self.tasks[0].step

    @property
    def finished(self) -> bool:
        return not (self.needs_result or self.needs_gradient)

    @property
    def open(self) -> bool:
        """Somebody still has to be given this."""
        return self.worker is None and not self.finished

    @property
    def free(self) -> bool:
        return self.open and self.tensors is not None

    @property
    def waits_for_sum(self) -> bool:
        """All that is missing is the worker's contribution."""
        return self.worker is not None and self.summed and not self.needs_result


@dataclass(slots=True)
class Worker:
    """A volunteer with a live link to this server."""

    node: NodeId
    is_server: bool
    slots: int = 0
    active_at: float = 0.0
    """When it last held a lease or asked for one."""
    returned: dict[TaskId, float] = field(default_factory=dict)
    """What it has given back, by first tasks, and when it had got that: if it leaves now, it is forgiven."""
    returned_at: float = 0.0
    """When it began to."""
    overtaken: list[tuple[float, float]] = field(default_factory=list)
    """What others have finished of that meanwhile: when it had got it, and when they were done."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that the pool has just given."""

    entry: Entry
    worker: NodeId
    has_graph: bool
