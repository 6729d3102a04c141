"""Which stage a volunteer works for: the one that would be the slowest, as long as it helps there. Pure functions.

A pipeline is as fast as its slowest stage, so power goes where the fewest steps a second are carried; ties go to the
lower stage. Power is what a volunteer would do for that very stage, with its device and its lines (`throughput`). Once
in a step each sends its sum of gradients, however many they are, so a stage does not carry in proportion to its crew:
with `b` steps a second of each while it sends no sum, and `p` seconds for that, a step takes (1 + Σ p b) / Σ b seconds.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from protocol.base.ids import NodeId

GAIN_MIN = 0.2
"""A volunteer moves between stages that have somebody for at least a fifth more steps a second: the way back would then
be worth nothing, so nobody moves to and fro, and what is known of members is not much better than that."""
WISH_SLACK = 1.0 + GAIN_MIN
"""A wish is granted while its stage carries at most so many times the steps of the slowest one: more, and somebody
would be moved back soon. With 2, the fourth of four alike that all wished for one of two stages made 3 beside 1 of 2
beside 1, and a step took twice as long."""
PAYBACK_S = 600.0
"""A move must make up for its download within ten minutes: half of all volunteers stay longer than that."""
MOVES_MAX = 2
"""So many volunteers move at once. On a day of spot instances two stages are often equally slow, since crews are whole
numbers; a third move would have gained a percent."""


@dataclass(frozen=True, slots=True)
class Power:
    """A volunteer: its stage (-1: none yet), and what it would do."""

    node: NodeId
    stage: int
    steps_per_s: tuple[float, ...]
    """By stage: the steps a second that it alone would carry there while it does nothing but visits."""
    number: int
    """Order of arrival."""
    reload_s: tuple[float, ...] = ()
    """By stage: what taking its parameters costs; nothing where that is empty."""
    pause_s: tuple[float, ...] = ()
    """By stage: the seconds of each step in which it does no visits; none where that is empty."""


class Carried:
    """The steps a second that the volunteers of each stage carry together, as some come and others go."""

    __slots__ = ("_pauses", "_steps")

    def __init__(self, stages: int) -> None:
        self._steps = [0.0] * stages
        self._pauses = [0.0] * stages
        """Of a step, so many steps that are not carried meanwhile."""

    def copy(self) -> Carried:
        twin = Carried(0)
        twin._steps, twin._pauses = self._steps[:], self._pauses[:]
        return twin

    def add(self, power: Power, stage: int, times: int = 1) -> None:
        """`times`: -1 takes it away."""
        steps = power.steps_per_s[stage] * times
        self._steps[stage] += steps
        self._pauses[stage] += steps * power.pause_s[stage] if power.pause_s else 0.0

    def of(self, stage: int) -> float:
        return self._steps[stage] / (1.0 + self._pauses[stage])

    def with_one(self, power: Power, stage: int, times: int = 1) -> float:
        """What it would be with it, or (`times` -1) without it."""
        steps = power.steps_per_s[stage] * times
        pause = steps * power.pause_s[stage] if power.pause_s else 0.0
        return (self._steps[stage] + steps) / (1.0 + self._pauses[stage] + pause)


class Standing:
    """Who works for which stage, with the sums that the next choice goes by: a newcomer costs the number of stages, not
    that of all who are there. (A run that begins welcomes thousands within one input.)"""

    def __init__(self, stages: int, powers: Iterable[Power] = ()) -> None:
        self.powers: list[Power] = []
        """In order of arrival."""
        self.counts = [0] * stages
        self.sums = Carried(stages)
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
            self.sums.add(power, power.stage)

    def carried(self, needed: Sequence[bool]) -> list[float]:
        """Steps a second that each stage's volunteers carry together: without bounds where no route comes, since one
        may leave a stage out and so may all of them (two stages of which half is skipped)."""
        return [self.sums.of(stage) if here else math.inf for stage, here in enumerate(needed)]


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


def fill(
    needed: Sequence[bool], standing: Standing, keep: Sequence[NodeId] = (), as_empty: Sequence[int] = ()
) -> tuple[NodeId, Assignment] | None:
    """A volunteer to take from a stage that has two or more for a stage that has none, or None. Where there is no such
    stage: for one of those that are `as_empty`.

    The weakest of the richest stage goes, of equals the last to come: that leaves the giver with the most. Those in
    `keep` stay where they are.
    """
    counts = standing.counts
    empty = [stage for stage, count in enumerate(counts) if count == 0 and needed[stage]] or as_empty
    needy = [stage for stage in empty if needed[stage]]
    kept = frozenset(keep)
    movable = [power for power in standing.powers if power.node not in kept and power.stage not in empty]
    givers = [power.stage for power in movable if counts[power.stage] >= 2]
    if not needy or not givers:
        return None
    carried = standing.carried(needed)
    giver = max(givers, key=lambda stage: (carried[stage], counts[stage], -stage))
    crew = [power for power in movable if power.stage == giver]
    chosen = min(crew, key=lambda power: (power.steps_per_s[giver], -power.number))
    target = min(needy, key=lambda stage: (chosen.steps_per_s[stage], stage))  # where the work is most
    reason = f"moved from stage {giver} to stage {target}, where no volunteer works"
    return chosen.node, Assignment(target, reason, "empty_stage")


def balance(
    needed: Sequence[bool],
    standing: Standing,
    per_stage_max: int,
    keep: Sequence[NodeId] = (),
    unproven: Sequence[NodeId] = (),
) -> list[tuple[NodeId, Assignment]]:
    """The moves that make the pipeline faster, if they are worth it: one to the slowest stage, or two at once where two
    stages are equally slow and one alone gains nothing. None: nobody moves.

    Nobody leaves a stage alone. Those in `keep` stay where they are. Nobody leaves a stage in reliance on those in
    `unproven`, who have shown nothing yet; where they are, that stage is not thought the slower for it.
    """
    here = [stage for stage in range(len(needed)) if needed[stage]]
    before = min((standing.sums.of(stage) for stage in here), default=0.0)
    if before <= 0:
        return []
    board = _Board(here, standing, frozenset(unproven))
    kept = frozenset(keep)
    movable = [power for power in standing.powers if power.node not in kept]
    moves: list[tuple[Power, int]] = []
    cost_s = 0.0
    while len(moves) < MOVES_MAX:
        slowest = board.slowest()
        if board.counts[slowest] >= per_stage_max:
            break
        best = max(board.moves_to(slowest, movable), default=None, key=lambda found: found[:3])
        if best is None:
            break
        power = best[3]
        board.move(power, slowest)
        moves.append((power, slowest))
        movable = [other for other in movable if other is not power]
        cost_s += power.reload_s[slowest] if power.reload_s else 0.0
        gain = min(board.sums.of(stage) for stage in here) / before - 1.0
        if gain >= GAIN_MIN and gain * PAYBACK_S > cost_s:
            return [
                (mover.node, Assignment(stage, _reason(mover.stage, stage, len(moves), gain), "balance"))
                for mover, stage in moves
            ]
    return []


def _reason(left: int, joined: int, moves: int, gain: float) -> str:
    together = "" if moves == 1 else f"with {moves - 1} more move, "
    return f"moved from stage {left} to stage {joined}, the slowest: {together}{gain:.0%} more steps"


class _Board:
    """The stages as they would be after moves that are thought of.

    Args:
        here: the stages that routes come to.
        unknown: who has shown nothing yet.
    """

    def __init__(self, here: list[int], standing: Standing, unknown: frozenset[NodeId]) -> None:
        self._here = here
        self.counts = standing.counts[:]
        self.sums = standing.sums.copy()
        self._proven = standing.counts[:]
        self._relied_on = standing.sums.copy()
        """Without those who are unknown."""
        for power in standing.powers:
            if power.node in unknown:
                self._relied_on.add(power, power.stage, -1)
                self._proven[power.stage] -= 1

    def slowest(self) -> int:
        return min(self._here, key=lambda stage: (self.sums.of(stage), stage))

    def moves_to(self, target: int, movable: Iterable[Power]) -> Iterator[tuple[float, float, int, Power]]:
        """(what the slowest stage carries then, what the slower one of both stages does, order of arrival, who) of each
        move that leaves its old stage faster than this one was, and that could pay if no other stage were slow."""
        rank = sorted((self.sums.of(stage), stage) for stage in self._here if stage != target)
        now = self.sums.of(target)  # more than nothing, or `balance` would not ask
        for power in movable:
            if power.stage == target or self._proven[power.stage] < 2:
                continue
            left = self._relied_on.with_one(power, power.stage, -1)
            both = min(left, self.sums.with_one(power, target))
            cost_s = power.reload_s[target] if power.reload_s else 0.0
            if both <= now or (both / now - 1.0) * PAYBACK_S <= cost_s:
                continue
            third = next((steps for steps, stage in rank if stage != power.stage), math.inf)
            yield min(both, third), both, power.number, power

    def move(self, power: Power, target: int) -> None:
        for sums in (self.sums, self._relied_on):
            sums.add(power, power.stage, -1)
            sums.add(power, target)
        for counts in (self.counts, self._proven):
            counts[power.stage] -= 1
            counts[target] += 1
