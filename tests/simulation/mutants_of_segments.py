"""Mutants of samples in segments: tenants, what counts when, and in which order. `mutants.py` hunts them."""

from __future__ import annotations

from collections import deque
from typing import Any

from node.volunteer.tenancy import Tenancy
from node.volunteer.tenants import Tenants
from tests.simulation.mutant_registry import LINE, mutant
from tests.simulation.scene import Scene

SEGMENTS = Scene(
    always=("volunteer_kill", "link_cut"), gap_s=(0.1, 0.4), run={**LINE, "segments": 3, "microbatches": 5}
)
"""Tenants die and lose their links between two segments."""


@mutant(Tenancy, "_plan", scene=SEGMENTS)
def segments_go_back_in_the_order_of_the_forward(original: Any) -> Any:
    """A segment's backward without what the later ones want changed in its keys and values."""

    def plan(self: Any, has_graph: bool) -> None:
        original(self, has_graph)
        forwards = [part for part in self._todo if part[0] == "F"]
        self._todo = deque([*forwards, *sorted(part for part in self._todo if part[0] == "B")])

    return plan


@mutant(Tenancy, "_plan", scene=SEGMENTS)
def a_successor_goes_on_with_the_keys_and_values_of_the_tenant_before(original: Any) -> Any:
    """It leaves out the first segment, whose output servers have already."""

    def plan(self: Any, has_graph: bool) -> None:
        original(self, has_graph)
        if self._todo and self._todo[0] == ("F", 0):
            self._todo.popleft()

    return plan


@mutant(Tenants, "computed", scene=SEGMENTS)
def a_visit_counts_with_its_first_backward(original: Any) -> Any:
    """Its weight gradients are said to be summed up before all segments have gone back."""

    def computed(self: Any, job: Any, result: Any, alive: bool, draining: bool, now: float) -> Any:
        held = self._held.of_tenant
        left = [part for part in held.tenancy._todo if part[0] == "B"]
        if type(job).__name__ != "Forward" and held.wants_gradient and len(left) == 1:
            accumulator = self._gradients.accumulator_for(held.lease.tasks[0].step, held.lease.version)
            losses = (held.tenancy.loss_sum,) if held.tenancy.ends_route else ()
            covered = held.lease.tasks[-2:] if held.tenancy.ends_route else held.lease.tasks
            self._gradients.added(accumulator, covered, losses, held.lease.ticket, now)
            held.wants_gradient = False
        return original(self, job, result, alive, draining, now)

    return computed
