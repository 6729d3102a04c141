"""What the operator has ordered of the run: its changes and its pause, which the next plan brings to everybody."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.live.boundary import all_have, begun_at, boundary, closed_up_to
from coordinator.live.orders import ChangeRun
from coordinator.live.outbox import Outbox
from coordinator.live.plan_builder import Guidance
from coordinator.live.records import GoBackWish
from coordinator.live.rollback import changes_before
from protocol.base.errors import BadInputError
from protocol.messages import NodeReport
from protocol.run.changes import LAYOUT, RunChange, check_changes, in_words, kept_layouts
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

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
        self.save = -1
        """The version that another layout begins from, once the run is held there."""
        self.pause_reason = sentence.partition(PAUSED_FOR)[2]
        """Why, where the run's guard wants it and not a person."""
        self.layout: ChangeRun | None = None
        """The newest order of a layout, with what a planner said beside it; forgotten by who starts anew."""
        self.order_count = 0
        """Orders of this process's life that have been taken."""
        self._ordered: tuple[RunChange, ...] = ()
        """The changes among them that were still wanted when the newest was ordered: no more than a run may have."""
        if plan is not None:
            self.take_over(plan)
        for count, step in changed_at:
            self.counted(count, step)

    def take_over(self, plan: Plan, config: RunConfig | None = None, before: Plan | None = None) -> None:
        """A plan counts that others have kept, and what was ordered here in this process's life, if it can: also what
        is in force here already, for the operator was told that it counts."""
        news = () if before is None else _without(_with(self.changes, self._ordered), plan.changes)
        paused = plan.paused if before is None or self.paused == before.paused else self.paused
        self.changes, self.paused, self.held, self.save = plan.changes, paused, plan.held, plan.save
        for change in news:
            change = msgspec.structs.replace(change, from_step=-1)
            try:
                check_changes(config or RunConfig(), (*self.changes, change))
            except BadInputError as error:
                self._outbox.log("warning", "change undone", detail=f"{in_words(change)}: {error}", step=-1)
                continue
            self.changes = (*self.changes, change)
            self.held = self.held or change.is_pending

    def are_in(self, plan: Plan) -> bool:
        """Whether a plan has all of it; steps that were reported since need no plan of their own."""
        told, known = (
            [(change.key, change.value, change.is_pending) for change in changes]
            for changes in (plan.changes, self.changes)
        )
        return told == known and (plan.paused, plan.held, plan.save) == (self.paused, self.held, self.save)

    def ordered_count(self, plan: Plan | None) -> int:
        """Of a plan's changes that wait for nothing, those that were ordered here in this process's life."""
        changes = () if plan is None else _with(plan.changes, self._ordered)
        return sum(not change.is_pending for change in changes)

    def said_after(self, sentence: str) -> str:
        """A plan's sentence, with the reason of a pause that has one."""
        return sentence + (f"{PAUSED_FOR}{self.pause_reason}" if self.paused and self.pause_reason else "")

    # ---- orders ----------------------------------------------------------------------------------------------------

    def change(self, order: ChangeRun, first: RunChange | None) -> None:
        """A key has another value.

        Args:
            first: what stands at the head of all changes, where the run's file leaves its layout open.
        """
        change = order.change
        self.order_count += 1
        if change.key == LAYOUT:
            if self.lays_out:
                self._outbox.log("warning", "layout refused", detail=in_words(change), reason="another is on its way")
                return
            self.layout = order
        self._ordered = (*_with(self.changes, self._ordered), change)
        head = (first,) if first is not None and not self.changes else ()
        self.changes = (*head, *self.changes, change)
        self.held = self.held or change.is_pending
        self._outbox.log("info", "run changed", detail=in_words(change))

    def pause(self, paused: bool, reason: str) -> bool:
        """No step is opened any more, or they are opened again; returns whether that is news."""
        self.order_count += 1
        if paused == self.paused:
            return False
        self.paused, self.pause_reason = paused, reason
        self._outbox.log("info", "run paused" if paused else "run goes on", detail=reason)
        return True

    def go_back(self, wish: GoBackWish) -> None:
        """The steps from that one on are thrown away, and what began in them, but for what was ordered after the wish:
        to go back and then to lower the rate is what is done after a spike."""
        if wish.voiding is not None:
            return  # the same steps again, with the same changes
        kept = changes_before(self.changes, wish.step)
        first = max(len(kept), len(self.changes) if wish.change_count < 0 else wish.change_count)
        laid = tuple(change for change in self.changes[len(kept) :] if change.key == LAYOUT and not change.is_pending)
        for change in self.changes[len(kept) : first]:
            if change not in laid:
                self._outbox.log("warning", "change undone", detail=in_words(change), step=wish.step)
        later = [msgspec.structs.replace(each, from_step=-1) for each in self.changes[first:] if each not in laid]
        self.changes, self.held = (*kept, *laid, *later), any(change.is_pending for change in later)

    # ---- another layout --------------------------------------------------------------------------------------------

    @property
    def lays_out(self) -> bool:
        """Whether another layout is ordered that has not begun."""
        return any(change.key == LAYOUT and change.is_pending for change in self.changes)

    @property
    def why_laid_out(self) -> str:
        """Who has chosen the newest layout, and why it is so."""
        return self.layout.why if self.layout is not None and self.layout.why else "by the operator"

    def guidance_after(self, plan: Plan | None) -> Guidance | None:
        """What a plan in the newest layout has: the planner's, or what of the plan before counts for other stages."""
        planned = None if self.layout is None else self.layout.guidance
        return planned or Guidance.for_other_stages(plan)

    def lay_out(self, step: int) -> None:
        """The layout begins with this step, and so does all that waits for a boundary: new ledgers know it all."""
        self.changes, late = begun_at(self.changes, step)
        self._told_late(late, step)
        self.held, self.save = False, -1

    def give_up_layout(self, why: str) -> None:
        """The run goes on as it is laid out."""
        self.changes = tuple(change for change in self.changes if change.key != LAYOUT or not change.is_pending)
        self.held, self.save = any(change.is_pending for change in self.changes), -1
        self._outbox.log("warning", "layout given up", reason=why)

    def laid_back(self, step: int) -> bool:
        """New ledgers begin from a checkpoint (-1: the seed) in the layout of now; one that is ordered begins later.
        Returns whether steps will be done otherwise than before, in a layout that came later."""
        before, self.changes, self.save = self.changes, kept_layouts(self.changes, step), -1
        return self.changes != before

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
            if any(report is not None and report.counters.get("unreported", 0.0) for report in reports):
                return False  # a step that was decided with what stands before it: `counted` has its number first
            # Another layout begins with other ledgers, from what all have closed: what was open is thrown away.
            step = closed_up_to(reports) if self.lays_out else boundary(reports)
            if step is None:
                return False
            if self.lays_out:  # there is more to do before it begins (`replanning.py`)
                news, self.save = self.save != step, step
                return news
            self.changes, late = begun_at(self.changes, step)
            self._told_late(late, step)
            self._outbox.log("info", "changes begin", step=max([step, *(each.from_step for each in self.changes)]))
        else:
            self.held = False
        return True

    def over(self, step: int) -> None:
        """The run has ended with this step: an order that was taken while it was on its way there comes to nothing."""
        self._told_late([change for change in self.changes if change.from_step < 0], step)

    def _told_late(self, late: Sequence[RunChange], step: int) -> None:
        for change in late:
            self._outbox.log("warning", "change too late", detail=in_words(change), step=step)


def _key(change: RunChange) -> tuple[str, str]:
    return change.key, change.value


def _with(changes: Sequence[RunChange], ordered: Sequence[RunChange]) -> tuple[RunChange, ...]:
    """Those of `changes` that were ordered; each order once."""
    left = [_key(change) for change in ordered]
    found = []
    for change in reversed(changes):
        if _key(change) in left:
            left.remove(_key(change))
            found.append(change)
    return tuple(reversed(found))


def _without(changes: Sequence[RunChange], known: Sequence[RunChange]) -> tuple[RunChange, ...]:
    """Those that are not among the known ones; each of these stands for one."""
    left = [_key(change) for change in known]
    found = []
    for change in changes:
        if _key(change) in left:
            left.remove(_key(change))
        else:
            found.append(change)
    return tuple(found)
