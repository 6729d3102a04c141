"""Gives volunteers their stages by what they would do there, and moves one where a stage has nobody or too few."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from coordinator.live.measured_links import NetworkBook
from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member, Roster
from coordinator.live.seating import Placement
from coordinator.live.second_thoughts import Moved, SecondThoughts
from coordinator.live.stage_choice import Assignment, Power, Standing, assign, balance, fill
from coordinator.live.throughput import (
    Delivered,
    Means,
    Needs,
    beside_visits,
    left_out_s,
    needs_of,
    reload_s,
    steps_per_s,
    typical_of,
    with_left_out,
)
from protocol.base.ids import NodeId
from protocol.run.course import Course
from protocol.run.news import Share
from protocol.run.run import RunConfig

MOVE_PAUSE_S = 5.0
"""A stage is without volunteers for so long before one is moved, and two moves are so far apart: one that was killed
is often back within it, and a swarm that jumps at every change only downloads parameters."""
STAY_S = 15.0
"""A volunteer that came to its stage less than this ago is not moved to an empty one …"""
SETTLED_S = 60.0
"""… and one less than a minute not to balance two stages; two such moves are as far apart, so that what the first has
changed is counted before the next."""
SHOWN_STEPS = 2
"""Steps for which a volunteer must have been compared with its fellows before another one leaves a stage in reliance on
it: of a member that takes leases and does nothing, two steps show that."""
LOOK_AGAIN_S = 10.0
"""How old what is known of a volunteer's throughput may be: links report as often."""
SEEN_STEPS = 9
"""The median of so many steps is what the run makes: four of them may have waited for somebody who is gone by now."""


@dataclass(slots=True)
class Promise:
    """What a volunteer would do at each stage, as its device and its lines say."""

    looked_at: float
    """The look at all lines and devices when these were what they are."""
    of: tuple[Means, float]
    """What it has, and how far apart steps closed: most looks find the same, and then nothing is reckoned again."""
    steps_per_s: tuple[float, ...]
    reloads_s: tuple[float, ...]
    beside: tuple[tuple[float, float], ...]
    """`beside_visits`."""


class Crew:
    """The volunteers' side of the coordinator."""

    def __init__(
        self,
        config: RunConfig,
        roster: Roster,
        placement: Placement,
        outbox: Outbox,
        network: NetworkBook,
        flops_per_s: Callable[[Member], float],
    ) -> None:
        """`flops_per_s`: a member's power by its benchmark, 0 where there was none."""
        self._config = config
        self._roster = roster
        self._placement = placement
        self._outbox = outbox
        self._network = network
        self._flops_per_s = flops_per_s
        self.pinned: Mapping[NodeId, int] = {}
        """Stages that somebody else has chosen: the world that predicts a plan in force. Nobody is moved then."""
        self.delivered = Delivered()
        self.step_s = 0.0
        """How far apart steps close; 0: not known yet."""
        self._durations_s: deque[float] = deque(maxlen=SEEN_STEPS)
        """Of the newest steps."""
        self._left_out_s: float | None = None
        """Of each visit, by what everybody promises and what is seen; None: to be found anew."""
        self._needs: tuple[Course, int, tuple[Needs, ...]] | None = None
        self._known: dict[NodeId, Promise] = {}
        """Of each volunteer, as its device and its lines say."""
        self._known_at = float("-inf")
        self._typical: Means | None = None
        """What counts for whoever was not measured; None: to be found."""
        self._standing: Standing | None = None
        """Of those with a stage; None: to be found anew."""
        self._counts: Counter[int] = Counter()
        """Volunteers by stage."""
        self._empty_since: float | None = None
        self._look_at: float | None = None
        """When to even out, whenever else it is looked: somebody may be moved to an empty stage from then on."""
        self._balanced_at = float("-inf")
        self._thoughts = SecondThoughts()

    def arrive(self, member: Member, vocabulary: int, now: float) -> None:
        """A welcomed volunteer gets a stage and the plan."""
        self._give(member, self._choose(member, vocabulary), vocabulary, now)

    def lay_out(self, vocabulary: int, now: float) -> None:
        """The model is cut anew: everybody loads other parameters, so everybody is given a stage anew."""
        volunteers = self._roster.volunteers()
        for member in volunteers:
            member.stage = -1
        self._counts.clear()
        self._standing = None
        for member in volunteers:
            self._give(member, self._choose(member, vocabulary), vocabulary, now)

    def changed(self, peer: NodeId) -> None:
        """A volunteer says something else of itself."""
        self._known.pop(peer, None)
        member = self._roster.get(peer)
        if member is not None and member.stage >= 0:
            self._standing = None

    def without_work(self) -> dict[int, list[NodeId]]:
        """Stages whose volunteers are all of no use to one of its servers (`NodeReport.resting`), with these: they are
        as good as empty, since a stage does nothing without one of its servers' pools."""
        found: dict[int, list[NodeId]] = {}
        for slot, node in self._placement.table.holder.items():
            server = self._roster.get(node)
            if slot[0] not in found and server is not None and server.report is not None and server.report.resting:
                crew = [member.peer for member in self._roster.volunteers() if member.stage == slot[0]]
                if crew and set(crew) <= set(server.report.resting):
                    found[slot[0]] = crew
        return found

    def _as_empty(self, standing: Standing) -> list[int]:
        """Those of them that have room for one more."""
        return [stage for stage in self.without_work() if standing.counts[stage] < self._volunteers_max]

    def left(self, member: Member, now: float) -> None:
        """Its link is gone. The time that its stage may be without anybody is counted from here, and not from the next
        look: a stage that nobody serves holds up the whole run."""
        if member.stage >= 0:
            self._standing = None
        self._known.pop(member.peer, None)
        self.delivered.left(member.peer)
        self._thoughts.gone(member.peer)
        if member.role == "volunteer" and member.stage >= 0:
            self._counts[member.stage] -= 1
            self._thoughts.lost(self._counts)
            if not self._counts[member.stage] and self._empty_since is None:
                self._empty_from(now)

    def step_closed(self, shares: Iterable[Share], duration_s: float, vocabulary: int, now: float) -> None:
        """A step is stored: `shares` is who computed how many of its tasks, by the ledgers' count."""
        self.step_s = duration_s if not self.step_s else 0.8 * self.step_s + 0.2 * duration_s
        if duration_s > 0:
            self._durations_s.append(duration_s)
        crews: dict[int, dict[NodeId, float]] = {}
        for member in self._roster.volunteers():
            if member.stage >= 0 and now - member.stage_since > self._compared_after_s:
                crews.setdefault(member.stage, {})[member.peer] = self._promise(member, vocabulary)
        self.delivered.count({share.node: share.tasks for share in shares}, crews.values())
        self._thoughts.step_closed(duration_s, self._counts, now)

    def even_out(self, vocabulary: int, now: float) -> None:
        """Gives work to those without, and moves one volunteer where that is due. Called now and then."""
        if now - self._known_at >= LOOK_AGAIN_S:
            self._known_at, self._typical, self._left_out_s, self._standing = now, None, None, None
        for member in self._roster.volunteers():
            if member.stage == -1:
                choice = self._choose(member, vocabulary)
                if choice.stage != -1:
                    self._give(member, choice, vocabulary, now)
        if self._look_at is not None and self._look_at <= now:
            self._look_at = None
        if self.pinned:
            return
        standing, needed = self._stands(vocabulary), self._needed(vocabulary)
        as_empty = self._as_empty(standing)
        all_manned = all(count > 0 for count, is_needed in zip(standing.counts, needed, strict=True) if is_needed)
        if not standing.powers:
            self._empty_since = self._look_at = None
        elif as_empty or not all_manned:
            if self._empty_since is None:
                self._empty_from(now)
            elif now >= self._empty_since + MOVE_PAUSE_S:
                moved = fill(needed, standing, self._here_less_than(STAY_S, now), as_empty)
                if moved is not None:
                    self._empty_from(now)
                    self._move(*moved, vocabulary, now)
                elif all_manned:
                    self._balance(needed, standing, vocabulary, now)
        else:
            self._empty_since = self._look_at = None
            self._balance(needed, standing, vocabulary, now)

    def _balance(self, needed: list[bool], standing: Standing, vocabulary: int, now: float) -> None:
        """Moves one or two to where the fewest steps are carried, or those back whose move made steps longer."""
        wishes = self._placement.wishes
        interrupted = wishes.paused or wishes.held or bool(self._placement.table.gone_since)
        regretted = self._thoughts.verdict(now, interrupted)
        if regretted is not None:
            trial, longer = regretted
            self._balanced_at = now
            for moved in trial.moves:
                reason = f"moved back from stage {moved.joined} to stage {moved.left}: steps took {longer:.0%} longer"
                if self._counts[moved.left] < self._volunteers_max and self._counts[moved.joined] > 1:
                    self._move(moved.node, Assignment(moved.left, reason, "balance"), vocabulary, now)
        elif not self._thoughts.undecided and now - self._balanced_at >= SETTLED_S * self._thoughts.pause_factor:
            keep = self._here_less_than(SETTLED_S, now)
            unproven = self._here_less_than(max(SETTLED_S, self._compared_after_s + SHOWN_STEPS * self.step_s), now)
            moves = balance(needed, standing, self._volunteers_max, keep, unproven)
            if moves:
                self._balanced_at = now
                self._try(moves, vocabulary, now)

    def _try(self, moves: list[tuple[NodeId, Assignment]], vocabulary: int, now: float) -> None:
        """Moves them, and has it judged."""
        works_at = now
        moved: list[Moved] = []
        for node, choice in moves:
            mover = self._roster.get(node)
            assert mover is not None
            promise = self._measured(mover, vocabulary)
            pause_s = promise.beside[mover.stage][1]
            works_at = max(works_at, now + STAY_S + pause_s + promise.reloads_s[choice.stage])
            moved.append(Moved(node, mover.stage, choice.stage))
            self._move(node, choice, vocabulary, now)
        self._thoughts.moved(moved, self._counts, works_at)

    @property
    def _compared_after_s(self) -> float:
        """A volunteer has done whole steps of its stage when it is there for so long."""
        return 2 * self.step_s + STAY_S

    def wake_at(self, sweep_at: float | None) -> float | None:
        """When to even out next; `sweep_at`: when it is done anyhow, None where nobody is linked."""
        if sweep_at is None or self._look_at is None or self._placement.plan is None:
            return sweep_at
        return min(sweep_at, self._look_at)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        volunteers = (member for member in self._roster.all() if member.role == "volunteer")
        counts = Counter(member.stage for member in volunteers if member.stage >= 0)
        assert counts == self._counts, f"{dict(self._counts)} volunteers by stage are not {dict(counts)}"

    def _empty_from(self, now: float) -> None:
        self._empty_since, self._look_at = now, now + MOVE_PAUSE_S

    def _here_less_than(self, seconds: float, now: float) -> list[NodeId]:
        return [member.peer for member in self._roster.volunteers() if now - member.stage_since < seconds]

    def _move(self, node: NodeId, choice: Assignment, vocabulary: int, now: float) -> None:
        mover = self._roster.get(node)
        assert mover is not None
        self._give(mover, choice, vocabulary, now)

    def _choose(self, member: Member, vocabulary: int) -> Assignment:
        assert member.join is not None
        if member.peer in self.pinned:
            return Assignment(self.pinned[member.peer], "as in the plan that is predicted", "wished")
        newcomer = self._power(member, vocabulary).steps_per_s
        needed, standing = self._needed(vocabulary), self._stands(vocabulary)
        if as_empty := self._as_empty(standing):
            standing = Standing(len(needed), (power for power in standing.powers if power.stage not in as_empty))
        return assign(needed, standing, newcomer, member.join.stage, self._volunteers_max)

    @property
    def _volunteers_max(self) -> int:
        """As the operator has it now: nobody is sent away when it becomes less."""
        return self._placement.running.limits.volunteers_max

    def _give(self, member: Member, choice: Assignment, vocabulary: int, now: float) -> None:
        newcomer = member.stage < 0
        if member.stage >= 0:
            self._counts[member.stage] -= 1
        if choice.stage >= 0:
            self._counts[choice.stage] += 1
        member.stage, member.stage_reason, member.stage_since = choice.stage, choice.reason, now
        if not newcomer:
            self._standing = None
        elif self._standing is not None and choice.stage >= 0:
            self._standing.add(self._power(member, vocabulary))
        member.told_generation = -1
        self._thoughts.gone(member.peer)
        self._outbox.count("barnraise_coordinator_assignments_total", run=self._config.name, reason=choice.label)
        self._outbox.log("info", "volunteer assigned", node=member.peer, stage=choice.stage, detail=choice.reason)
        self._placement.tell(member)

    # ---- what volunteers would do ----------------------------------------------------------------------------------

    def _stands(self, vocabulary: int) -> Standing:
        stages = len(self._stages(vocabulary))
        if self._standing is None or len(self._standing.counts) != stages:
            working = [member for member in self._roster.volunteers() if member.join is not None and member.stage >= 0]
            self._standing = Standing(stages, (self._power(member, vocabulary) for member in working))
        return self._standing

    def _power(self, member: Member, vocabulary: int) -> Power:
        promise = self._measured(member, vocabulary)
        share, left_out, needs = self.delivered.share(member.peer), self._left_out(vocabulary), self._stages(vocabulary)
        carried = tuple(
            share * with_left_out(each * factor, need, left_out)
            for each, (factor, _), need in zip(promise.steps_per_s, promise.beside, needs, strict=True)
        )
        pauses_s = tuple(pause_s for _, pause_s in promise.beside)
        return Power(member.peer, member.stage, carried, member.number, promise.reloads_s, pauses_s)

    def _promise(self, member: Member, vocabulary: int) -> float:
        """Steps a second at its stage, before what it delivers counts."""
        needs, promise = self._stages(vocabulary)[member.stage], self._measured(member, vocabulary)
        return with_left_out(promise.steps_per_s[member.stage], needs, self._left_out(vocabulary))

    def _left_out(self, vocabulary: int) -> float:
        """Seconds of each visit, by what everybody promises and what is seen."""
        if self._left_out_s is None:
            self._left_out_s = self._find_left_out_s(vocabulary)
        return self._left_out_s

    def _find_left_out_s(self, vocabulary: int) -> float:
        needs = self._stages(vocabulary)
        crews: list[list[float]] = [[] for _ in needs]
        if not self._durations_s:
            return 0.0
        for member in self._roster.volunteers():
            if member.join is not None and 0 <= member.stage < len(needs):
                crews[member.stage].append(self._measured(member, vocabulary).steps_per_s[member.stage])
        return left_out_s(crews, needs, 1.0 / median(self._durations_s))

    def _measured(self, member: Member, vocabulary: int) -> Promise:
        needs = self._stages(vocabulary)  # before the look: other needs make all that is known void
        known = self._known.get(member.peer)
        if known is None or known.looked_at != self._known_at:
            means = self._means(member)
            if known is not None and known.of == (means, self.step_s):
                known.looked_at = self._known_at
            else:
                known = self._known[member.peer] = Promise(
                    self._known_at,
                    (means, self.step_s),
                    tuple(steps_per_s(means, need, self.step_s) for need in needs),
                    tuple(reload_s(means, need) for need in needs),
                    tuple(beside_visits(means, need, self.step_s) for need in needs),
                )
        return known

    def _means(self, member: Member) -> Means:
        own = self._own_means(member)
        if own.flops_per_s > 0 and own.up_bytes_per_s > 0 and own.down_bytes_per_s > 0:
            return own
        if self._typical is None:
            self._typical = typical_of(map(self._own_means, self._roster.volunteers()))
        return Means(
            own.flops_per_s if own.flops_per_s > 0 else self._typical.flops_per_s,
            own.up_bytes_per_s or self._typical.up_bytes_per_s,
            own.down_bytes_per_s or self._typical.down_bytes_per_s,
        )

    def _own_means(self, member: Member) -> Means:
        """0: not measured."""
        return Means(self._flops_per_s(member), *self._network.line_of(member.peer))

    def _needed(self, vocabulary: int) -> list[bool]:
        return [need.visits > 0 for need in self._stages(vocabulary)]

    def _stages(self, vocabulary: int) -> tuple[Needs, ...]:
        plan = self._placement.plan
        assert plan is not None, "volunteers come in only when stage 0 has read the data, so after the first plan"
        if self._needs is None or self._needs[:2] != (plan.course, vocabulary):
            self._needs = plan.course, vocabulary, needs_of(self._placement.running, plan.course, vocabulary)
            self._known.clear()
            self._left_out_s = self._standing = None
        return self._needs[2]
