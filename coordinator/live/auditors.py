"""Which stage each auditor looks after: machines of the operator that compute others' work again.

Where its operator wishes it to be, else where there are fewest. It holds one stage's parameters, as a volunteer does,
so a stage that its last auditor has left gets one of another that has several.
"""

from __future__ import annotations

from collections import Counter

from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member, Roster
from coordinator.live.seating import Placement
from protocol.run.run import RunConfig

MOVE_PAUSE_S = 15.0
"""A stage is without its auditors for so long before another's comes: one that starts again is often back within it."""


class Auditors:
    """The auditors' side of the coordinator."""

    def __init__(self, config: RunConfig, roster: Roster, placement: Placement, outbox: Outbox) -> None:
        self._config = config
        self._roster = roster
        self._placement = placement
        self._outbox = outbox
        self._uneven_since: float | None = None

    def arrive(self, member: Member, now: float) -> None:
        """A welcomed auditor gets a stage and the plan."""
        counts = self._counts()
        wished = member.join.stage if member.join is not None else -1
        fewest = min(counts, key=lambda stage: (counts[stage], stage))
        self._give(member, wished if wished in counts else fewest, now)

    def lay_out(self, now: float) -> None:
        """The model is cut anew: whose stage is gone gets another."""
        for member in self._roster.auditors():
            member.stage = member.stage if member.stage in self._counts() else -1
        for member in self._roster.auditors():
            if member.stage < 0:
                self.arrive(member, now)

    def even_out(self, now: float) -> None:
        """Moves one where a stage has none and another has several. Called now and then."""
        counts = self._counts()
        auditors = self._roster.auditors()
        empty = [stage for stage, count in counts.items() if not count]
        movable = [
            member
            for member in auditors
            if member.stage not in counts or (counts[member.stage] > 1 and not self._is_wished(member))
        ]
        if not (empty and movable):
            self._uneven_since = None
        elif self._uneven_since is None:
            self._uneven_since = now
        elif now - self._uneven_since >= MOVE_PAUSE_S:
            self._uneven_since = None
            self._give(movable[-1], empty[0], now)

    @staticmethod
    def _is_wished(member: Member) -> bool:
        return member.join is not None and member.join.stage == member.stage

    def _counts(self) -> dict[int, int]:
        """Auditors by stage; they are welcomed only when stage 0 has read the data, so after the first plan."""
        plan = self._placement.plan
        assert plan is not None, "an auditor was welcomed before the first plan"
        known = Counter(member.stage for member in self._roster.auditors())
        return {stage: known[stage] for stage in range(len(plan.stages))}

    def _give(self, member: Member, stage: int, now: float) -> None:
        member.stage, member.stage_reason, member.stage_since = stage, f"audits stage {stage}", now
        member.told_generation = -1
        self._outbox.count("barnraise_coordinator_assignments_total", run=self._config.name, reason="auditor")
        self._outbox.log("info", "auditor assigned", node=member.peer, stage=stage)
        self._placement.tell(member)
