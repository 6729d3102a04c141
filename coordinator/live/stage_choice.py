"""Which stage a volunteer works for: the one with the least power for its work. Pure functions with reasons.

A pipeline is as fast as its slowest stage, so power goes where work per power is greatest; ties go to the lower stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.base.ids import NodeId

WISH_SLACK = 2.0
"""A wish is granted while its stage has at most so many times the power per work of the poorest one: moving costs a
download of parameters, which a small imbalance does not pay back."""


@dataclass(frozen=True, slots=True)
class Power:
    """A volunteer at work: its stage and what it gives."""

    node: NodeId
    stage: int
    tokens_per_s: float
    """0: not measured; counts as the mean of the measured."""
    number: int
    """Order of arrival."""


class Standing:
    """Who works for which stage, with the sums that the next choice goes by: a newcomer costs the number of stages, not
    that of all who are there. (A run that begins welcomes thousands within one input.)"""

    def __init__(self, stages: int, powers: Iterable[Power] = ()) -> None:
        self.powers: list[Power] = []
        """In order of arrival."""
        self.counts = [0] * stages
        self._sums = [0.0] * stages
        self._all_measured = True
        for power in powers:
            self.add(power)

    def add(self, power: Power) -> None:
        """One more, who came after all others."""
        self.powers.append(power)
        self._all_measured = self._all_measured and power.tokens_per_s > 0
        if 0 <= power.stage < len(self.counts):
            self.counts[power.stage] += 1
            self._sums[power.stage] += power.tokens_per_s

    def per_work(self, work: Sequence[float]) -> list[float]:
        """As `power_per_work`."""
        if not self._all_measured:  # what is not measured counts as the mean of what is, which every newcomer moves
            return power_per_work(work, self.powers)
        return _over_shares(self._sums, work)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A stage and the sentence that says why. Stage -1: no stage has room."""

    stage: int
    reason: str
    label: str
    """One of `ASSIGNMENT_LABELS`."""


ASSIGNMENT_LABELS = ("least_power", "wished", "empty_stage", "full", "slot", "spare")
"""Values of the label `reason` of barnraise_coordinator_assignments_total."""


def assign(work: Sequence[float], standing: Standing, wished: int, per_stage_max: int) -> Assignment:
    """The stage for one more volunteer.

    Args:
        work: multiply-adds per token of each stage.
        wished: the stage it asks for (its line to that stage's servers is the best), or -1.
        per_stage_max: volunteers that the servers of one stage take.
    """
    ratios, counts = standing.per_work(work), standing.counts
    open_stages = [stage for stage in range(len(work)) if counts[stage] < per_stage_max]
    if not open_stages:
        return Assignment(-1, f"all stages have the {per_stage_max} volunteers that they can serve", "full")
    poorest = min(open_stages, key=lambda stage: (ratios[stage], counts[stage], stage))
    if wished in open_stages and wished != poorest:
        nobody_waits = counts[poorest] > 0
        if nobody_waits and ratios[wished] <= WISH_SLACK * ratios[poorest]:
            return Assignment(wished, f"stage {wished} as it wished: no other stage is short of power", "wished")
    instead = f", so not stage {wished} as it wished" if 0 <= wished < len(work) and wished != poorest else ""
    if counts[poorest] == 0:
        return Assignment(poorest, f"stage {poorest} has no volunteer{instead}", "empty_stage")
    return Assignment(poorest, f"stage {poorest} has the least power for its work{instead}", "least_power")


def move(
    work: Sequence[float], powers: Sequence[Power], keep: Sequence[NodeId] = ()
) -> tuple[NodeId, Assignment] | None:
    """A volunteer to take from a stage that has two or more for a stage that has none, or None.

    The weakest of the richest stage goes, of equals the last to come: that leaves the giver with the most. Those in
    `keep` stay where they are.
    """
    counts = [sum(power.stage == stage for power in powers) for stage in range(len(work))]
    needy = [stage for stage, count in enumerate(counts) if count == 0 and work[stage] > 0]
    movable = [power for power in powers if power.node not in keep]
    givers = [power.stage for power in movable if counts[power.stage] >= 2]
    if not needy or not givers:
        return None
    ratios = power_per_work(work, powers)
    giver = max(givers, key=lambda stage: (ratios[stage], counts[stage], -stage))
    chosen = min(
        (power for power in movable if power.stage == giver), key=lambda power: (power.tokens_per_s, -power.number)
    )
    target = max(needy, key=lambda stage: (work[stage], -stage))
    reason = f"moved from stage {giver} to stage {target}, which has no volunteer"
    return chosen.node, Assignment(target, reason, "empty_stage")


def power_per_work(work: Sequence[float], powers: Sequence[Power]) -> list[float]:
    """Tokens per second of each stage's volunteers over the stage's share of the work: without bounds where there is no
    work, since a route may leave a stage out and so may all of them (two stages of which half is skipped)."""
    measured = [power.tokens_per_s for power in powers if power.tokens_per_s > 0]
    typical = sum(measured) / len(measured) if measured else 1.0
    sums = [0.0] * len(work)
    for power in powers:
        if 0 <= power.stage < len(work):
            sums[power.stage] += power.tokens_per_s if power.tokens_per_s > 0 else typical
    return _over_shares(sums, work)


def _over_shares(sums: Sequence[float], work: Sequence[float]) -> list[float]:
    total = sum(work)
    return [gathered * total / share if share else math.inf for gathered, share in zip(sums, work, strict=True)]
