"""Gives volunteers their stages, and moves one when a stage has nobody while another has several."""

from __future__ import annotations

from coordinator.live.outbox import Outbox
from coordinator.live.plan_builder import stage_work
from coordinator.live.roster import Member, Roster
from coordinator.live.seating import Placement
from coordinator.live.stage_choice import Assignment, Power, Standing, assign, move
from protocol.run.run import RunConfig

MOVE_PAUSE_S = 5.0
"""A stage is without volunteers for so long before one is moved, and two moves are so far apart: one that was killed
is often back within it, and a swarm that jumps at every change only downloads parameters."""
STAY_S = 15.0
"""A volunteer that came to its stage less than this ago is not moved."""


class Crew:
    """The volunteers' side of the coordinator."""

    def __init__(self, config: RunConfig, roster: Roster, placement: Placement, outbox: Outbox) -> None:
        self._config = config
        self._roster = roster
        self._placement = placement
        self._outbox = outbox
        self._empty_since: float | None = None
        self._standing: Standing | None = None
        """Of those with a stage; None: to be found anew."""
        self._newest = -1
        """The number of the last of them."""
        self._known_work: tuple[int, int, list[float]] | None = None
        """Plan, vocabulary, and each stage's work."""

    def changed(self) -> None:
        """A volunteer has left, or says something else of itself."""
        self._standing = None

    def arrive(self, member: Member, vocabulary: int, now: float) -> None:
        """A welcomed volunteer gets a stage and the plan."""
        self._give(member, self._choose(member, vocabulary), now)

    def even_out(self, vocabulary: int, now: float) -> None:
        """Gives work to those without, and moves one volunteer where that is due. Called now and then."""
        for member in self._roster.volunteers():
            if member.stage == -1:
                choice = self._choose(member, vocabulary)
                if choice.stage != -1:
                    self._give(member, choice, now)
        standing = self._stands()
        powers = standing.powers
        if all(standing.counts) or not powers:
            self._empty_since = None
            return
        if self._empty_since is None:
            self._empty_since = now
        if now - self._empty_since < MOVE_PAUSE_S:
            return
        keep = [member.peer for member in self._roster.volunteers() if now - member.stage_since < STAY_S]
        moved = move(self._work(vocabulary), powers, keep)
        if moved is None:
            return
        node, choice = moved
        mover = self._roster.get(node)
        assert mover is not None
        self._empty_since = now
        self._give(mover, choice, now)

    def _choose(self, member: Member, vocabulary: int) -> Assignment:
        assert member.join is not None
        return assign(self._work(vocabulary), self._stands(), member.join.stage, self._config.limits.volunteers_max)

    def _give(self, member: Member, choice: Assignment, now: float) -> None:
        newcomer = member.stage < 0 and member.number > self._newest
        member.stage, member.stage_reason, member.stage_since = choice.stage, choice.reason, now
        if self._standing is None or not newcomer:
            self._standing = None
        elif choice.stage >= 0:
            self._standing.add(_power_of(member))
            self._newest = member.number
        member.told_generation = -1
        self._outbox.count("barnraise_coordinator_assignments_total", run=self._config.name, reason=choice.label)
        self._outbox.log("info", "volunteer assigned", node=member.peer, stage=choice.stage, detail=choice.reason)
        self._placement.tell(member)

    def _stands(self) -> Standing:
        plan = self._placement.plan
        stages = 0 if plan is None else len(plan.stages)
        if self._standing is None or len(self._standing.counts) != stages:
            working = [member for member in self._roster.volunteers() if member.join is not None and member.stage >= 0]
            self._standing = Standing(stages, map(_power_of, working))
            self._newest = working[-1].number if working else -1
        return self._standing

    def _work(self, vocabulary: int) -> list[float]:
        plan = self._placement.plan
        assert plan is not None, "volunteers come in only when stage 0 has read the data, so after the first plan"
        if self._known_work is None or self._known_work[:2] != (plan.generation, vocabulary):
            work = [stage_work(self._config, plan.course, stage, vocabulary) for stage in range(len(plan.stages))]
            self._known_work = plan.generation, vocabulary, work
        return self._known_work[2]


def _power_of(member: Member) -> Power:
    assert member.join is not None, "a welcomed volunteer has joined"
    return Power(member.peer, member.stage, member.join.tokens_per_s, member.number)
