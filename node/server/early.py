"""What volunteers bring of a step before this server hears that it is open, at the stage where routes begin.

After a restart a server is linked to some that compute before it is linked to the decider. Elsewhere the work opens the
step. Here opening it would load its data, which the word of a volunteer is not enough for; and what was dropped
would be waited for until its lease ran out: who has sent a result counts it as taken. So it is kept
until the word comes.

As many as the open steps have visits: each was leased, and of those that come twice the first stays.
"""

from __future__ import annotations

from node.server.context import StageContext
from protocol.base.ids import NodeId, TaskId
from protocol.messages import Evaluated, InputGradient, Output

Result = Output | InputGradient | Evaluated


class Early:
    """Of one server."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._kept: dict[tuple[type[Result], TaskId], tuple[NodeId, Result, float]] = {}
        """By whom, and the size of the values, where it was measured."""

    def keep(self, peer: NodeId, message: Result, size: float) -> None:
        """Of a step that may be open, of which no role has heard."""
        key = type(message), message.task
        if key in self._kept:
            self._drop(message)
        else:
            self._kept[key] = peer, message, size

    def take(self, step: int) -> list[tuple[NodeId, Result, float]]:
        """All of a step that is open now, in the order in which they came."""
        return [self._kept.pop(key) for key in [key for key in self._kept if key[1].step == step]]

    def close_step(self, step: int) -> None:
        for key in [key for key in self._kept if key[1].step <= step]:
            self._drop(self._kept.pop(key)[1])

    def _drop(self, message: Result) -> None:
        self._context.out.drop(getattr(message, "tensors", ()))

    def check(self) -> None:
        closed = self._context.closed
        assert all(task.step > closed for _, task in self._kept), "a result of a closed step is kept (L3)"
