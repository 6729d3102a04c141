"""Which of the work that is ready a volunteer's device does next: the run's order policy, asked live.

Older steps come first whatever the policy says, the validation comes last in its step, and a weight gradient that is
owed when nothing else is ready or when it presses (`OwedQueue.presses`). Nothing of this changes a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from node.volunteer.leases import Held, is_validation, leaves_graph
from node.volunteer.owed import Owed, OwedQueue
from protocol.run.plan import Plan
from protocol.schedule.live import LiveOrder, candidate
from protocol.schedule.policies import Kind, Ready


class Order:
    """Of one device that works for one stage of a plan."""

    def __init__(self, plan: Plan, stage: int) -> None:
        self._plan = plan
        self._chunks = plan.course.chunks_of(stage)
        self._live = LiveOrder(plan.order, len(self._chunks))

    def next(
        self, ready: Sequence[Held], owed: OwedQueue, graph_count: int, graphs_max: int | None
    ) -> Held | Owed | None:
        """What to begin now.

        Args:
            ready: leases that have all that they need.
            graph_count: graphs that are kept, of `graphs_max` that fit.
        """
        if not ready:
            return owed.next()
        step = min(held.lease.tasks[0].step for held in ready)
        if owed.presses(step, graph_count, graphs_max):
            return owed.next()
        here = [held for held in ready if held.lease.tasks[0].step == step]
        training = [held for held in here if not is_validation(held.lease)]
        if not training:
            return owed.next() or min(here, key=lambda held: held.lease.tasks[0])
        candidates = [self._candidate(held) for held in training]
        chosen = self._live.next(step, candidates)
        return training[candidates.index(chosen)]

    def _candidate(self, held: Held) -> Ready:
        task = held.lease.tasks[0]
        # A route's end is a forward that nothing waits behind and a backward that others wait for.
        kind = Kind.FORWARD if leaves_graph(held.lease) else Kind.BACKWARD
        chunk = self._plan.chunk_at(task.step, task.microbatch, task.position)
        return candidate(task, kind, self._chunks.index(chunk))
