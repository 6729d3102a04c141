"""What the operator has ordered of the run: its changes and its pause, which the next plan brings to everybody."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.live.boundary import all_have, begun_at, boundary
from coordinator.live.outbox import Outbox
from coordinator.live.rollback import changes_before
from protocol.messages import NodeReport
from protocol.run.changes import RunChange
from protocol.run.plan import Plan

PAUSED_FOR = "; paused: "
"""Before the reason, in the sentence of a plan."""


class Wishes:
    """Begins with what the plan in force has."""

    def __init__(self, plan: Plan | None, sentence: str, changed_at: Sequence[tuple[int, int]], outbox: Outbox) -> None:
        self._outbox = outbox
        self.changes: tuple[RunChange, ...] = ()
        """What the operator has changed, with the steps from which it counts as far as they are reported."""
        self.paused = False
        """Whether no further step is to be opened."""
        self.held = False
        """Whether no step opens until every server knows what was changed (`coordinator.live.boundary`)."""
        self.pause_reason = sentence.partition(PAUSED_FOR)[2]
        """Why, where the run's guard wants it and not a person."""
        self.order_count = 0
        """Orders of this process's life that have been taken."""
        if plan is not None:
            self.take_over(plan)
        for count, step in changed_at:
            self.counted(count, step)

    def take_over(self, plan: Plan) -> None:
        """A plan counts that others have kept."""
        self.changes, self.paused, self.held = plan.changes, plan.paused, plan.held

    def are_in(self, plan: Plan) -> bool:
        """Whether a plan has all of it."""
        begun = len(plan.changes) == len(self.changes) and not any(
            told.is_pending != known.is_pending for told, known in zip(plan.changes, self.changes, strict=True)
        )
        return begun and plan.paused == self.paused and plan.held == self.held

    def said_after(self, sentence: str) -> str:
        """A plan's sentence, with the reason of a pause that has one."""
        return sentence + (f"{PAUSED_FOR}{self.pause_reason}" if self.paused and self.pause_reason else "")

    # ---- orders ----------------------------------------------------------------------------------------------------

    def change(self, change: RunChange) -> None:
        """A key has another value."""
        self.order_count += 1
        self.changes = (*self.changes, change)
        self.held = self.held or change.is_pending
        self._outbox.log("info", "run changed", key=change.key, value=change.value)

    def pause(self, paused: bool, reason: str) -> bool:
        """No step is opened any more, or they are opened again; returns whether that is news."""
        self.order_count += 1
        if paused == self.paused:
            return False
        self.paused, self.pause_reason = paused, reason
        self._outbox.log("info", "run paused" if paused else "run goes on", detail=reason)
        return True

    def go_back(self, step: int) -> None:
        """The steps from this one on are thrown away, and what began in them."""
        kept = changes_before(self.changes, step)
        for change in self.changes[len(kept) :]:
            self._outbox.log("warning", "change undone", key=change.key, value=change.value, step=step)
        self.changes, self.held = kept, False

    # ---- from which step on ----------------------------------------------------------------------------------------

    def counted(self, count: int, step: int) -> None:
        """A step that counts had so many changes in force: those of them that had no step began with this one."""
        self.changes = tuple(
            msgspec.structs.replace(change, from_step=step) if change.from_step < 0 and number < count else change
            for number, change in enumerate(self.changes)
        )

    def settle(self, plan: Plan, reports: Sequence[NodeReport | None]) -> bool:
        """Servers of a held plan, the one in force, tell how they get on: the run may be at the boundary, or past it.
        Returns whether another plan is due."""
        if not (self.held and plan.held and self.are_in(plan) and all_have(plan, reports)):
            return False
        if any(change.is_pending for change in self.changes):
            step = boundary(reports)
            if step is None:
                return False
            self.changes, late = begun_at(self.changes, step)
            for change in late:
                self._outbox.log("warning", "change too late", key=change.key, value=change.value, step=step)
            self._outbox.log("info", "changes begin", step=step)
        else:
            self.held = False
        return True
