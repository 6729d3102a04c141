"""Which stage a volunteer works for: the one that would be the slowest, as long as it helps there. Pure functions.

A pipeline is as fast as its slowest stage, so power goes where the fewest steps a second are carried; ties go to the
lower stage. Power is what a volunteer would do for that very stage, with its device and its lines (`throughput`).
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocol.base.ids import NodeId

WISH_SLACK = 2.0
"""A wish is granted while its stage carries at most so many times the steps of the slowest one: moving costs a
download of parameters, which a small imbalance does not pay back."""
GAIN_MIN = 0.2
"""A volunteer moves between stages that have somebody for at least a fifth more steps a second: the way back would then
be worth nothing, so nobody moves to and fro, and what is known of members is not much better than that."""
PAYBACK_S = 600.0
"""A move must make up for its download within ten minutes: half of all volunteers stay longer than that."""


@dataclass(frozen=True, slots=True)
class Power:
    """A volunteer: its stage (-1: none yet), and what it would do."""

    node: NodeId
    stage: int
    steps_per_s: tuple[float, ...]
    """By stage: the steps a second that it alone would carry there."""
    number: int
    """Order of arrival."""
    reload_s: tuple[float, ...] = ()
    """By stage: what taking its parameters costs; nothing where that is empty."""


class Standing:
    """Who works for which stage, with the sums that the next choice goes by: a newcomer costs the number of stages, not
    that of all who are there. (A run that begins welcomes thousands within one input.)"""

    def __init__(self, stages: int, powers: Iterable[Power] = ()) -> None:
        self.powers: list[Power] = []
        """In order of arrival."""
        self.counts = [0] * stages
        self._sums = [0.0] * stages
        for power in powers:
            self.add(power)

    def add(self, power: Power) -> None:
        """One more; mostly, but not always, whoever is given a stage last came last."""
        if self.powers and self.powers[-1].number > power.number:
            insort(self.powers, power, key=lambda other: other.number)
        else:
            self.powers.append(power)
        if 0 <= power.stage < len(self.counts):
            self.counts[power.stage] += 1
            self._sums[power.stage] += power.steps_per_s[power.stage]

    def carried(self, needed: Sequence[bool]) -> list[float]:
        """Steps a second that each stage's volunteers carry together: without bounds where no route comes, since one
        may leave a stage out and so may all of them (two stages of which half is skipped)."""
        return [steps if here else math.inf for steps, here in zip(self._sums, needed, strict=True)]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A stage and the sentence that says why. Stage -1: no stage has room."""

    stage: int
    reason: str
    label: str
    """One of `ASSIGNMENT_LABELS`."""


ASSIGNMENT_LABELS = ("least_power", "wished", "empty_stage", "full", "slot", "spare", "balance", "auditor")
"""Values of the label `reason` of barnraise_coordinator_assignments_total."""


def assign(
    needed: Sequence[bool], standing: Standing, newcomer: Sequence[float], wished: int, per_stage_max: int
) -> Assignment:
    """The stage for one more volunteer.

    Args:
        needed: of each stage, whether any route comes to it.
        standing: those at work.
        newcomer: what it would do for each stage, as `Power.steps_per_s`.
        wished: the stage it asks for (its line to that stage's servers is the best), or -1.
        per_stage_max: volunteers that the servers of one stage take.
    """
    carried, counts = standing.carried(needed), standing.counts
    open_stages = [stage for stage in range(len(needed)) if counts[stage] < per_stage_max]
    if not open_stages:
        return Assignment(-1, f"all stages have the {per_stage_max} volunteers that they can serve", "full")
    useful = [stage for stage in open_stages if newcomer[stage] > 0] or open_stages
    poorest = min(useful, key=lambda stage: (carried[stage], counts[stage], stage))
    if wished in useful and wished != poorest:
        nobody_waits = counts[poorest] > 0
        if nobody_waits and carried[wished] <= WISH_SLACK * carried[poorest]:
            return Assignment(wished, f"stage {wished} as it wished: no other stage is short of power", "wished")
    instead = f", so not stage {wished} as it wished" if 0 <= wished < len(needed) and wished != poorest else ""
    if counts[poorest] == 0:
        return Assignment(poorest, f"stage {poorest} has no volunteer{instead}", "empty_stage")
    return Assignment(poorest, f"stage {poorest} has the least power for its work{instead}", "least_power")


def fill(needed: Sequence[bool], standing: Standing, keep: Sequence[NodeId] = ()) -> tuple[NodeId, Assignment] | None:
    """A volunteer to take from a stage that has two or more for a stage that has none, or None.

    The weakest of the richest stage goes, of equals the last to come: that leaves the giver with the most. Those in
    `keep` stay where they are.
    """
    counts = standing.counts
    needy = [stage for stage, count in enumerate(counts) if count == 0 and needed[stage]]
    kept = frozenset(keep)
    movable = [power for power in standing.powers if power.node not in kept]
    givers = [power.stage for power in movable if counts[power.stage] >= 2]
    if not needy or not givers:
        return None
    carried = standing.carried(needed)
    giver = max(givers, key=lambda stage: (carried[stage], counts[stage], -stage))
    crew = [power for power in movable if power.stage == giver]
    chosen = min(crew, key=lambda power: (power.steps_per_s[giver], -power.number))
    target = min(needy, key=lambda stage: (chosen.steps_per_s[stage], stage))  # where the work is most
    reason = f"moved from stage {giver} to stage {target}, which has no volunteer"
    return chosen.node, Assignment(target, reason, "empty_stage")


def balance(
    needed: Sequence[bool],
    standing: Standing,
    per_stage_max: int,
    keep: Sequence[NodeId] = (),
    unproven: Sequence[NodeId] = (),
) -> tuple[NodeId, Assignment] | None:
    """The one move to the slowest stage that makes the pipeline most faster, if it is worth it, or None.

    Nobody leaves a stage alone. Those in `keep` stay where they are. Nobody leaves a stage in reliance on those in
    `unproven`, who have shown nothing yet; where they are, that stage is not thought the slower for it.
    """
    counts, carried = standing.counts, standing.carried(needed)
    slowest = min((stage for stage in range(len(needed)) if needed[stage]), key=lambda s: (carried[s], s), default=-1)
    if slowest < 0 or carried[slowest] <= 0 or counts[slowest] >= per_stage_max:
        return None
    others = sorted((carried[stage], stage) for stage in range(len(needed)) if needed[stage] and stage != slowest)
    best: tuple[float, int, Power] | None = None
    kept = frozenset(keep)
    relied_on, proven = carried[:], counts[:]
    unknown = frozenset(unproven)
    for power in standing.powers:
        if power.node in unknown:
            relied_on[power.stage] -= power.steps_per_s[power.stage]
            proven[power.stage] -= 1
    for power in standing.powers:
        if power.stage == slowest or power.node in kept or proven[power.stage] < 2:
            continue
        left = relied_on[power.stage] - power.steps_per_s[power.stage]
        third = next((steps for steps, stage in others if stage != power.stage), math.inf)
        after = min(left, carried[slowest] + power.steps_per_s[slowest], third)
        gain = after / carried[slowest] - 1.0
        cost_s = power.reload_s[slowest] if power.reload_s else 0.0
        if gain >= GAIN_MIN and gain * PAYBACK_S > cost_s and (best is None or (gain, power.number) > best[:2]):
            best = gain, power.number, power
    if best is None:
        return None
    gain, _, power = best
    reason = f"moved from stage {power.stage} to stage {slowest}, the slowest: {gain:.0%} more steps"
    return power.node, Assignment(slowest, reason, "balance")
