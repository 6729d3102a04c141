"""The ledger of a stage: accepts contributions whole or not at all, freezes, seals and commits its steps.

A contribution is accepted if every shard has its part durably, its step is open, its version is the step's, and none
of its tasks is covered. That check alone makes every task count exactly once; leases and fences only save work
(state-and-trust 4.1). The order in which acceptances became durable is the order of summation everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from node.machine.numbers import same_losses, task_count
from node.machine.records import ContributionAccepted, Record, StepSealed
from node.machine.waits import Wait, listed
from node.server.audit_desk import AuditDesk
from node.server.context import StageContext, stage_tasks
from node.server.doubts import Doubts
from node.server.judging import ALERT, Judge, same_sum, sum_of
from node.server.recovery import StateLostError
from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.base.limits import ITEMS_MAX
from protocol.messages import (
    Commit,
    Committed,
    Decision,
    Freeze,
    PartialNorm,
    Share,
    StageCommitted,
    StageFrozen,
    StageSum,
    StepClosed,
    StepOpened,
    Stored,
    Verdict,
    Work,
)

PENDING_PER_STEP_MAX = 4096
"""Contributions of one step that may wait for their other shards: as many as a shard keeps."""


@dataclass(slots=True)
class _Pending:
    """A contribution that not all shards have yet."""

    first: Stored
    shards: dict[int, float] = field(default_factory=dict)
    """Those that have their part, and the square of its norm."""


@dataclass(slots=True)
class _Step:
    """One open step of the stage: OPEN, then FROZEN when all is covered, then SEALED, then COMMITTED."""

    tasks: tuple[TaskId, ...]
    """All that the stage has to cover, in order."""
    uncovered: dict[TaskId, None]
    """Tasks that no accepted or just being accepted contribution has."""
    opened: bool = False
    """Whether the decider has said so. Before, contributions wait: anybody can name a step that is to come."""
    accepted: list[ContributionId] = field(default_factory=list)
    """Durable acceptances, in their order."""
    writing: dict[ContributionId, None] = field(default_factory=dict)
    """Acceptances on their way to the disk; their tasks are taken already."""
    verdicts: dict[ContributionId, Verdict] = field(default_factory=dict)
    pending: dict[ContributionId, _Pending] = field(default_factory=dict)
    blamed: dict[ContributionId, tuple[NodeId, ...]] = field(default_factory=dict)
    """Whom a contribution that is being accepted has shown to have brought something false."""
    loss_sum: float = 0.0
    norms: dict[int, PartialNorm] = field(default_factory=dict)
    others: dict[int, StageSum] = field(default_factory=dict)
    """What the other stages came to, as their own ledgers say."""
    decision: Decision | None = None
    sealed_norms: tuple[float, ...] = ()
    """Of the shards, as they stood when it was sealed."""
    sealed: bool = False
    committed: dict[int, None] = field(default_factory=dict)
    audited: Counter[NodeId] | None = None
    """Told with the step's shares; None: not told yet."""

    @property
    def frozen(self) -> bool:
        return self.opened and not self.uncovered and not self.writing


BANNED = "its sender is banned"
SERVERS_NAMED = 3
"""Servers of the stage that one sentence names; more are counted."""


class LedgerRole:
    """The ledger of one stage, on its first front server."""

    def __init__(self, context: StageContext, coordinator: NodeId | None = None) -> None:
        self._context = context
        self._out = context.out
        self._steps: dict[int, _Step] = {}
        batch, model = context.config.batch, context.config.model
        self._doubts = Doubts(loss_tokens=batch.samples * model.context)
        self._shard_count = len(context.stage_servers)
        self._banned: frozenset[NodeId] = frozenset()
        self._endings = Judge(context)
        self.desk = AuditDesk(context, coordinator, accept=self._accept, void=self._void)

    # ---- start and steps -----------------------------------------------------------------------------------------

    def start(self, records: list[Record]) -> str:
        """Reads its acceptances and seals back; the shards tell the rest. Returns what is missing, or nothing."""
        for record in records:
            if record.ledger_generation != self._context.generation or record.step <= self._context.closed:
                continue
            if isinstance(record, ContributionAccepted):
                step = self._open(record.step)
                step.opened = True
                if any(task not in step.uncovered for task in record.tasks):
                    return f"step {record.step} counts a task twice on this disk"
                for task in record.tasks:
                    del step.uncovered[task]
                self._accepted(step, record)
            elif isinstance(record, StepSealed):
                step = self._open(record.step)
                if tuple(step.accepted) != record.contributions:
                    return f"step {record.step} is sealed, and this disk does not have all that it counts"
                step.opened = step.sealed = True
                step.decision = Decision(
                    ledger_generation=self._context.generation,
                    step=record.step,
                    clip_factor=record.clip_factor,
                    skipped=record.skipped,
                    learning_rate=record.learning_rate,
                    stages=record.stages,
                    changes=record.changes,
                )
                step.sealed_norms = record.norms
        return ""

    def on_step_opened(self, message: StepOpened) -> None:
        """The decider opens a step: the whole stage hears of it. What only validates has nothing to cover."""
        for node in self._context.stage_servers:
            if node != self._context.node:
                self._out.send(node, message)
        if message.step >= self._context.config.steps:
            return
        step = self._open(message.step)
        step.opened = True
        self.desk.step_opened(message.step)
        for pending in list(step.pending.values()):
            self._judge_if_complete(step, pending)
        if not step.tasks and not step.norms:
            # No route of the step leads through this stage: it has a gradient of zero, and a version like everybody.
            self._freeze(message.step, step)

    def on_step_closed(self, message: StepClosed) -> None:
        for node in self._context.stage_servers:
            if node != self._context.node:
                self._out.send(node, message)

    def close_step(self, step: int) -> None:
        self._doubts.close_step(step)
        self.desk.close_step(step)
        for key in [key for key in self._steps if key <= step]:
            del self._steps[key]

    def _open(self, number: int) -> _Step:
        step = self._steps.get(number)
        if step is None:
            tasks = list(stage_tasks(self._context, number))
            step = self._steps[number] = _Step(tuple(tasks), dict.fromkeys(tasks))
        return step

    def handle(self, message: Work) -> None:
        """A kind that the table gives to the ledger; the sender's right to it is checked."""
        match message:
            case Stored():
                self.on_stored(message)
            case PartialNorm():
                self.on_partial_norm(message)
            case StageFrozen():
                self.on_other_frozen(message)
            case Decision():
                self._endings.check(message, self.known_sums(message.step), {})
                self.on_decision(message)
            case Committed():
                self.on_committed(message)

    # ---- contributions -------------------------------------------------------------------------------------------

    def on_stored(self, message: Stored) -> None:
        """A shard has its part. The last one decides."""
        if not self._context.in_window(message.step):
            return
        step = self._open(message.step)
        verdict = step.verdicts.get(message.contribution)
        if verdict is not None:
            self._tell(verdict)
            return
        if message.contribution in step.writing or self.desk.is_held(message.step, message.contribution):
            return
        pending = step.pending.get(message.contribution)
        if pending is None:
            if len(step.pending) >= PENDING_PER_STEP_MAX:
                self._out.count("barnraise_transport_rejected_messages_total", reason="size")
                return
            pending = step.pending[message.contribution] = _Pending(message)
        if pending.first.tasks != message.tasks or not same_losses(pending.first.losses, message.losses):
            self._judge(step, pending.first, "its shards name different tasks")
            return
        pending.shards[message.shard] = message.square_norm
        self._judge_if_complete(step, pending)

    def _judge_if_complete(self, step: _Step, pending: _Pending) -> None:
        if not step.opened or len(pending.shards) < self._shard_count:
            return
        message, norms = pending.first, pending.shards.values()
        refusal = self._refusal(step, message)
        trusted = message.contribution.node in self._context.stage_servers
        # What a server makes is measured where a shard knows of a doubt: by one that does not, it is known to nobody.
        square_norm = 0.0 if trusted and not all(norms) else sum(norms)
        doubt = "" if refusal else self._doubts.look(message, square_norm, trusted, self._context.servers_judge)
        if doubt:
            self._out.log("warning", "contribution doubted", contribution=str(message.contribution), reason=doubt)
        elif not refusal:
            step.pending.pop(message.contribution)
            if self.desk.hold(message, square_norm):
                self.desk.look(message.step, step.uncovered)
            else:
                self._accept(message, square_norm)
            return
        self._judge(step, message, doubt or refusal, doubted=bool(doubt))

    def _accept(self, message: Stored, square_norm: float) -> None:
        """It counts, unless meanwhile, while it was audited, it cannot any more."""
        step = self._steps.get(message.step)
        if step is None:
            return
        refusal = self._refusal(step, message)
        if not refusal:
            step.blamed[message.contribution] = blamed = self._doubts.accepted(message, square_norm)
            for node in blamed:
                self._out.log("warning", "a false result", blamed=node, tasks=[str(task) for task in message.tasks])
        self._judge(step, message, refusal)

    def _void(self, message: Stored, reason: str, blamed: tuple[NodeId, ...]) -> None:
        """An audit has shown it to be false: others do its tasks."""
        step = self._steps.get(message.step)
        if step is not None:
            self._decide(step, message.contribution, message.step, message.tasks, reason, doubted=True, blamed=blamed)

    def audit_counts(self) -> dict[str, float]:
        """Of this ledger's audits, by what came of them."""
        counts = self.desk.audits.counts
        return {f"audits_{outcome}": float(counts[outcome]) for outcome in ("passed", "blamed", "missed")}

    def ban(self, nodes: Collection[NodeId]) -> None:
        """What these nodes brought and is not accepted yet never will be; what was accepted stays and counts once."""
        self._banned = frozenset(nodes)
        for step in self._steps.values():
            for pending in list(step.pending.values()):
                if pending.first.contribution.node in self._banned:
                    self._judge(step, pending.first, BANNED)

    def _refusal(self, step: _Step, message: Stored) -> str:
        if message.contribution.node in self._banned:
            return BANNED
        if message.version != self._context.config.version_of(message.step):
            return "computed on another version"
        if len(set(message.tasks)) != len(message.tasks):
            return "names a task twice"
        for task in message.tasks:
            if task not in step.uncovered:
                return f"{task} is covered already, or not of this stage"
        if len(message.losses) != sum(task.op == "L" for task in message.tasks):
            return "losses and tasks disagree"
        return ""

    def _judge(self, step: _Step, message: Stored, refusal: str, doubted: bool = False) -> None:
        step.pending.pop(message.contribution, None)
        if refusal:
            self._decide(step, message.contribution, message.step, message.tasks, refusal, doubted)
            return
        step.writing[message.contribution] = None
        for task in message.tasks:
            del step.uncovered[task]
        self._out.persist(
            ContributionAccepted(
                ledger_generation=self._context.generation,
                step=message.step,
                contribution=message.contribution,
                tasks=message.tasks,
                losses=message.losses,
            )
        )

    def accepted(self, record: ContributionAccepted) -> None:
        """The acceptance is durable: now it may be told."""
        step = self._steps[record.step]
        del step.writing[record.contribution]
        self._accepted(step, record)
        self._tell(step.verdicts[record.contribution])
        self.desk.look(record.step, step.uncovered)
        if step.frozen:
            self.desk.frozen(record.step)
            self._freeze(record.step, step)

    def _accepted(self, step: _Step, record: ContributionAccepted) -> None:
        number = len(step.accepted)
        step.accepted.append(record.contribution)
        step.loss_sum += sum(record.losses)
        verdict = self._verdict(record.contribution, record.step, record.tasks, number, "")
        blamed = step.blamed.pop(record.contribution, ())
        step.verdicts[record.contribution] = msgspec.structs.replace(verdict, blamed=blamed) if blamed else verdict

    def _decide(
        self,
        step: _Step,
        contribution: ContributionId,
        number: int,
        tasks: tuple[TaskId, ...],
        refusal: str,
        doubted: bool,
        blamed: tuple[NodeId, ...] = (),
    ) -> None:
        verdict = self._verdict(contribution, number, tasks, -1, refusal)
        step.verdicts[contribution] = msgspec.structs.replace(verdict, doubted=doubted, blamed=blamed)
        self._tell(step.verdicts[contribution])
        self._out.log("info", "contribution refused", contribution=str(contribution), reason=refusal)

    def _verdict(
        self, contribution: ContributionId, step: int, tasks: tuple[TaskId, ...], number: int, refusal: str
    ) -> Verdict:
        return Verdict(
            ledger_generation=self._context.generation,
            contribution=contribution,
            step=step,
            tasks=tasks,
            accepted=not refusal,
            number=number,
            reason=refusal,
        )

    def _tell(self, verdict: Verdict) -> None:
        """To the sender, and to every server of the stage: as a shard and for its pools."""
        self._out.count("barnraise_server_updates_total", outcome=_outcome(verdict))
        for node in dict.fromkeys((verdict.contribution.node, *self._context.stage_servers)):
            self._out.send(node, verdict)

    # ---- freeze, seal, commit ------------------------------------------------------------------------------------

    def _freeze(self, number: int, step: _Step) -> None:
        for node in self._context.stage_servers:
            self._out.send(node, self._freeze_message(number, step))

    def _freeze_message(self, number: int, step: _Step) -> Freeze:
        return Freeze(ledger_generation=self._context.generation, step=number, contributions=tuple(step.accepted))

    def on_partial_norm(self, message: PartialNorm) -> None:
        step = self._steps.get(message.step)
        if step is None or not step.frozen:
            return
        step.norms[message.shard] = message
        if len(step.norms) == self._shard_count and step.decision is None:
            frozen, plan = self._stage_frozen(message.step, step), self._context.plan
            for stage in range(len(plan.stages)):  # the ledger of stage 0 is the decider's own
                if stage != self._context.stage or stage == 0:
                    self._out.send(plan.ledger_of(stage), frozen)

    def on_other_frozen(self, message: StageFrozen) -> None:
        """What another stage came to, from its own ledger: the decider must say the same of it."""
        step = self._steps.get(message.step)
        if step is None or message.stage == self._context.stage:
            return
        said = step.others[message.stage] = sum_of(message)
        if (
            step.decision is not None
            and step.decision.stages
            and not same_sum(step.decision.stages[message.stage], said)
        ):
            self._context.alerts[ALERT] = (
                f"step {message.step + 1} was decided on another word than stage {message.stage}'s"
            )
            self._out.log("error", "decision contradicted", step=message.step, stage=message.stage)

    def known_sums(self, number: int) -> dict[int, StageSum]:
        """What a step's stages came to, by others than the decider."""
        step = self._steps.get(number)
        if step is None:
            return {}
        own = len(step.norms) == self._shard_count and step.frozen
        return {**step.others, **({self._context.stage: sum_of(self._stage_frozen(number, step))} if own else {})}

    def _stage_frozen(self, number: int, step: _Step) -> StageFrozen:
        norms = [step.norms[shard] for shard in range(self._shard_count)]
        return StageFrozen(
            ledger_generation=self._context.generation,
            stage=self._context.stage,
            step=number,
            square_norm=sum(norm.square_norm for norm in norms),
            finite=all(norm.finite for norm in norms),
            loss_sum=step.loss_sum,
        )

    def on_decision(self, message: Decision) -> None:
        """Stage 0 has decided how the step ends: seal it, once."""
        step = self._steps.get(message.step)
        if step is None or step.decision is not None:
            return
        if not step.frozen:
            raise StateLostError(f"step {message.step} is decided, and here it is not complete")
        if len(step.norms) < self._shard_count:
            return  # this ledger has just started: it hears of the decision again when it tells what the stage came to
        step.decision = message
        step.sealed_norms = tuple(step.norms[shard].square_norm for shard in range(self._shard_count))
        self._out.persist(
            StepSealed(
                ledger_generation=self._context.generation,
                step=message.step,
                contributions=tuple(step.accepted),
                clip_factor=message.clip_factor,
                skipped=message.skipped,
                learning_rate=message.learning_rate,
                stages=message.stages,
                changes=message.changes,
                norms=step.sealed_norms,
            )
        )

    def sealed(self, record: StepSealed) -> None:
        """The seal is durable: from here on the step happens."""
        step = self._steps[record.step]
        step.sealed = True
        for node in self._context.stage_servers:
            self._out.send(node, self._commit_message(record.step, step))

    def _commit_message(self, number: int, step: _Step) -> Commit:
        assert step.decision is not None
        return Commit(
            ledger_generation=self._context.generation,
            step=number,
            contributions=tuple(step.accepted),
            clip_factor=step.decision.clip_factor,
            skipped=step.decision.skipped,
            learning_rate=step.decision.learning_rate,
            stages=step.decision.stages,
            changes=step.decision.changes,
            norms=step.sealed_norms,
        )

    def on_committed(self, message: Committed) -> None:
        step = self._steps.get(message.step)
        if step is None:
            return
        step.committed[message.shard] = None
        if len(step.committed) == self._shard_count:
            self._out.send(
                self._context.plan.decider,
                self._stage_committed(message.step, step),
            )

    def _stage_committed(self, number: int, step: _Step) -> StageCommitted:
        brought: Counter[NodeId] = Counter()
        for contribution in step.accepted:
            brought[contribution.node] += task_count(self._tasks_of(step, contribution))
        if step.audited is None:  # what is said again is the same
            step.audited = self.desk.take_audited(brought)
        return StageCommitted(
            ledger_generation=self._context.generation,
            stage=self._context.stage,
            step=number,
            shares=largest_shares(brought, step.audited),
        )

    # ---- links ---------------------------------------------------------------------------------------------------

    def sync(self, peer: NodeId) -> None:
        """A server is ready. To a shard: the open steps, what counts, what it still owes. To the decider: the same. To
        the other ledgers: what this stage came to.

        What a shard has said before counts no more: its disk may have lost it. What it has, it says (again) now.
        """
        context = self._context
        if peer in context.stage_servers:
            self.desk.server_came()
            for number in context.config.final_steps:  # nothing is covered there, so nothing is kept of them here
                if context.closed < number <= context.opened:
                    self._out.send(peer, self._opened_message(number))
            for number, step in self._steps.items():
                if step.opened:
                    self._out.send(peer, self._opened_message(number))
                for verdict in step.verdicts.values():
                    if verdict.accepted:
                        self._out.send(peer, verdict)
                shard = context.plan.shard_of(peer)
                assert shard is not None, "a server of the stage has a shard"
                for pending in step.pending.values():
                    pending.shards.pop(shard, None)
                if step.sealed:
                    step.committed.pop(shard, None)
                    self._out.send(peer, self._commit_message(number, step))
                elif step.frozen and shard not in step.norms:
                    self._out.send(peer, self._freeze_message(number, step))
        if context.plan.is_ledger(peer):
            for number, step in self._steps.items():
                if step.frozen and len(step.norms) == self._shard_count:
                    self._out.send(peer, self._stage_frozen(number, step))
        if peer == context.plan.decider:
            for number, step in self._steps.items():
                if len(step.committed) == self._shard_count:
                    self._out.send(peer, self._stage_committed(number, step))

    def _opened_message(self, number: int) -> StepOpened:
        return StepOpened(ledger_generation=self._context.generation, step=number, closed=self._context.closed)

    def waiting_for(self) -> Wait | None:
        """What the oldest open step still needs from the shards or the decider, or nothing. What the decider on this
        very server waits for, it says itself."""
        if not self._steps:
            return None
        number = min(self._steps)
        step = self._steps[number]
        if not step.frozen:
            missing = len(step.uncovered) + len(step.writing)
            return Wait(number, f"{missing} weight gradient{'' if missing == 1 else 's'}")
        decides = self._context.node == self._context.plan.decider
        if not step.sealed:
            if len(step.norms) < self._shard_count:
                return Wait(number, self._others_to("sum up gradients", step.norms) or "its own sum of gradients")
            return None if decides else Wait(number, "stage 0 to decide on the update")
        if len(step.committed) < self._shard_count:
            return Wait(number, self._others_to("save the update", step.committed) or "its own update to be saved")
        return None if decides else Wait(number, "the other stages to save the update")

    def _others_to(self, what: str, done: Collection[int]) -> str:
        """The other servers of the stage that have something left to do, or nothing when only this one has."""
        servers = self._context.plan.stages[self._context.stage].servers
        fronts = sum(server.role != "back" for server in servers)
        missing = [
            f"{'server' if server.role == 'both' else server.role} {shard if shard < fronts else shard - fronts}"
            for shard, server in enumerate(servers)
            if shard not in done and shard != self._context.shard
        ]
        if not missing:
            return ""
        return f"{listed(missing) if len(missing) <= SERVERS_NAMED else f'{len(missing)} servers'} to {what}"

    def check(self) -> None:
        self.desk.check()
        for number, step in self._steps.items():
            assert number > self._context.closed, f"closed step {number} is kept (L3)"
            named = list(step.uncovered)
            for contribution in (*step.accepted, *step.writing):
                named.extend(self._tasks_of(step, contribution))
            if not step.writing:
                whole = len(named) == len(step.tasks) and set(named) == set(step.tasks)
                assert whole, f"step {number} (T-I1)"
            assert not step.sealed or step.frozen, f"step {number} is sealed but not covered"

    @staticmethod
    def _tasks_of(step: _Step, contribution: ContributionId) -> tuple[TaskId, ...]:
        verdict = step.verdicts.get(contribution)
        return verdict.tasks if verdict is not None else ()


def largest_shares(brought: Counter[NodeId], audited: Mapping[NodeId, int]) -> tuple[Share, ...]:
    """Who brought how many tasks, the most first, and how many of its audits have found right.

    A list has ITEMS_MAX (4,096) items: sixteen times the volunteers that one server links to; beyond it the smallest go
    without credit for the step.
    """
    return tuple(Share(node, tasks, audited.get(node, 0)) for node, tasks in brought.most_common(ITEMS_MAX))


def _outcome(verdict: Verdict) -> str:
    """What became of a contribution, as a metric says it."""
    if verdict.accepted:
        return "applied"
    if verdict.blamed:
        return "false"
    if verdict.doubted:
        return "doubted"
    return "banned" if verdict.reason == BANNED else "duplicate"
