"""What a server keeps for audits: the tensors of audited tasks, and who brought them, until the audit is over.

They are the ones that the step keeps anyway; an audit only keeps them beyond its step's end. Of a contribution of eight
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

    def on_audit(self, message: Audit) -> None:
        if message.contribution in self._pins or message.step + PIN_STEPS <= self._context.closed:
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

    def on_fetch(self, peer: NodeId, message: FetchAudited) -> None:
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

    def on_over(self, message: AuditOver) -> None:
        if message.contribution in self._pins:
            self._let_go(message.contribution)

    def close_step(self, step: int) -> None:
        for contribution in [c for c, pin in self._pins.items() if pin.step + PIN_STEPS <= step]:
            self._let_go(contribution)

    def end(self) -> None:
        for contribution in list(self._pins):
            self._let_go(contribution)

    def _let_go(self, contribution: ContributionId) -> None:
        pin = self._pins.pop(contribution)
        self._out.drop(ref for kept in pin.tensors.values() for ref, _ in kept.values())

    def check(self) -> None:
        assert len(self._pins) <= PINS_MAX, "more is kept for audits than ever may be"
        for pin in self._pins.values():
            assert pin.step + PIN_STEPS > self._context.closed, f"step {pin.step} is kept for an audit (L3)"
