"""Where a ledger's audits meet its steps: what is drawn waits for its result a little, and what was found is told.

A contribution under audit is held back, so that a false one is never summed up. The step does not wait for that beyond
a tenth of its time: counted from when nothing else is missing, what is held is accepted, the audit goes on, and what it
finds still puts its member out. Only a member with strikes waits to the end, or for a lease's time. What cannot be
audited in that time, by what audits have taken of late and by what waits before it, is not held at all: the same would
come of it, later. (Of a member that has passed no audit yet it is held if its audit ends within one more step: steps
sometimes take longer.)

What is missing may wait for what is held: a member sends one sum of a step at a time, and the next one when it has
heard of the first. So where the stage has nothing more to give, it is counted from when anything came last, too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from node.machine.numbers import task_count
from node.machine.records import AuditStanding, Record
from node.server.audits import Audits, Ruling, Unit
from node.server.context import StageContext
from node.server.pins import PIN_STEPS
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.messages import Audit, AuditOver, AuditReport, Blamed, Stored
from protocol.run.audits import Difference

WAIT_SHARE = 0.1
"""Of a step's time that its seal may wait for audits."""
FALSE = "it is not what two audits computed"
BLAMED_MAX = 64
"""Findings that the coordinator is told (again) at link-up: a ban that it knows changes nothing."""


@dataclass(slots=True)
class _Step:
    opened_at: float
    held: dict[ContributionId, tuple[Stored, float]] = field(default_factory=dict)
    """With the square of its norm."""
    since: float | None = None
    """When nothing but these was missing."""
    news_at: float = 0.0
    """When something of it was accepted or held last."""
    tail_at: float | None = None
    """When the stage had nothing more of it to give."""

    @property
    def quiet_since(self) -> float | None:
        """What the step's patience with audits is counted from."""
        tail = None if self.tail_at is None else max(self.tail_at, self.news_at)
        return min((at for at in (self.since, tail) if at is not None), default=None)


class AuditDesk:
    """Of one ledger.

    Args:
        coordinator: who is told of blames; None: nobody.
        accept: a contribution that was held counts.
        void: it never does; whom the audit has blamed.
    """

    def __init__(
        self,
        context: StageContext,
        coordinator: NodeId | None,
        accept: Callable[[Stored, float], None],
        void: Callable[[Stored, str, tuple[NodeId, ...]], None],
    ) -> None:
        self._context = context
        self._out = context.out
        self._coordinator = coordinator
        self._accept, self._void = accept, void
        self.audits = Audits(context.config.audit, lambda: context.tickets.key, self._is_trusted, context.result_s)
        self._outside: dict[NodeId, None] = {}
        """Auditors that are no servers of the stage; they hear of every audit, so that they keep its version."""
        self._steps: dict[int, _Step] = {}
        self._blamed: list[Blamed] = []
        self._right: Counter[NodeId] = Counter()
        """Tasks that audits have found right and nobody was told of, of each member."""
        self._now = 0.0
        self._step_s = 0.0
        """From a step's opening to when it was frozen, of late."""
        self._unsure = -1
        """Steps up to this one may have been begun before a server of the stage started anew: it could hold other
        tensors than those that were computed with, and an honest member would be blamed."""

    def recall(self, records: Iterable[Record]) -> None:
        """What earlier lives of this ledger, under whatever generation, have written of members."""
        for record in records:
            if isinstance(record, AuditStanding):
                self.audits.recall(record)
        if known := self.audits.known():
            self._out.log("info", "audits remember", members=len(known))

    def standing(self) -> tuple[AuditStanding, ...]:
        """For other ledgers of the stage that this very process begins."""
        return tuple(self._record_of(node) for node in self.audits.known())

    def _record_of(self, node: NodeId) -> AuditStanding:
        return self.audits.record_of(node, self._context.generation, self._context.closed)

    def _is_trusted(self, node: str) -> bool:
        """Servers of the stage are; what nobody in particular brought, one of them made."""
        return not node or node in self._context.stage_servers

    def clock(self, now: float) -> None:
        self._now = now

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step_opened(self, step: int) -> None:
        self._steps.setdefault(step, _Step(self._now))

    def frozen(self, step: int) -> None:
        state = self._steps.get(step)
        if state is not None:
            took = self._now - state.opened_at
            self._step_s = took if not self._step_s else self._step_s + 0.25 * (took - self._step_s)

    def close_step(self, step: int) -> None:
        for key in [key for key in self._steps if key <= step]:
            del self._steps[key]
        for ruling in self.audits.give_up(step - PIN_STEPS):
            self._end(ruling)

    def server_came(self) -> None:
        """A server of the stage is ready (again)."""
        newest = max(self._context.opened, self._context.closed)
        self._unsure = max(self._unsure, newest + 1 + self._context.config.batch.delay)

    # ---- holding back --------------------------------------------------------------------------------------------

    def hold(self, stored: Stored, square_norm: float) -> bool:
        """Whether a contribution that could be accepted is audited first."""
        state = self._steps.get(stored.step)
        if state is None or stored.step <= self._unsure or not self.audits.draw(stored):
            return False
        state.held[stored.contribution] = stored, square_norm
        for node in self._all_who_keep():
            self._out.send(node, self._order(stored, None, 0))
        self._give()
        return True

    def is_held(self, step: int, contribution: ContributionId) -> bool:
        return step in self._steps and contribution in self._steps[step].held

    def look(self, step: int, missing: Collection[TaskId]) -> None:
        """Something of the step was accepted or held: whether all that is `missing` now is held."""
        state = self._steps.get(step)
        if state is None:
            return
        state.news_at = self._now
        if not state.held:
            return
        held = {task for stored, _ in state.held.values() for task in stored.tasks}
        if not all(task in held for task in missing):
            state.since = None
        elif state.since is None:
            state.since = self._now

    def tail(self, step: int) -> None:
        """The stage has nothing of the step to give any more: all that is missing is summed up, or will be."""
        state = self._steps.get(step)
        if state is not None and state.tail_at is None:
            state.tail_at = self._now

    def _release_at(self, state: _Step, stored: Stored, ends: Mapping[ContributionId, float]) -> float | None:
        """When it counts although nobody has said anything of it. `ends`: when somebody will."""
        since = state.quiet_since
        if self.audits.waits_for(stored.contribution.node):
            return None if since is None else since + self._context.config.limits.lease_s
        most_s = WAIT_SHARE * (self._step_s or self._now - state.opened_at)
        usual = state.opened_at + self._step_s if self._step_s else None
        until = max((at + most_s for at in (since, usual) if at is not None), default=None)
        if until is not None:
            # Who is unknown is audited first, and held unless that is hopeless.
            late_s = self._step_s if self.audits.is_unknown(stored.contribution.node) else 0.0
            if ends.get(stored.contribution, self._now) > until + late_s:
                return self._now
        return None if since is None else since + most_s

    def wake_at(self) -> float | None:
        held = [(state, stored) for state in self._steps.values() for stored, _ in state.held.values()]
        ends = self.audits.ends(self._now) if held else {}
        times = [self._release_at(state, stored, ends) for state, stored in held]
        return min((time for time in (*times, self.audits.wake_at()) if time is not None), default=None)

    def wake(self, now: float) -> None:
        self._now = now
        for ruling in self.audits.wake(now):
            self._end(ruling)
        ends = self.audits.ends(now) if any(state.held for state in self._steps.values()) else {}
        for state in list(self._steps.values()):
            for stored, square_norm in list(state.held.values()):
                at = self._release_at(state, stored, ends)
                if at is not None and at <= now:
                    del state.held[stored.contribution]
                    self._accept(stored, square_norm)
        self._give()

    # ---- opinions ------------------------------------------------------------------------------------------------

    def take_audited(self, nodes: Collection[NodeId]) -> Counter[NodeId]:
        """Of these members, for the credit that a step gives; what is told is not told again. After a restart what was
        found right and not told is lost: credit is rather too small."""
        return Counter({node: self._right.pop(node) for node in nodes if node in self._right})

    def auditor_here(self, node: NodeId) -> None:
        if node not in self._context.stage_servers:
            self._outside[node] = None
        self.audits.auditor_here(node)
        self._give()

    def auditor_gone(self, node: NodeId) -> None:
        self._outside.pop(node, None)
        self.audits.auditor_gone(node)
        self._give()

    def on_report(self, peer: NodeId, message: AuditReport) -> None:
        ruling = self.audits.report(peer, message, self._now)
        if ruling is not None:
            self._end(ruling)
        elif peer in self._outside:
            self.audits.auditor_here(peer)  # it was late, and never asks for work: this is how it comes back
        self._give()

    def _all_who_keep(self) -> tuple[NodeId, ...]:
        return (*self._context.stage_servers, *self._outside)

    def _give(self) -> None:
        for unit in self.audits.give(self._now):
            assert unit.busy is not None
            self._out.send(unit.busy, self._order(unit.stored, unit.busy, len(unit.auditors)))

    def _order(self, stored: Stored, auditor: NodeId | None, attempt: int) -> Audit:
        return Audit(
            ledger_generation=self._context.generation,
            contribution=stored.contribution,
            step=stored.step,
            version=stored.version,
            tasks=stored.tasks,
            losses=stored.losses,
            auditor=auditor,
            attempt=attempt,
            directions=b"" if auditor is None else self._directions(),
        )

    def _directions(self) -> bytes:
        """The same for all audits of the stage under these ledgers, and known to nobody else."""
        key = self._context.tickets.key
        return hashlib.blake2b(b"", digest_size=8, key=key, person=b"br-audit-lean").digest()

    def _end(self, ruling: Ruling) -> None:
        """An opinion has led to something: a second is asked for, or the audit is over."""
        unit, outcome = ruling.unit, ruling.outcome
        self._out.count("barnraise_server_audits_total", outcome=outcome)
        level = "info" if outcome in ("passed", "missed") else "warning"
        findings = [f"{b.difference.claim} of {b.difference.task}: {b.difference.value:.3g}" for b in ruling.blames]
        self._out.log(
            level, "audit", contribution=str(unit.contribution), outcome=outcome, reason=ruling.reason, found=findings
        )
        if outcome == "again":
            return
        if outcome == "passed":
            self._right[unit.contribution.node] += task_count(unit.stored.tasks)
        told = dict.fromkeys((unit.contribution.node, *(blame.difference.node for blame in ruling.blames)))
        for node in told:
            self._out.persist(self._record_of(node))
        out = tuple(dict.fromkeys(blame.difference.node for blame in ruling.blames if blame.out))
        self._settle(ruling, out)
        for node in self._all_who_keep():
            over = AuditOver(
                ledger_generation=self._context.generation,
                contribution=unit.contribution,
                step=unit.stored.step,
                blamed=out,
            )
            self._out.send(node, over)
        for blame in ruling.blames:
            if blame.out:
                self._tell(unit, blame.difference)

    def _settle(self, ruling: Ruling, out: tuple[NodeId, ...]) -> None:
        """What was held counts, or never will."""
        stored = ruling.unit.stored
        state = self._steps.get(stored.step)
        held = state.held.pop(stored.contribution, None) if state is not None else None
        if held is None:
            return
        claims = [b.difference for b in ruling.blames if b.difference.node == stored.contribution.node]
        if any(difference.claim in ("gradient", "loss") for difference in claims):
            self._void(stored, FALSE, out)
        else:
            self._accept(*held)

    def _tell(self, unit: Unit, difference: Difference) -> None:
        blamed = Blamed(
            node=difference.node,
            contribution=unit.contribution,
            step=unit.stored.step,
            claim=difference.claim,
            task=difference.task,
            difference=difference.value,
            auditors=unit.auditors,
        )
        self._blamed = [*self._blamed[-BLAMED_MAX + 1 :], blamed]
        if self._coordinator is not None:
            self._out.send(self._coordinator, blamed)

    def coordinator_here(self) -> None:
        """It may have missed what was found meanwhile."""
        if self._coordinator is not None:
            for blamed in self._blamed:
                self._out.send(self._coordinator, blamed)

    def check(self) -> None:
        self.audits.check()
        for state in self._steps.values():
            for contribution in state.held:
                assert self.audits.has(contribution), f"{contribution} is held, and nobody audits it"
