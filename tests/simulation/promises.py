"""Judges what is said: nobody promises what a crash could still take back (T-I2, T-I7, T-I9, T-I11).

For every message that others build on there is a record, and it must lie on the sender's disk before the message
leaves. A disk that is lost takes the proofs with it, and then the sender must not say so any more.
"""

from __future__ import annotations

from typing import Any

from coordinator.live.records import PlanRow, StepRow
from node.machine.records import (
    ContributionAccepted,
    ContributionStored,
    StepCommitted,
    StepDecided,
    StepDone,
    StepSealed,
)
from protocol.base.ids import NodeId
from protocol.messages import (
    Commit,
    Committed,
    Decision,
    Message,
    Parameters,
    PlanChanged,
    StepClosed,
    StepOpened,
    StepReport,
    StepReportStored,
    Stored,
    Verdict,
    Work,
)
from tests.simulation.violation import expect
from tests.simulation.world import Host


class Promises:
    """Which records each disk has had, as keys that the messages can be compared with."""

    def __init__(self) -> None:
        self._proofs: dict[NodeId, dict[tuple[Any, ...], None]] = {}
        self._generations: dict[NodeId, tuple[int, int]] = {}
        """In which life each host has spoken of which ledgers last: they only grow."""
        self._base: dict[int, int] = {}
        """Ledger generation -> the version that it begins from: that one needs no proof, everybody can make it."""
        self._closed: dict[int, int] = {}
        """Ledger generation -> newest step that was ever closed under it: that stays true when a disk is lost."""

    def durable(self, host: Host, record: Any) -> None:
        proofs = self._proofs.setdefault(host.node, {})
        match record:
            case ContributionStored():
                proofs["stored", record.ledger_generation, record.step, record.contribution, record.tasks] = None
            case ContributionAccepted():
                proofs["accepted", record.ledger_generation, record.contribution, record.tasks] = None
            case StepSealed():
                proofs["sealed", record.ledger_generation, record.step, record.contributions] = None
            case StepCommitted():
                proofs["version", record.ledger_generation, record.step + 1] = None
                proofs["committed", record.ledger_generation, record.step, record.digest] = None
            case StepDecided():
                proofs["decided", record.ledger_generation, record.step] = None
                proofs["decided", record.ledger_generation, record.step, record.clip_factor, record.skipped] = None
            case StepDone():
                proofs["done", record.ledger_generation, record.step] = None
                self._closed[record.ledger_generation] = record.step
            case StepRow():
                proofs["row", record.step] = None
            case PlanRow():
                proofs["plan", record.plan] = None
                base = self._base[record.plan.ledger_generation] = max(0, record.plan.restore_step)
                self._closed.setdefault(record.plan.ledger_generation, base - 1)

    def record_lost(self, host: Host, record: Any) -> None:
        """Its disk has lied of one. A ledger that has told an acceptance, and does not know it any more, judges anew
        what its shards name to it again; whose sender is banned by then is refused."""
        if isinstance(record, ContributionAccepted):
            key = "accepted", record.ledger_generation, record.contribution, record.tasks
            self._proofs.get(host.node, {}).pop(key, None)

    def disk_moved(self, host: Host, other: Host) -> None:
        self._proofs[other.node] = self._proofs.pop(host.node, {})

    def disk_lost(self, host: Host) -> None:
        self._proofs[host.node] = {}

    def said(self, host: Host, peer: NodeId, message: Message) -> None:
        proofs = self._proofs.setdefault(host.node, {})
        if isinstance(message, Work):
            newest = self._generations.get(host.node, (-1, -1))
            now = host.life, message.ledger_generation
            expect(newest <= now, "T-I9", f"{host.node} speaks of ledgers {now[1]} after those of {newest[1]}")
            self._generations[host.node] = now
        needed: tuple[Any, ...] | None = None
        match message:
            case Stored():
                needed = "stored", message.ledger_generation, message.step, message.contribution, message.tasks
            case Verdict():
                needed = "accepted", message.ledger_generation, message.contribution, message.tasks
                if not message.accepted:
                    expect(needed not in proofs, "T-I11", f"{message.contribution} counts, and is refused")
                    needed = None
            case Commit():
                needed = "sealed", message.ledger_generation, message.step, message.contributions
            case Committed():
                needed = "committed", message.ledger_generation, message.step, message.digest
            case Parameters() if message.tensors and message.version > self._base.get(message.ledger_generation, 0):
                needed = "version", message.ledger_generation, message.version
            case Decision():
                decision = message.clip_factor, message.skipped
                needed = "decided", message.ledger_generation, message.step, *decision
            case StepReport():
                # What earlier ledgers decided and a checkpoint has kept is told under the present ones.
                kept = message.step < self._base.get(message.ledger_generation, 0)
                decided = any(("decided", generation, message.step) in proofs for generation in self._closed)
                needed = None if kept and decided else ("done", message.ledger_generation, message.step)
            case StepClosed() | StepOpened():
                closed = message.step if isinstance(message, StepClosed) else message.closed
                proven = self._closed.get(message.ledger_generation, -1)
                expect(closed <= proven, "T-I8", f"step {closed} is said to be closed, not only {proven}")
            case StepReportStored() if message.step >= 0:
                needed = "row", message.step
            case PlanChanged():
                needed = "plan", message.plan
        if needed is not None:
            expect(
                needed in proofs, "T-I2", f"{host.node} says {type(message).__name__} before it is durable: {needed}"
            )
