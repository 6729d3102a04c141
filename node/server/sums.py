"""What came up as a difference is added to what it differs from, before any role hears of it (`activations_up = "d4"`).

    Output ────────▶ the front's input of the visit ─────────┐
    InputGradient ─▶ the back's output gradient of the visit ┴▶ `AddUp` ──▶ the message, whole, to its role

Both lie on this server: with this form the servers of a stage are front and back in one, so that nobody else is asked.
Until the sum is there nobody is told that the result has come; a server that dies before has lost nothing that another
one counts on.
"""

from __future__ import annotations

import msgspec

from node.machine.jobs import AddUp
from node.server.back import BackRole
from node.server.context import StageContext
from node.server.front import FrontRole
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import InputGradient, Output


class Sums:
    """Of one server."""

    def __init__(self, context: StageContext, front: FrontRole | None, back: BackRole | None) -> None:
        self._context = context
        self._out = context.out
        self._front, self._back = front, back
        self._waiting: dict[TaskId, tuple[NodeId, Output | InputGradient]] = {}
        """What has come before what it differs from: this server has started again, and has that sent once more."""
        self._adding: dict[TaskId, tuple[NodeId, Output | InputGradient]] = {}
        """What the lane is at; the tensor is the lane's."""

    def has(self, task: TaskId) -> bool:
        """Whether a result of the task is here that is no sum yet: the first that came stays."""
        return task in self._waiting or task in self._adding

    def takes(self, peer: NodeId, message: Output | InputGradient) -> bool:
        """Whether the result is a difference; then it comes out of `added`."""
        if message.tensors[0].form != "d4":
            return False
        self._waiting[message.task] = peer, message
        self.base_here(message.task)
        return True

    def base_here(self, task: TaskId) -> None:
        """What a result of this forward (of this backward) differs from may have come: its visit's input (its output
        gradient)."""
        base = self._base(task) if task in self._waiting else None
        if base is None:
            return
        peer, message = self._adding[task] = self._waiting.pop(task)
        self._out.compute(AddUp(self._context.generation, task, peer, message.tensors[0], base, self._out.key()))
        self._out.drop(message.tensors)

    def _base(self, task: TaskId) -> TensorRef | None:
        if task.op == "F":
            return None if self._front is None else self._front.input_of(task)
        return None if self._back is None else self._back.output_gradient_of(task)

    def added(self, job: AddUp, whole: TensorRef) -> tuple[NodeId, Output | InputGradient] | None:
        """Who sent what, as if it had come whole; None: its step is over."""
        found = self._adding.pop(job.task, None)
        if found is None:
            self._out.drop((whole,))
            return None
        peer, message = found
        return peer, msgspec.structs.replace(message, tensors=(whole,))

    def close_step(self, step: int) -> None:
        for task in [task for task in self._waiting if task.step <= step]:
            self._out.drop(self._waiting.pop(task)[1].tensors)
        for task in [task for task in self._adding if task.step <= step]:
            del self._adding[task]

    def check(self) -> None:
        closed = self._context.closed
        assert all(task.step > closed for task in (*self._waiting, *self._adding)), "a closed step is kept (L3)"
        assert not self._waiting.keys() & self._adding.keys(), "a result is added twice"
