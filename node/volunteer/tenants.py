"""What becomes of a segment that the device has computed: its result is sent at once, and the next has its turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from node.machine.jobs import Backward, DropGraphs, Forward, SegmentEnd
from node.machine.outbox import Outbox
from node.volunteer.gradients import Gradients
from node.volunteer.holdings import Holdings
from node.volunteer.leases import forward_of
from node.volunteer.words import Words
from protocol.base.ids import TaskId


class Tenants:
    """Of one volunteer. `has_gradient`: whether a task's weight gradient is here and will be sent."""

    def __init__(
        self, out: Outbox, held: Holdings, words: Words, gradients: Gradients, has_gradient: Callable[[TaskId], bool]
    ) -> None:
        self._out, self._held, self._words, self._gradients = out, held, words, gradients
        self._has_gradient = has_gradient

    def computed(
        self, job: Forward | Backward | SegmentEnd, result: Any, alive: bool, draining: bool, now: float
    ) -> TaskId | None:
        """What ran has ended. `alive`: its step is open, and the lease is of our present place. Returns the task of all
        segments that is done with it, if one is."""
        held = self._held.of_tenant
        assert held is not None and held.tenancy is not None
        tenancy, key, ticket = held.tenancy, held.lease.tasks[0], held.lease.ticket
        loss_sum, tensor = result if isinstance(job, SegmentEnd) else (0.0, result)
        tenancy.loss_sum += loss_sum
        if tensor is not None and alive and not tenancy.replaced:
            tenancy.unsent |= isinstance(job, Forward) and not self._words.reaches(held.lease.back)
            self._words.bring(job.task, held.lease, held.issuer, tensor)
        self._out.drop(() if tensor is None else (tensor,))
        if not alive or tenancy.replaced:
            self._held.end()
            self._out.compute(DropGraphs((forward_of(key),)))
            return None
        if not tenancy.over:
            if draining:
                self._held.end()
                self._words.give_back(held.issuer, held.lease.tasks, "draining")
            else:
                self._held.pause(now)
            return None
        self._held.end()
        if isinstance(job, Forward):
            self._held.keep_graph(key, ticket, sent=not tenancy.unsent)
            return key
        covered = held.lease.tasks[-2:] if tenancy.ends_route else (key,)
        losses = (tenancy.loss_sum,) if tenancy.ends_route else ()
        if job.accumulator is not None:
            self._gradients.added(job.accumulator, covered, losses, ticket, now)
        if held.lease.need_weight_gradient:
            self._words.say_summed(held.issuer, held.lease, self._has_gradient)
        return covered[-1]
