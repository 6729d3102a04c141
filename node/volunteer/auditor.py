"""Computes others' work again, one contribution at a time: on the device of a server that computes, beside what that
does else, or of a machine that only audits.

    Audit ─▶ the version is fetched ─▶ task by task: what went in ─▶ forward, backward ─▶ compared with what came out
          ─▶ the sum of the weight gradients, compared with the contribution's parts ─▶ AuditReport

Claims are compared in the form in which they travel, and as one vector each; sums are made of exactly the tasks that
the contribution names, so on the run's grid an honest one is equal in every number on equal devices.

Task by task, because eight tasks of an 8 B model would be half a gigabyte at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from node.machine.jobs import (
    Backward,
    Compare,
    DropAccumulators,
    Forward,
    Job,
    RouteEnd,
    TakeGradient,
    TakeResidual,
    TakeWeights,
    WriteEvidence,
)
from node.machine.outbox import Outbox
from node.volunteer.leases import forward_of
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.messages import Audit, Audited, AuditOver, AuditReport, FetchAudited, Work
from protocol.run.audits import AUDIT_SLICE, Claim, Difference, Kept
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

WAITING_MAX = 4
"""Orders that wait: a ledger gives one at a time, and one more when it has given one up."""
VERSIONS_MAX = 4
"""Versions that are kept for audits after the servers have dropped them: what a step's audits and second opinions need
where they take a few steps. Of a stage of 0.5 G parameters that is 8 GB of the device's memory at most."""
EVIDENCE_BYTES_MAX = 1 << 30
"""A file of evidence: of an 8 B model's contribution of eight tasks half a gigabyte beside a stage's weights. What has
more leads to the same ban, and to a line in the log instead of a file."""
DIFFERENCE_MAX = 1e30
"""What is not a number, or more, is this."""


@dataclass(slots=True)
class _Unit:
    """What is being computed again."""

    order: Audit
    ledger: NodeId
    accumulator: int
    left: deque[TaskId]
    """Backwards that are still to be done."""
    parts: dict[NodeId, TensorRef] = field(default_factory=dict)
    """Of the contribution, by shard's server."""
    answers: dict[NodeId, Audited] = field(default_factory=dict)
    """What servers keep of the first task that is left."""
    given: dict[Kept, tuple[TensorRef, str]] = field(default_factory=dict)
    """The same by kind, once all have answered; held until the task is done."""
    running: bool = False
    found: dict[tuple[Claim, str], Difference] = field(default_factory=dict)
    summed: tuple[TensorRef, ...] = ()
    residual: tuple[float, ...] = ()
    kept: dict[str, TensorRef] = field(default_factory=dict)
    """For the evidence, by the names of `WriteEvidence`: of a second opinion, until it is over."""
    done_count: int = 0
    """Backwards that are done."""
    comparing: deque[tuple[Claim, str, TaskId, tuple[TensorRef, ...]]] = field(default_factory=deque)
    """Comparisons under way, in the order in which the lane ends them; with what they let go of."""


class Auditor:
    """The audits of one device.

    Args:
        want: has a version fetched; `has` says whether the device has it, `let_go` that it need not be kept for us.
    """

    def __init__(
        self,
        config: RunConfig,
        out: Outbox,
        want: Callable[[int], None],
        has: Callable[[int], bool],
        let_go: Callable[[], None],
    ) -> None:
        self._config = config
        self._out = out
        self._want, self._has, self._let_go = want, has, let_go
        self._plan: Plan | None = None
        self._servers: tuple[NodeId, ...] = ()
        self._oldest = 0
        """The oldest version that servers still have."""
        self._waiting: deque[tuple[NodeId, Audit]] = deque()
        self._unit: _Unit | None = None
        self._drawn: dict[ContributionId, int] = {}
        """Contributions that wait for an opinion, this device's or another's, and their versions."""

    def reset(self, plan: Plan, servers: tuple[NodeId, ...]) -> None:
        """Another stage, or other ledgers: nobody waits for what was begun."""
        self._forget()
        self._waiting.clear()
        self._drawn.clear()
        self._plan, self._servers = plan, servers

    @property
    def version(self) -> int | None:
        """The oldest version that is needed for audits; servers may not have it any more."""
        return min(self._drawn.values(), default=None)

    def handle(self, peer: NodeId, message: Work) -> bool:
        """A message about audits; whether it was one."""
        match message:
            case Audit():
                self.on_audit(peer, message)
            case AuditOver():
                self.on_over(message.contribution)
            case Audited():
                self.on_audited(peer, message)
            case _:
                return False
        return True

    def on_audit(self, ledger: NodeId, order: Audit) -> None:
        if self._oldest <= order.version or order.auditor == self._out.node:
            self._drawn[order.contribution] = order.version
            self._want(order.version)
        if order.auditor != self._out.node:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._say(ledger, order, (), "too many at once")
            return
        self._waiting.append((ledger, order))
        self._begin_next()

    def on_over(self, contribution: ContributionId) -> None:
        """Nobody is asked for an opinion on it any more."""
        if self._unit is not None and self._unit.order.contribution == contribution:
            self._forget()
            self._begin_next()
        if self._drawn.pop(contribution, None) is not None:
            self._let_go()

    def versions_dropped(self, oldest: int) -> None:
        """Servers have no version below `oldest` any more."""
        self._oldest = oldest
        busy = None if self._unit is None else self._unit.order.contribution
        old = [c for c, version in self._drawn.items() if version < oldest - VERSIONS_MAX and c != busy]
        for contribution in old:
            del self._drawn[contribution]

    def _begin_next(self) -> None:
        while self._unit is None and self._waiting:
            ledger, order = self._waiting.popleft()
            if order.version < self._oldest and not self._has(order.version):
                self._say(ledger, order, (), "the parameters are gone")
                continue
            left = deque(task for task in order.tasks if task.op == "B")
            self._unit = _Unit(order, ledger, self._out.key(), left)
            self._want(order.version)
            for server in self._servers:
                self._fetch(server, None)
            self._fetch_task()

    def _fetch(self, server: NodeId, task: TaskId | None) -> None:
        assert self._unit is not None
        order = self._unit.order
        ask = FetchAudited(ledger_generation=order.ledger_generation, contribution=order.contribution, task=task)
        self._out.send(server, ask)

    def _owners(self, task: TaskId) -> tuple[NodeId, ...]:
        """Servers that keep something of a task: the one that has what went in, and the one that got its output."""
        assert self._plan is not None
        visit = task.step, task.microbatch, task.position
        front = self._plan.front_of(*visit)
        return (front,) if self._plan.ends_at(*visit) else tuple(dict.fromkeys((front, self._plan.back_of(*visit))))

    def _fetch_task(self) -> None:
        assert self._unit is not None
        if self._unit.left:
            for server in self._owners(self._unit.left[0]):
                self._fetch(server, self._unit.left[0])

    # ---- answers -------------------------------------------------------------------------------------------------

    def on_audited(self, peer: NodeId, message: Audited) -> None:
        unit = self._unit
        known = unit is not None and unit.order.contribution == message.contribution
        lengths = {len(message.kept), len(message.tensors), len(message.brought_by)}
        if unit is None or not known or len(lengths) != 1:
            self._out.drop(message.tensors)
            return
        if message.task is None and peer in self._servers and peer not in unit.parts:
            if message.kept != ("part",):
                self._out.drop(message.tensors)
                self._end("a part of the contribution is not kept")
                return
            (unit.parts[peer],) = message.tensors
            self._keep(unit, f"part {self._servers.index(peer)}", message.tensors[0])
        elif unit.left and message.task == unit.left[0] and not unit.given and peer in self._owners(unit.left[0]):
            before = unit.answers.pop(peer, None)
            self._out.drop(() if before is None else before.tensors)
            unit.answers[peer] = message
        else:
            self._out.drop(message.tensors)
        self.go_on()

    def go_on(self) -> None:
        """Computes the next task if all that it needs is here; at the end compares the sums."""
        unit = self._unit
        if unit is None or unit.running or not self._has(unit.order.version):
            return
        if unit.left:
            if len(unit.answers) == len(self._owners(unit.left[0])):
                self._begin_task(unit)
        elif len(unit.parts) == len(self._servers) and not unit.comparing:
            unit.running = True
            self._out.compute(TakeGradient(unit.accumulator, tuple(self._out.key() for _ in self._servers)))

    def _begin_task(self, unit: _Unit) -> None:
        task = unit.left[0]
        for answer in unit.answers.values():
            for kind, by, ref in zip(answer.kept, answer.brought_by, answer.tensors, strict=True):
                unit.given[kind] = ref, by
                self._keep(unit, f"{kind} {unit.done_count}", ref)
        unit.answers.clear()
        assert self._plan is not None
        ends = self._plan.ends_at(task.step, task.microbatch, task.position)
        if not {"input", "labels" if ends else "output_gradient"} <= unit.given.keys():
            self._end("what went in is not kept")
            return
        unit.running = True
        version = unit.order.version
        input_gradient = self._out.key() if "input_gradient" in unit.given else None
        x = unit.given["input"][0]
        ours = msgspec.structs.replace(task, slice=AUDIT_SLICE)
        if ends:
            loss = TaskId(task.step, task.microbatch, task.position + 1, "L", 0, AUDIT_SLICE)
            labels = unit.given["labels"][0]
            tasks = (forward_of(ours), loss, ours)
            self._out.compute(RouteEnd(tasks, version, x, labels, input_gradient, unit.accumulator))
        else:
            self._out.compute(Forward(forward_of(ours), version, x, self._out.key()))
            dy = unit.given["output_gradient"][0]
            self._out.compute(Backward(ours, version, dy, None, input_gradient, unit.accumulator))

    def _keep(self, unit: _Unit, name: str, ref: TensorRef) -> None:
        """For the evidence of a second opinion, as far as there is room."""
        kept_bytes = sum(kept.byte_count for kept in unit.kept.values())
        if unit.order.attempt > 1 and name not in unit.kept and kept_bytes + ref.byte_count <= EVIDENCE_BYTES_MAX:
            unit.kept[name] = self._out.share(ref)

    # ---- the device ----------------------------------------------------------------------------------------------

    def owns(self, job: Job) -> bool:
        """Whether the job was ordered here, now or before a change of stage."""
        match job:
            case Forward() | Backward():
                return job.task.slice == AUDIT_SLICE
            case RouteEnd():
                return job.tasks[0].slice == AUDIT_SLICE
            case TakeGradient():
                return self._unit is not None and job.accumulator == self._unit.accumulator
            case _:
                return isinstance(job, Compare | TakeResidual | TakeWeights)

    def computed(self, job: Job, result: Any) -> None:
        unit = self._unit
        if unit is None or not self._is_current(unit, job):
            refs = result if isinstance(result, tuple) else (result,)
            self._out.drop(ref for ref in refs if isinstance(ref, TensorRef))
            return
        match job:
            case Forward():
                self._compare(unit, "output", "output", result)
            case Backward():
                self._task_done(unit, result)
            case RouteEnd():
                loss, input_gradient = result
                self._compare_loss(unit, job.tasks[2], loss)
                self._task_done(unit, input_gradient)
            case TakeGradient():
                unit.summed = result
                claimed = tuple(unit.parts[server] for server in self._servers)
                node, first = unit.order.contribution.node, unit.order.tasks[0]
                unit.comparing.append(("gradient", node, first, (*result, *claimed)))
                sides = unit.accumulator, unit.order.version, result, claimed
                if unit.order.directions:
                    self._out.compute(TakeResidual(*sides, unit.order.directions))
                self._out.compute(Compare(*sides))
            case TakeResidual():
                unit.residual = result
            case Compare():
                claim, by, task, refs = unit.comparing.popleft()
                self._out.drop(refs)
                self._note(unit, claim, by, task, result)
                if claim == "gradient":
                    unit.parts, unit.summed = {}, ()
                    self._conclude(unit)
                    return
            case TakeWeights():
                self._testify(unit, result)
                return
            case _:
                pass
        self.go_on()

    def _is_current(self, unit: _Unit, job: Job) -> bool:
        match job:
            case Forward():
                return unit.running and bool(unit.left) and forward_of(unit.left[0]) == _plain(job.task)
            case Backward() | RouteEnd():
                return job.accumulator == unit.accumulator
            case Compare() | TakeResidual():
                return job.unit == unit.accumulator
            case _:
                return True

    def _task_done(self, unit: _Unit, input_gradient: TensorRef | None) -> None:
        if input_gradient is not None:
            self._compare(unit, "input_gradient", "input_gradient", input_gradient)
        self._out.drop(ref for ref, _ in unit.given.values())
        unit.given = {}
        unit.left.popleft()
        unit.done_count += 1
        unit.running = False
        self._fetch_task()

    def _compare(self, unit: _Unit, claim: Claim, kind: Kept, computed: TensorRef) -> None:
        """Compares with what a member brought, if one did."""
        claimed, by = unit.given.pop(kind, (None, ""))
        if claimed is None or not by:
            self._out.drop((computed,) if claimed is None else (computed, claimed))
            return
        unit.comparing.append((claim, by, unit.left[0], (computed, claimed)))
        self._out.compute(Compare(unit.accumulator, unit.order.version, (computed,), (claimed,)))

    def _compare_loss(self, unit: _Unit, task: TaskId, loss: float) -> None:
        order = unit.order
        losses = [each for each in order.tasks if each.op == "L"]
        for each, claimed in zip(losses, order.losses, strict=False):
            if (each.microbatch, each.position) == (task.microbatch, task.position + 1):
                value = abs(claimed - loss) / max(abs(loss), 1e-12) if claimed != loss else 0.0
                self._note(unit, "loss", order.contribution.node, _plain(task), value)

    def _note(self, unit: _Unit, claim: Claim, by: str, task: TaskId, value: float) -> None:
        value = value if math.isfinite(value) and value < DIFFERENCE_MAX else DIFFERENCE_MAX
        before = unit.found.get((claim, by))
        if before is None or value > before.value:
            residual = unit.residual if claim == "gradient" else ()
            found = Difference(claim=claim, node=NodeId(by), task=task, value=value, residual=residual)
            unit.found[claim, by] = found

    def _conclude(self, unit: _Unit) -> None:
        """All is compared. What a second opinion finds is written down with what led to it, for anybody to check."""
        false = any(not each.value <= self._config.audit.tolerance for each in unit.found.values())
        if not (false and unit.kept):
            self._end("")
            return
        grid = self._out.key() if self._config.wire.gradients == "gi" else None
        self._out.compute(TakeWeights(unit.order.version, self._out.key(), grid))

    def _testify(self, unit: _Unit, weights: tuple[TensorRef, ...]) -> None:
        named = {**dict(zip(("weights", "grid"), weights, strict=False)), **unit.kept}
        if sum(ref.byte_count for ref in named.values()) <= EVIDENCE_BYTES_MAX:
            # The file is for anybody to read: it does not say where the stage looks for small lies.
            found = tuple(msgspec.structs.replace(each, residual=()) for each in unit.found.values())
            order = msgspec.structs.replace(unit.order, directions=b"")
            self._out.compute(WriteEvidence(order, found, tuple(named), tuple(named.values())))
        self._out.drop(weights)
        self._end("")

    def failed(self, job: Job, reason: str) -> None:
        """The device could not: the audit is over, and nobody is blamed."""
        if self._unit is not None and self._is_current(self._unit, job):
            self._end("" if isinstance(job, TakeWeights) else f"the device failed: {reason}"[:200])

    # ---- the end -------------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> None:
        unit = self._unit
        assert unit is not None
        self._say(unit.ledger, unit.order, unit.found.values() if not reason else (), reason)
        self._forget()
        self._begin_next()

    def _forget(self) -> None:
        unit, self._unit = self._unit, None
        if unit is None:
            return
        self._out.drop(unit.parts.values() if not unit.summed else ())
        self._out.drop(ref for answer in unit.answers.values() for ref in answer.tensors)
        self._out.drop(ref for ref, _ in unit.given.values())
        self._out.drop(ref for *_, refs in unit.comparing for ref in refs)
        self._out.drop(unit.kept.values())
        self._out.compute(DropAccumulators((unit.accumulator,)))

    def _say(self, ledger: NodeId, order: Audit, found: Iterable[Difference], reason: str) -> None:
        self._out.send(
            ledger,
            AuditReport(
                ledger_generation=order.ledger_generation,
                contribution=order.contribution,
                step=order.step,
                attempt=order.attempt,
                differences=tuple(found),
                reason=reason,
            ),
        )

    def check(self) -> None:
        assert len(self._waiting) <= WAITING_MAX, "more audits wait than ever may"


def _plain(task: TaskId) -> TaskId:
    """The task of the run that an audit's stands for."""
    return msgspec.structs.replace(task, slice=0)
