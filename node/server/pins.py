"""What a server keeps for audits: the tensors of audited tasks, and who brought them, until the audit is over.

They are the ones that the step keeps anyway; an audit only keeps them beyond its step's end. The order to keep them
comes from the ledger and the question for them from the auditor, on another link: a question that is here first waits
for the order a little. Of a contribution of eight
tasks of an 8 B model (17 MB an activation in `q8`) that is 0.5 GB over all servers of the stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from node.server.back import BackRole
from node.server.context import StageContext
from node.server.front import FrontRole
from node.server.shard import ShardRole
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.messages import Audit, Audited, AuditOver, FetchAudited
from protocol.run.audits import Kept

PINS_MAX = 64
"""Contributions kept at once: as many as wait for eight auditors; the oldest goes first."""
PIN_STEPS = 16
"""Steps after its own that a contribution is kept for, if the ledger never says that the audit is over."""
FETCH_WAIT_S = 5.0
"""So long a question waits for the order that it belongs to: a control message is 0.1 s behind what is on its line,
and a link that finds another way takes up to 3 s (`protocol.base.limits.GRACE_S`)."""
FETCHES_MAX = 64
"""Questions that wait, of a hundred bytes each; the one that waited longest is answered first."""
OVER_MAX = 256
"""Audits that are known to be over: nobody waits for their order."""


@dataclass(slots=True)
class _Pin:
    step: int
    tensors: dict[TaskId | None, dict[Kept, tuple[TensorRef, str]]] = field(default_factory=dict)
    """By task, and what it is; who brought it. Under None: this shard's part of the contribution."""


class Pins:
    """Of one server; it looks into the roles that it has."""

    def __init__(self, context: StageContext, front: FrontRole | None, back: BackRole | None, shard: ShardRole) -> None:
        self._context = context
        self._out = context.out
        self._front, self._back, self._shard = front, back, shard
        self._pins: dict[ContributionId, _Pin] = {}
        self._over: dict[ContributionId, None] = {}
        self._early: dict[tuple[NodeId, ContributionId, TaskId | None], tuple[FetchAudited, float]] = {}
        """Questions whose order has not come, and how long they wait for it."""
        self._now = 0.0

    def clock(self, now: float) -> None:
        self._now = now

    def on_audit(self, message: Audit) -> None:
        if message.contribution in self._pins:
            return
        if message.step + PIN_STEPS <= self._context.closed:
            self._note_over(message.contribution)
            self._answer_early(message.contribution)
            return
        if len(self._pins) >= PINS_MAX:
            self._let_go(next(iter(self._pins)))
        pin = self._pins[message.contribution] = _Pin(message.step)
        part = self._shard.part_of(message.contribution, message.step)
        if part is not None:
            pin.tensors[None] = {"part": (self._out.share(part), message.contribution.node)}
        for task in message.tasks:
            if task.op != "B":
                continue
            kept: dict[Kept, tuple[TensorRef, str]] = {}
            for role in (self._front, self._back):
                if role is not None:
                    kept.update(role.kept_of(task))
            if kept:
                pin.tensors[task] = {kind: (self._out.share(ref), by) for kind, (ref, by) in kept.items()}
        self._answer_early(message.contribution)

    def on_fetch(self, peer: NodeId, message: FetchAudited) -> None:
        if message.contribution in self._pins or message.contribution in self._over:
            self._answer(peer, message)
            return
        question = peer, message.contribution, message.task
        if question not in self._early and len(self._early) >= FETCHES_MAX:
            self._give_up(next(iter(self._early)))
        self._early.setdefault(question, (message, self._now + FETCH_WAIT_S))

    def _answer_early(self, contribution: ContributionId) -> None:
        for question in [question for question in self._early if question[1] == contribution]:
            self._give_up(question)

    def _give_up(self, question: tuple[NodeId, ContributionId, TaskId | None]) -> None:
        """It waits no longer, whatever there is."""
        message, _ = self._early.pop(question)
        self._answer(question[0], message)

    def _answer(self, peer: NodeId, message: FetchAudited) -> None:
        pin = self._pins.get(message.contribution)
        kept = {} if pin is None else pin.tensors.get(message.task, {})
        self._out.send(
            peer,
            Audited(
                ledger_generation=self._context.generation,
                contribution=message.contribution,
                task=message.task,
                kept=tuple(kept),
                brought_by=tuple(by for _, by in kept.values()),
                tensors=tuple(ref for ref, _ in kept.values()),
            ),
        )

    def wake_at(self) -> float | None:
        return min((until for _, until in self._early.values()), default=None) if self._early else None

    def wake(self, now: float) -> None:
        self._now = now
        for question in [question for question, (_, until) in self._early.items() if until <= now]:
            self._give_up(question)

    def gone(self, peer: NodeId) -> None:
        """Nobody is there to be answered."""
        for question in [question for question in self._early if question[0] == peer]:
            del self._early[question]

    def on_over(self, message: AuditOver) -> None:
        self._note_over(message.contribution)
        self._answer_early(message.contribution)
        if message.contribution in self._pins:
            self._let_go(message.contribution)

    def close_step(self, step: int) -> None:
        for contribution in [c for c, pin in self._pins.items() if pin.step + PIN_STEPS <= step]:
            self._let_go(contribution)

    def end(self) -> None:
        self._early.clear()
        for contribution in list(self._pins):
            self._let_go(contribution)

    def _note_over(self, contribution: ContributionId) -> None:
        self._over[contribution] = None
        if len(self._over) > OVER_MAX:
            del self._over[next(iter(self._over))]

    def _let_go(self, contribution: ContributionId) -> None:
        self._note_over(contribution)
        pin = self._pins.pop(contribution)
        self._out.drop(ref for kept in pin.tensors.values() for ref, _ in kept.values())

    def check(self) -> None:
        assert len(self._pins) <= PINS_MAX, "more is kept for audits than ever may be"
        assert len(self._early) <= FETCHES_MAX, "more questions wait for an order than ever may"
        for _, contribution, _ in self._early:
            assert contribution not in self._pins, f"{contribution} is kept, and who asks for it waits"
        for pin in self._pins.values():
            assert pin.step + PIN_STEPS > self._context.closed, f"step {pin.step} is kept for an audit (L3)"
