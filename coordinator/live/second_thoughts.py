"""Whether a volunteer's move between stages made the run faster, by the steps that then came. Pure.

Who moves is chosen by what members are thought to do (`throughput`), and that can be wrong: a benchmark beside a game,
a member that works well until others rely on it. What steps take is not thought but seen. So every move to balance two
stages is a trial: the mean of the steps before it beside the mean of those after it. One that made steps longer is
taken back, and after each such one the next move waits twice as long; so nobody's claims cost a run more than an ever
smaller part of its time. Moves that were made together are one trial, and go back together.

Steps become longer, too, where members leave: half of a stage of two, and whoever stays does again what they took with
them. So a trial ends where a stage has lost a tenth of its members, and steps of larger crews are none to compare with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.base.ids import NodeId

STEPS_MIN = 8
TRIAL_S = 60.0
"""A mean is over so many steps and over as long, whichever is more: 8 steps of two and a half minutes, as 1.1 B
parameters take on home lines, are twenty minutes; of steps of half a second, a minute has a hundred."""
WORSE = 0.1
"""Means of eight steps on home lines scatter by a few percent. And a stage that has lost less than this share of its
members is the same stage: among a thousand somebody always leaves."""
STANDS_TIMES = 2
"""A run that has not closed so many steps in so many times what they took before stands still, or nearly."""
DOUBLINGS_MAX = 6
"""A minute between moves becomes an hour, and stays one."""


@dataclass(frozen=True, slots=True)
class Moved:
    """One of a trial's volunteers."""

    node: NodeId
    left: int
    """The stage that it came from."""
    joined: int


@dataclass(slots=True)
class Trial:
    """Moves that are being judged."""

    moves: tuple[Moved, ...]
    crews: Mapping[int, int]
    """Volunteers by stage, after the moves: when some of them go, longer steps say nothing of the moves."""
    before_s: float
    """Mean of the steps before."""
    begins_at: float
    """From then on steps count: all have taken their parameters and work."""
    durations_s: list[float] = field(default_factory=list)


class SecondThoughts:
    """Judges one trial after the other."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, Counter[int]]] = deque()
        """(when it closed, what it took, volunteers by stage) of the newest steps; those of the last `TRIAL_S`, and
        `STEPS_MIN` at least."""
        self.trial: Trial | None = None
        self._doublings = 0

    @property
    def pause_factor(self) -> float:
        """What the usual pause between moves is multiplied by."""
        return 2.0**self._doublings

    @property
    def undecided(self) -> bool:
        """Whether the next move should wait for what becomes of the last: not where that takes longer than `TRIAL_S`,
        or a run of long steps would even out once in twenty minutes."""
        return self.trial is not None and self.trial.before_s * STEPS_MIN <= TRIAL_S

    def moved(self, moves: Sequence[Moved], crews: Mapping[int, int], works_at: float) -> None:
        """Volunteers are moved now; `crews`: by stage, with them. A trial without enough steps of such crews before it
        cannot be judged, and is none."""
        for _, _, then in self._recent:  # who has only gone elsewhere has not left
            then.subtract(each.left for each in moves)
            then.update(each.joined for each in moves)
        alike = [took_s for _, took_s, then in self._recent if not _fewer(crews, then)]
        self.trial = None
        if len(alike) >= STEPS_MIN:
            self.trial = Trial(tuple(moves), dict(crews), sum(alike) / len(alike), works_at)

    def step_closed(self, duration_s: float, crews: Mapping[int, int], now: float) -> None:
        """A step was closed, by these volunteers by stage; 0 s: nobody knows what it took, since its decider began
        anew."""
        if duration_s <= 0:
            return
        self._recent.append((now, duration_s, Counter(crews)))
        while len(self._recent) > STEPS_MIN and self._recent[0][0] < now - TRIAL_S:
            self._recent.popleft()
        if self.trial is not None and now >= self.trial.begins_at:
            self.trial.durations_s.append(duration_s)

    def verdict(self, now: float, interrupted: bool = False) -> tuple[Trial, float] | None:
        """The trial and by what share its steps became longer, where that is too much. None: not yet, or all is well; a
        trial that is over is forgotten. Steps that do not come at all are longer, too, unless the run is `interrupted`
        for another reason: what a pause takes is no fault of whoever moved before it."""
        trial = self.trial
        if trial is not None and interrupted:
            trial.begins_at = max(trial.begins_at, now)
        if trial is None or now < trial.begins_at + TRIAL_S:
            return None
        steps, took_s = len(trial.durations_s), sum(trial.durations_s)
        if steps < STEPS_MIN:
            steps, took_s = steps + 1, now - trial.begins_at
            if now < trial.begins_at + TRIAL_S + STANDS_TIMES * STEPS_MIN * trial.before_s:
                return None
        self.trial = None
        longer = took_s / steps / trial.before_s - 1.0
        self._doublings = 0 if longer <= WORSE else min(DOUBLINGS_MAX, self._doublings + 1)
        return (trial, longer) if longer > WORSE else None

    def lost(self, crews: Mapping[int, int]) -> None:
        """Somebody has left; `crews`: who is still there, by stage."""
        if self.trial is not None and _fewer(crews, self.trial.crews):
            self.trial = None

    def gone(self, node: NodeId) -> None:
        """A volunteer left, or was given another stage for another reason."""
        if self.trial is not None and any(moved.node == node for moved in self.trial.moves):
            self.trial = None


def _fewer(crews: Mapping[int, int], than: Mapping[int, int]) -> bool:
    """Whether a stage has so many fewer that its steps are not the same."""
    return any(crews.get(stage, 0) < (1.0 - WORSE) * count for stage, count in than.items())
