"""What is left to do of a lease of a sample in segments (Seq1F1B): forwards in order, then backwards in reverse order.

Whoever has the lease is the *tenant* of the visit: keys and values of the segments stay on its device, nothing of them
travels. Each segment is a job of its own, and its result is sent at once. A tenant that is gone leaves nothing that
counts: another one begins with the first segment, since servers keep what goes into all of them, and what they have
of the results already they do not take twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from node.machine.jobs import Backward, Forward, SegmentEnd
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import Lease

Part = tuple[str, int]
"""("F" or "B", segment)."""


class Tenancy:
    """Of one lease.

    Args:
        has_graph: all forwards are done and kept here: a backward goes on from them.
    """

    def __init__(self, lease: Lease, count: int, has_graph: bool) -> None:
        self._lease, self._count = lease, count
        self._first = lease.tasks[0]
        self.ends_route = len(lease.tasks) > 1
        self.begun = False
        """The device has something of it."""
        self.replaced = False
        """The same work was given to us anew, and begins anew: what runs is the last of this one."""
        self.loss_sum = 0.0
        self.unsent = False
        """An output of its was ready while nobody was there who takes it, or may be lost with a link."""
        self._here: dict[Part, TensorRef] = {}
        """What goes into each part, as far as it has come."""
        self._todo: deque[Part] = deque()
        self._plan(has_graph)
        if self._first.op == "B":
            self._here["B", count - 1] = lease.tensors[0]
        else:
            self._arrive(("F", 0), lease.tensors[0])

    def _plan(self, has_graph: bool) -> None:
        forwards = [] if has_graph else [("F", segment) for segment in range(self._count)]
        goes_back = self._first.op == "B" or self.ends_route
        self._todo = deque([*forwards, *(("B", s) for s in reversed(range(self._count)) if goes_back)])
        self.passes_through = not has_graph and goes_back

    def _arrive(self, part: Part, tensor: TensorRef) -> None:
        """Tokens come whole, with the first segment's."""
        whole = part[0] == "F" and self._first.position == 0
        for segment in range(self._count) if whole else part[1:]:
            self._here[part[0], segment] = tensor

    passes_through: bool
    """It needs room for a graph that no slot has counted: a route's end, or a recomputation."""

    @property
    def over(self) -> bool:
        return not self._todo

    @property
    def complete(self) -> bool:
        """Whether nothing that it needs is still to come."""
        return not any(self._missing())

    def ready(self) -> bool:
        """Whether the next part can be computed. Who recomputes does not begin before all has come."""
        if self._first.op == "B" and self.passes_through and not self.begun:
            return self.complete
        return self._next_is_here()

    def _next_is_here(self) -> bool:
        return bool(self._todo) and (self._todo[0] in self._here or self._needs_nothing(self._todo[0]))

    def _needs_nothing(self, part: Part) -> bool:
        return part[0] == "B" and self.ends_route  # labels came with the lease

    def _missing(self) -> Iterator[Part]:
        return (part for part in self._todo if part not in self._here and not self._needs_nothing(part))

    def missing(self) -> list[tuple[NodeId, TaskId]]:
        """Whom to ask for what."""
        lease = self._lease
        whole = self._first.position == 0
        parts = dict.fromkeys(("F", 0) if whole and part[0] == "F" else part for part in self._missing())
        return [(lease.front if part[0] == "F" else lease.back, self._task(part)) for part in parts]

    def _task(self, part: Part) -> TaskId:
        return msgspec.structs.replace(self._first, op=part[0], segment=part[1])

    def take(self, task: TaskId, tensor: TensorRef) -> bool:
        """Something has come; whether it was waited for."""
        part = (str(task.op), task.segment)
        if part in self._here or part not in self._todo:
            return False
        self._arrive(part, tensor)
        return True

    def job(self, accumulator: Callable[[], int | None], key: Callable[[], int]) -> Forward | Backward | SegmentEnd:
        """The next part. `accumulator` is asked with the last one, whose weight gradients are all of the visit's."""
        self.begun = True
        part = self._todo.popleft()
        task, version = self._task(part), self._lease.version
        if part[0] == "F":
            wanted = self._first.op == "F" and not self.ends_route
            return Forward(task, version, self._here[part], key() if wanted else None)
        into = accumulator() if not self._todo else None
        input_gradient = key() if self._lease.need_input_gradient else None
        if self.ends_route:
            return SegmentEnd(task, version, self._lease.tensors[1], input_gradient, into)
        return Backward(task, version, self._here[part], None, input_gradient, into)

    def lose_graph(self) -> None:
        """The device has dropped what it had of it."""
        self._plan(has_graph=False)
        self.begun = False
        self.loss_sum = 0.0

    def tensors(self) -> list[TensorRef]:
        """All that it holds beside the lease's own."""
        return [ref for ref in dict.fromkeys(self._here.values()) if ref not in self._lease.tensors]
