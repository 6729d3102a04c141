"""Who is audited, by whom, and what follows: the decisions of one ledger. What is compared, and how, is the auditor's.

    all shards have it ─▶ drawn? ─▶ queue ─▶ an auditor computes it again ─▶ the same: passed
                                                       └▶ another result ─▶ a second opinion ─▶ the same finding: blamed

A contribution is drawn after all of it lies on the shards' disks, by a MAC over its name under the stage's key: nobody
outside of the stage's servers can tell beforehand, nothing can be changed afterwards, and a ledger that restarts draws
the same. A new member's are all drawn until `audit.first` of them have passed; then `audit.rate` of them; all of them
again after a strike too many, and one for each that nobody could audit. With detection d and rate p a liar gets
(1 - pd) / (pd) false ones in before it is caught, however rarely it lies.

Who passes each time and always errs to the same side is found by averages (`leaning.py`).

Nobody is blamed by one opinion. The second comes from another machine where there is one, else from the same once more:
auditors are servers of the stage, which everybody trusts with sums anyway, and machines that the operator has invited
to audit (`barnraise audit LINK`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from node.machine.records import AuditStanding
from node.server.leaning import WINDOW, Leaning
from protocol.base.ids import ContributionId, NodeId
from protocol.messages import AuditReport, Stored
from protocol.run.audits import RESIDUAL_PARTS, Difference
from protocol.run.run import AuditSection

GROSS_TIMES = 10.0
"""A difference of so many tolerances (0.2 at the default: a sign that is flipped gives 2, or 1.5 on a grid, one
of eight tasks left out 0.2 to 0.4) is no device's rounding: the member is out at once. Less is a strike."""
STRIKES_WITHIN = 100
"""Audits of a member that its strikes are counted over."""
STRIKES_WATCHED = 2
"""So many of them: everything it brings is audited, and waits for the result."""
STRIKES_OUT = 3
"""So many: it is out. A machine that computes otherwise than the class is of no use, whatever the reason."""
QUEUE_MAX = 8
"""Units that wait for each auditor. More come later than anybody can use; whoever brought them is drawn next time."""
REST_S_MAX = 3600.0
"""Who did not answer in time (its question was lost with a link, or it is slow) is asked again after as long, then
after twice that, and so on up to this: a machine that hangs costs one audit an hour, and one that was struck off for
good left a stage without any."""
REMEMBERED_MAX = 4096
"""Members whose record is kept: sixteen times what one server links to."""

Outcome = Literal["passed", "again", "blamed", "disagreed", "missed", "leans"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(slots=True)
class Unit:
    """A contribution under audit."""

    stored: Stored
    auditors: tuple[NodeId, ...] = ()
    """Who was asked, in order."""
    busy: NodeId | None = None
    begun_at: float = 0.0
    """When the newest opinion was asked for."""
    deadline: float = 0.0
    found: tuple[Difference, ...] = ()
    """By the first opinion: claims of members that are not what it computed."""

    @property
    def contribution(self) -> ContributionId:
        return self.stored.contribution


@dataclass(frozen=True, slots=True)
class Blame:
    """What both opinions found of one claim of one member."""

    difference: Difference
    """The smaller of the two."""
    out: bool
    """Whether the member is banned, or has one strike more."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What came of one opinion."""

    unit: Unit
    outcome: Outcome
    blames: tuple[Blame, ...] = ()
    reason: str = ""


@dataclass(slots=True)
class _Record:
    """What audits have shown of one member."""

    passed: int = 0
    judged: int = 0
    strikes: list[int] = field(default_factory=list)
    """Of which of its audits, by number, each was."""
    owed: bool = False
    """One that was drawn could not be audited: the next one is."""
    leaning: Leaning = field(default_factory=Leaning)

    @property
    def watched(self) -> bool:
        return self.recent >= STRIKES_WATCHED or self.leaning.windows > 0

    @property
    def recent(self) -> int:
        return sum(number > self.judged - STRIKES_WITHIN for number in self.strikes)


class Audits:
    """The audits of one ledger.

    Args:
        key: of the stage, known to its servers only.
        trusted: whether a node is a server of the stage, which nobody audits.
        unit_s: seconds that an opinion may take for each task, transfers included.
    """

    def __init__(
        self, terms: AuditSection, key: Callable[[], bytes], trusted: Callable[[str], bool], unit_s: float
    ) -> None:
        self._terms = terms
        self._key = key
        self._trusted = trusted
        self._unit_s = unit_s
        self._auditors: dict[NodeId, Unit | None] = {}
        self._resting: dict[NodeId, tuple[float, float]] = {}
        """Auditors that did not answer in time: until when they are given nothing, and for how long in all. Forgotten
        when they answer or come anew."""
        self._queue: dict[ContributionId, Unit] = {}
        self._records: dict[NodeId, _Record] = {}
        self._task_s = 0.0
        """What an opinion has taken for each task of late; 0: not known."""
        self.counts: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)

    # ---- auditors ------------------------------------------------------------------------------------------------

    def auditor_here(self, node: NodeId) -> None:
        """A server of the stage that computes, or a machine that only audits."""
        self._resting.pop(node, None)
        self._auditors.setdefault(node, None)

    def auditor_gone(self, node: NodeId) -> None:
        """What it was at goes back to the queue, to its front."""
        self._resting.pop(node, None)
        unit = self._auditors.pop(node, None)
        if unit is not None:
            unit.busy, unit.auditors = None, unit.auditors[:-1]
            self._queue = {unit.contribution: unit, **self._queue}

    # ---- drawing -------------------------------------------------------------------------------------------------

    def draw(self, stored: Stored) -> bool:
        """Whether a contribution, of which every shard has its part, is audited. It is then waiting for an auditor."""
        node = stored.contribution.node
        if not self._auditors or self._trusted(node) or stored.contribution in self._units():
            return False
        if not self._is_drawn(stored.contribution, stored.step, self.rate_of(node)):
            return False
        record = self._of(node)
        if len(self._queue) >= QUEUE_MAX * len(self._auditors):
            record.owed = True
            self.counts["missed"] += 1
            return False
        record.owed = False
        self._queue[stored.contribution] = Unit(stored)
        return True

    def rate_of(self, node: NodeId) -> float:
        """The chance that a contribution of the member is audited."""
        if self._terms.rate <= 0.0:
            return 0.0
        record = self._records.get(node, _Record())
        sure = record.passed < self._terms.first or record.watched or record.owed
        return 1.0 if sure else self._terms.rate

    def waits_for(self, node: NodeId) -> bool:
        """Whether a member's contributions count only when their audit is over, or a lease's time has passed."""
        record = self._records.get(node)
        return record is not None and record.watched

    def has(self, contribution: ContributionId) -> bool:
        return contribution in self._units()

    def _is_drawn(self, contribution: ContributionId, step: int, rate: float) -> bool:
        words = msgspec.msgpack.encode((contribution, step))
        drawn = hashlib.blake2b(words, digest_size=8, key=self._key(), person=b"br-audit-draw").digest()
        return int.from_bytes(drawn, "big") < rate * 2.0**64

    # ---- opinions ------------------------------------------------------------------------------------------------

    def give(self, now: float) -> list[Unit]:
        """Units that an auditor begins with: `busy` says which, the number of `auditors` which opinion it is."""
        given = []
        for node, at in list(self._auditors.items()):
            if at is not None:
                continue
            unit = self._next_for(node)
            if unit is None:
                continue
            del self._queue[unit.contribution]
            unit.busy, unit.auditors, unit.begun_at = node, (*unit.auditors, node), now
            unit.deadline = now + self._unit_s * (1 + len(unit.stored.tasks))
            self._auditors[node] = unit
            given.append(unit)
        return given

    def _next_for(self, node: NodeId) -> Unit | None:
        """The first that this auditor may have: a second opinion is another's, where there is another."""
        for unit in self._in_order():
            if node not in unit.auditors or len(self._auditors) == 1:
                return unit
        return None

    def _in_order(self) -> Iterator[Unit]:
        """What waits, as auditors take it: second opinions; one contribution of each member that has passed no audit
        yet, since what it brings may all be false; the others as they came. One of each only: whoever brings much must
        not push the audits of all others back."""
        first = {unit.contribution.node: unit for unit in self._auditors.values() if unit is not None}
        behind = []
        for unit in self._queue.values():
            node = unit.contribution.node
            if unit.found or (self.is_unknown(node) and first.setdefault(node, unit) is unit):
                yield unit
            else:
                behind.append(unit)
        yield from behind

    def is_unknown(self, node: NodeId) -> bool:
        """Whether no audit has found a member right yet, or not since one blamed it."""
        return node not in self._records or not self._records[node].passed

    def ends(self, now: float) -> dict[ContributionId, float]:
        """When the next opinion on each will be there, by what opinions have taken of late and what waits before it."""
        found = {u.contribution: max(now, u.begun_at + self._expected_s(u)) for u in self._auditors.values() if u}
        idle_count = sum(unit is None for unit in self._auditors.values())
        free = [*([now] * idle_count), *found.values()]
        heapq.heapify(free)
        for unit in self._in_order():
            at = (heapq.heappop(free) if free else now) + self._expected_s(unit)
            heapq.heappush(free, at)
            found[unit.contribution] = at
        return found

    def _expected_s(self, unit: Unit) -> float:
        return self._task_s * len(unit.stored.tasks)

    def report(self, auditor: NodeId, message: AuditReport, now: float) -> Ruling | None:
        """An opinion; None where nobody waits for it (any more)."""
        unit = self._auditors.get(auditor)
        asked = unit is not None and (unit.contribution, len(unit.auditors)) == (message.contribution, message.attempt)
        if unit is None or not asked:
            return None
        self._auditors[auditor] = None
        self._resting.pop(auditor, None)
        if message.reason:
            return self._missed(unit, message.reason)
        took_s = (now - unit.begun_at) / max(1, len(unit.stored.tasks))
        self._task_s = took_s if not self._task_s else self._task_s + 0.25 * (took_s - self._task_s)
        found = tuple(
            each
            for each in message.differences
            if not each.value <= self._terms.tolerance and not self._trusted(each.node)
        )
        if not unit.found:
            if not found:
                return self._passed(unit, message.differences)
            unit.found, unit.busy = found, None
            self._queue = {unit.contribution: unit, **self._queue}
            return self._rule(Ruling(unit, "again"))
        return self._second(unit, found)

    def _second(self, unit: Unit, found: tuple[Difference, ...]) -> Ruling:
        blames = []
        for first in unit.found:
            again = next((d for d in found if (d.claim, d.node) == (first.claim, first.node)), None)
            if again is not None:
                smaller = min(first, again, key=lambda each: each.value)
                blames.append(self._blame(smaller))
        if not blames:
            return self._rule(Ruling(unit, "disagreed", reason="two auditors found different things"))
        return self._rule(Ruling(unit, "blamed", tuple(blames)))

    def _blame(self, difference: Difference) -> Blame:
        record = self._of(difference.node)
        record.judged += 1
        record.passed = 0
        record.strikes = [*record.strikes[-STRIKES_OUT:], record.judged]
        gross = not difference.value <= GROSS_TIMES * self._terms.tolerance
        return Blame(difference, out=gross or record.recent >= STRIKES_OUT)

    def _passed(self, unit: Unit, differences: tuple[Difference, ...]) -> Ruling:
        node = unit.contribution.node
        record = self._of(node)
        record.passed += 1
        record.judged += 1
        summed = next((each for each in differences if (each.claim, each.node) == ("gradient", node)), None)
        if summed is None or not record.leaning.add(summed.residual, self._terms.tolerance):
            return self._rule(Ruling(unit, "passed"))
        verdict = record.leaning.judge(each.leaning for each in self._records.values())
        if not verdict:
            return self._rule(Ruling(unit, "passed"))
        lean = Difference(claim="lean", node=node, task=summed.task, value=record.leaning.mean)
        why = f"its gradients lean to one side by {lean.value:.2g}, on average over {WINDOW} audits"
        return self._rule(Ruling(unit, "leans", (Blame(lean, out=verdict == "out"),), why))

    def _missed(self, unit: Unit, reason: str) -> Ruling:
        self._of(unit.contribution.node).owed = True
        return self._rule(Ruling(unit, "missed", reason=reason))

    def _rule(self, ruling: Ruling) -> Ruling:
        self.counts[ruling.outcome] += 1
        return ruling

    # ---- time and steps ------------------------------------------------------------------------------------------

    def wake_at(self) -> float | None:
        deadlines = [unit.deadline for unit in self._auditors.values() if unit is not None]
        rests = [until for node, (until, _) in self._resting.items() if node not in self._auditors]
        return min((*deadlines, *rests), default=None)

    def wake(self, now: float) -> list[Ruling]:
        """Opinions that did not come in time: the unit is given up."""
        for node, (until, _) in self._resting.items():
            if until <= now:
                self._auditors.setdefault(node, None)
        over = [(node, unit) for node, unit in self._auditors.items() if unit is not None and unit.deadline <= now]
        for node, unit in over:
            del self._auditors[node]
            _, rested_s = self._resting.get(node, (0.0, 0.0))
            rest_s = min(REST_S_MAX, max(unit.deadline - unit.begun_at, 2 * rested_s))
            self._resting[node] = now + rest_s, rest_s
        return [self._missed(unit, "the auditor did not answer") for _, unit in over]

    def give_up(self, step: int) -> list[Ruling]:
        """Units of steps up to `step` that nobody has begun with: what belongs to them is kept no longer."""
        waiting = [unit for unit in self._queue.values() if unit.stored.step <= step]
        for unit in waiting:
            del self._queue[unit.contribution]
        return [self._missed(unit, "no auditor was free") for unit in waiting]

    # ---- what survives a restart ---------------------------------------------------------------------------------

    def record_of(self, node: NodeId, ledger_generation: int, step: int) -> AuditStanding:
        """What is known of a member, for the disk."""
        record = self._of(node)
        lean = record.leaning
        return AuditStanding(
            ledger_generation=ledger_generation,
            step=max(0, step),
            node=node,
            passed=record.passed,
            judged=record.judged,
            strikes=tuple(record.strikes),
            owed=record.owed,
            lean_count=lean.count,
            lean_sums=lean.sums,
            lean_squares=lean.squares,
            lean_along_squares=lean.along_squares,
            lean_windows=lean.windows,
            leaned=lean.leaned,
        )

    def recall(self, said: AuditStanding) -> None:
        """As it was written, the newest last."""
        sums = said.lean_sums if len(said.lean_sums) == RESIDUAL_PARTS else (0.0,) * RESIDUAL_PARTS
        squares = said.lean_squares, said.lean_along_squares
        lean = Leaning(said.lean_count, sums, *squares, said.lean_windows, said.leaned)
        record = _Record(said.passed, said.judged, list(said.strikes), said.owed, lean)
        self._records.pop(said.node, None)
        if len(self._records) < REMEMBERED_MAX:
            self._records[said.node] = record

    def known(self) -> tuple[NodeId, ...]:
        return tuple(self._records)

    def standing(self) -> dict[NodeId, tuple[int, int]]:
        """Of each member with a record: audits that it passed, and its strikes."""
        return {node: (record.passed, record.recent) for node, record in self._records.items()}

    def check(self) -> None:
        for unit in self._queue.values():
            assert unit.busy is None, "a unit under audit waits for an auditor"
        for node, at in self._auditors.items():
            assert at is None or at.busy == node, "an auditor is at another's unit"

    def _units(self) -> set[ContributionId]:
        return {*self._queue, *(unit.contribution for unit in self._auditors.values() if unit is not None)}

    def _of(self, node: NodeId) -> _Record:
        record = self._records.get(node)
        if record is None:
            if len(self._records) >= REMEMBERED_MAX:
                del self._records[next(iter(self._records))]
            record = self._records[node] = _Record()
        return record
