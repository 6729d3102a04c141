"""What a lease makes of itself: the device's job, and what is said of the validation's when it has ended."""

from __future__ import annotations

from collections.abc import Callable

from node.machine.jobs import Backward, Evaluate, Forward, Job, RouteEnd
from node.volunteer.leases import Held, is_validation


def job_of(held: Held, accumulator: int | None, key: Callable[[], int], split: bool = False) -> Job:
    """The device's work for a lease that has all that it needs.

    Args:
        accumulator: where its weight gradient goes.
        key: gives a number for a tensor that the job makes.
        split: whether the run splits its backwards; what nobody waits for the input gradient of is done at once.
    """
    lease = held.lease
    task = lease.tasks[0]
    later = split and accumulator is not None and lease.need_input_gradient
    if task.op == "F":
        assert held.input is not None, "a forward without its input is not ready"
        labels = lease.tensors[1] if len(lease.tasks) > 1 else None
        if is_validation(lease):
            return Evaluate(task, lease.version, held.input, labels, key())
        if labels is None:
            return Forward(task, lease.version, held.input, key())
        input_gradient = key() if lease.need_input_gradient else None
        return RouteEnd(lease.tasks, lease.version, held.input, labels, input_gradient, accumulator, later)
    input_gradient = key() if lease.need_input_gradient else None
    return Backward(task, lease.version, lease.tensors[0], held.input, input_gradient, accumulator, later)
