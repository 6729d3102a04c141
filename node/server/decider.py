"""The decider: the ledger of stage 0 opens steps, decides how each ends, and closes it when all have committed.

A step that goes with a validation is closed when that is through, too: servers then still have its version, and who
computes has nothing else to do until the next step opens.

A per-stage ledger cannot know the global gradient norm, so one place must: every stage reports when it is frozen, the
decision is made durable, and only then told. The coordinator has no part in it (state-and-trust 4.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

from node.machine.jobs import BringManifest, WriteManifest
from node.machine.numbers import learning_rate, validation_loss
from node.machine.records import CheckpointWritten, LastValidated, Record, StepDecided, StepDone, StepSealed
from node.machine.waits import Wait, listed
from node.server.context import StageContext
from node.server.judging import Ending, ending, sum_of
from node.server.ledger import largest_shares
from node.server.recovery import StateLostError
from protocol.base.ids import NodeId
from protocol.messages import (
    CheckpointDone,
    CheckpointPart,
    Decision,
    Share,
    StageCommitted,
    StageFrozen,
    StageSum,
    StepClosed,
    StepOpened,
    StepReport,
    Validated,
    ValidationLoss,
    Work,
)
from protocol.run.changes import RunChange, changed, in_force
from protocol.run.places import above

REPORTS_IN_FLIGHT_MAX = 64
"""Step reports sent to the coordinator and not yet acknowledged; more wait here, so its return is no flood."""


@dataclass(slots=True)
class _Step:
    """A step that is open somewhere."""

    opened_at: float
    frozen: dict[int, StageFrozen] = field(default_factory=dict)
    decision: StepDecided | None = None
    decision_durable: bool = False
    committed: dict[int, tuple[Share, ...]] = field(default_factory=dict)
    """By stage: who computed it."""
    losses: dict[int, float] = field(default_factory=dict)
    """Of the validation: sums in nats, by microbatch."""


class DeciderRole:
    """Lives on the ledger of stage 0. `coordinator` is where step reports go, whenever it is linked."""

    def __init__(self, context: StageContext, coordinator: NodeId) -> None:
        self._context = context
        self._out = context.out
        self._coordinator = coordinator
        self._stage_count = len(context.plan.stages)
        self._steps: dict[int, _Step] = {}
        self._early: dict[int, _Step] = {}
        """What is told of steps that an earlier life has opened, and this one may not open yet: it is told once."""
        self._closed = self._first_step - 1
        """Newest step whose end is durable."""
        self._closing = self._closed
        """Newest step whose end was sent to the disk."""
        self._opened = self._closed
        self._reached = -1
        """Newest step that an earlier life of this process may have opened: that is written nowhere."""
        self._reports: dict[int, StepReport] = {}
        """Reports that the coordinator has not acknowledged, in order."""
        self._parts: dict[int, dict[tuple[int, int], CheckpointPart]] = {}
        self._manifests: dict[int, None] = {}
        self._finals: dict[int, ValidationLoss] = {}
        """Of the versions that the run ends with, by the step that validates each (`RunConfig.final_steps`)."""
        self._coordinator_linked = False
        self._acknowledged = -1
        self._reported = -1
        """Newest step whose report went out on the present link."""
        self._gap_answered = -2
        """What the coordinator named when it last got reports that do not follow on it."""
        self.started = False

    @property
    def _first_step(self) -> int:
        return max(0, self._context.plan.restore_step)

    @property
    def closed(self) -> int:
        """Newest step that every stage has committed."""
        return self._closed

    def counters(self) -> dict[str, float]:
        """The newest step that it has opened, the newest that anybody may know open, and closed steps that the
        coordinator has not acknowledged."""
        reached = max(self._opened, self._reached)
        unreported = len(self._reports) + (self._last_is_unsaved and self._first_step >= self._context.config.steps)
        return {"opened": float(self._opened), "reached": float(reached), "unreported": float(unreported)}

    @property
    def _last_is_unsaved(self) -> bool:
        """Whether these ledgers have to write the last checkpoint: they do, unless they began from it."""
        last, plan = self._context.config.steps, self._context.plan
        return last not in self._manifests and (self._first_step < last or plan.continues >= 0)

    def unreported(self) -> tuple[StepReport, ...]:
        """Steps that the coordinator has not acknowledged, oldest first: closed ones, and those decided after them,
        which count if the run goes back to a checkpoint behind them."""
        decisions = [step.decision for _, step in sorted(self._steps.items()) if step.decision_durable]
        undone = [self._report(decision, duration_s=0.0) for decision in decisions if decision is not None]
        return (*self._reports.values(), *undone)

    def take_over(self, reports: tuple[StepReport, ...]) -> None:
        """Reports of the ledgers before these: what the run has kept still has to be told."""
        for report in reports:
            if report.step < self._first_step:
                kept = msgspec.structs.replace(report, ledger_generation=self._context.generation)
                self._reports[report.step] = kept

    # ---- start ---------------------------------------------------------------------------------------------------

    def start(self, records: list[Record], now: float) -> str:
        """Goes on where the durable records end. Returns what is missing among them, or nothing."""
        missing, decisions = "", self._decisions(records)
        ends = {(each.ledger_generation, each.step): each for each in records if isinstance(each, StepDone)}
        for (generation, number), decision in sorted(decisions.items(), key=lambda each: each[0]):
            if generation == self._context.generation:
                self._steps[number] = _Step(now, decision=decision, decision_durable=True)
            elif number < self._first_step:
                # What the run has kept of earlier ledgers' steps: the coordinator may not have heard of it. The
                # checkpoint proves that they ended as decided, also one whose end was not durable here yet: who
                # computed that is not known any more.
                end = ends.get((generation, number))
                said = () if end is None else (end.shares, end.validation)
                self._reports[number] = self._report(decision, 0.0, *said)
        for record in records:
            if record.ledger_generation != self._context.generation:
                continue
            if isinstance(record, LastValidated):
                self._last_known(record)
            elif isinstance(record, StepDone):
                self._closed = self._closing = record.step
                step = self._steps.pop(record.step, None)
                if step is None or step.decision is None:
                    missing = missing or f"step {record.step} is closed, and this disk does not say how it was decided"
                    continue
                self._reports[record.step] = self._report(step.decision, 0.0, record.shares, record.validation)
            elif isinstance(record, CheckpointWritten):
                self._manifests[record.step] = None
        self._opened = max([self._closed, *self._steps])
        if unsaid := self._unsaid_end():
            return unsaid
        if any(record.ledger_generation == self._context.generation for record in records):
            # What it decided may have been closed, too, and the disk has lost that: then more steps were open.
            config = self._context.config
            self._reached = min(config.steps - 1, self._opened + 1 + config.batch.delay)
        return missing

    def _unsaid_end(self) -> str:
        """Which step must be closed, since nothing of the newest can have been decided before (T-I8), where the disk
        does not say so; or nothing."""
        over = self._opened - 1 - self._context.config.batch.delay
        lost = f"step {self._opened} is decided, and this disk does not say that step {over} is closed"
        return lost if over > self._closed else ""

    def _decisions(self, records: list[Record]) -> dict[tuple[int, int], StepDecided]:
        """By ledger generation and step. What this disk has lost of them, the seals of the ledger beside say: a seal
        is made when the decision is durable. It is written once more, since a journal gives back the newest seals only.
        """
        found = {(each.ledger_generation, each.step): each for each in records if isinstance(each, StepDecided)}
        deciding = {self._context.generation, *(generation for generation, _ in found)}
        for seal in records:
            known = (seal.ledger_generation, seal.step)
            if isinstance(seal, StepSealed) and seal.stages and known not in found and known[0] in deciding:
                found[known] = again = self._sealed_decision(seal)
                self._out.log("warning", "decision read from the seal", step=seal.step)
                self._out.persist(again)
        return found

    def begin(self, now: float) -> None:
        """This server's shard is ready: open what may be open."""
        self.started = True
        for number in range(self._closed + 1, self._opened + 1):
            self._steps.setdefault(number, _Step(now))
        self._open_steps(now)

    def plan_changed(self, now: float) -> None:
        """The operator may have changed the run, or let it go on."""
        if self.started:
            self._open_steps(now)

    def _open_steps(self, now: float) -> None:
        """Opens all that may be open."""
        config = self._context.config
        while self._opened < self._newest_that_may_open and not self._waits_for_orders:
            self._opened += 1
            self._open(self._opened, now)
        if self._closed == config.steps - 1 and not self._waits_for_orders:
            for number in self._finals_due:
                self._opened = number
                if number not in self._steps:
                    self._open(number, now)

    def _open(self, number: int, now: float) -> None:
        early = self._early.pop(number, None)
        step = self._steps[number] = _Step(now) if early is None else early
        step.opened_at = now
        self._tell_opened(number)
        self._decide(number, step)
        if step.losses:
            self._end_validation(number, step)

    def _known(self, number: int) -> _Step | None:
        """A step that is open, or may be opened soon and was by an earlier life: others go on with it."""
        step = self._steps.get(number)
        newest = max(self._newest_that_may_open, self._reached)
        if step is None and (self._closed < number <= newest or number in self._finals_due):
            step = self._early.setdefault(number, _Step(0.0))
        return step

    @property
    def _newest_that_may_open(self) -> int:
        """Step t may open when step t - 1 - delay is closed everywhere (T-I8)."""
        config = self._context.config
        return min(config.steps - 1, self._closed + 1 + config.batch.delay)

    @property
    def _waits_for_orders(self) -> bool:
        """Whether the plan allows no further step: the operator's pause, or a change that all must know of first."""
        plan = self._context.plan
        return plan.paused or plan.held

    @property
    def _finals_due(self) -> list[int]:
        """Steps that have to validate what the run ends with, and have not."""
        return [step for step in self._context.config.final_steps if step not in self._finals]

    def _tell_opened(self, step: int) -> None:
        for stage in range(self._stage_count):
            self._out.send(self._context.plan.ledger_of(stage), self._opened_message(step))

    def _opened_message(self, step: int) -> StepOpened:
        return StepOpened(ledger_generation=self._context.generation, step=step, closed=self._closed)

    def check_closed(self, step: int) -> None:
        """A server says which step is closed: nobody can know of more than this one."""
        if step > self._closed:
            raise StateLostError(f"step {step} was closed, and this disk only knows of {self._closed}")

    def handle(self, peer: NodeId, message: Work) -> None:
        """A message to the decider; the sender's right to it is checked."""
        match message:
            case StageFrozen():
                self.on_stage_frozen(peer, message)
            case StageCommitted():
                self.on_stage_committed(message)
            case CheckpointPart():
                self.on_checkpoint_part(message)
            case Validated():
                self.on_validated(message)
            case _:
                self._out.drop(getattr(message, "tensors", ()))

    # ---- decision ------------------------------------------------------------------------------------------------

    def on_stage_frozen(self, peer: NodeId, message: StageFrozen) -> None:
        """A stage has all weight gradients of a step. The last one decides."""
        step = self._known(message.step)
        if step is None:
            return
        if step.decision is not None:
            if step.decision_durable:
                self._out.send(peer, self._decision_message(step.decision))
            return
        step.frozen[message.stage] = message
        if message.step in self._steps:
            self._decide(message.step, step)

    def _decide(self, number: int, step: _Step) -> None:
        if len(step.frozen) < self._stage_count:
            return
        frozen = [step.frozen[stage] for stage in range(self._stage_count)]
        stages = tuple(sum_of(stage) for stage in frozen)
        plan, scale = self._context.plan, self._context.batches.scale(number)
        # A later step may be decided already, without what was changed since: then this one goes without it too.
        later = [other.decision for each, other in self._steps.items() if each > number]
        changes = min([in_force(plan.changes, number), *(one.changes for one in later if one is not None)])
        as_changed = changed(self._context.written, plan.changes[:changes])
        end = ending(as_changed, number, stages, scale)
        step.decision = self._decision(number, end, stages, plan.changes[:changes])
        self._out.persist(step.decision)

    def _decision(
        self,
        number: int,
        end: Ending,
        stages: tuple[StageSum, ...],
        changes: tuple[RunChange, ...],
        generation: int | None = None,
    ) -> StepDecided:
        """`generation`: of the ledgers, where it is not the present one."""
        batches = self._context.batches
        norm = math.sqrt(math.fsum(stage.square_norm for stage in stages)) if not end.skipped else 0.0
        return StepDecided(
            ledger_generation=self._context.generation if generation is None else generation,
            step=number,
            clip_factor=end.clip_factor,
            skipped=end.skipped,
            loss=sum(stage.loss_sum for stage in stages) / batches.tokens(number),
            gradient_norm=batches.scale(number) * norm,
            data_cursor=batches.samples(number),
            learning_rate=end.learning_rate,
            changes=len(changes),
            stages=stages,
            changed=changes,
        )

    def _sealed_decision(self, seal: StepSealed) -> StepDecided:
        end = Ending(seal.clip_factor, seal.skipped, seal.learning_rate)
        return self._decision(seal.step, end, seal.stages, seal.changes, seal.ledger_generation)

    def decided(self, record: StepDecided) -> None:
        """The decision is durable: the ledgers may seal. Of a step that is over nobody has to hear again."""
        step = self._steps.get(record.step)
        if step is None:
            return
        step.decision_durable = True
        for stage in range(self._stage_count):
            self._out.send(self._context.plan.ledger_of(stage), self._decision_message(record))

    def _decision_message(self, record: StepDecided) -> Decision:
        return Decision(
            ledger_generation=self._context.generation,
            step=record.step,
            clip_factor=record.clip_factor,
            skipped=record.skipped,
            learning_rate=record.learning_rate,
            stages=record.stages,
            changes=record.changed,
        )

    # ---- closing -------------------------------------------------------------------------------------------------

    def on_stage_committed(self, message: StageCommitted) -> None:
        step = self._steps.get(message.step)
        if step is None:
            return
        if step.decision is None:
            raise StateLostError(f"stage {message.stage} has committed step {message.step}, which is not decided here")
        step.committed[message.stage] = message.shares
        self._close_next()

    def _close_next(self) -> None:
        """Closes in order, and writes it down once. Nobody hears of it before: a ledger forgets what is closed, and
        could not say again that its stage has committed."""
        step = self._steps.get(self._closing + 1)
        if step is None or step.decision is None or len(step.committed) < self._stage_count:
            return
        validation = self._validation(self._closing + 1, step)
        if validation is None and self._context.config.validates(self._closing + 1):
            return
        self._closing += 1
        brought: Counter[NodeId] = Counter()
        audited: Counter[NodeId] = Counter()
        for stage in sorted(step.committed):
            for share in step.committed[stage]:
                brought[share.node] += share.tasks
                audited[share.node] += share.audited
        generation, shares = self._context.generation, largest_shares(brought, audited)
        self._out.persist(
            StepDone(ledger_generation=generation, step=self._closing, shares=shares, validation=validation)
        )

    def on_validated(self, message: Validated) -> None:
        """A loss of the validation. The last one may be what a step waits for."""
        step = self._known(message.task.step)
        if step is None or message.task.microbatch in step.losses:
            return
        step.losses[message.task.microbatch] = message.loss_sum
        if message.task.step in self._steps:
            self._end_validation(message.task.step, step)

    def _end_validation(self, number: int, step: _Step) -> None:
        if number < self._context.config.steps:
            self._close_next()
        elif (found := self._validation(number, step)) is not None:
            generation = self._context.generation
            self._out.persist(LastValidated(ledger_generation=generation, step=number, validation=found))

    def _validation(self, number: int, step: _Step) -> ValidationLoss | None:
        """What the step's version comes to, when all losses are here."""
        config = self._context.config
        if not config.validates(number) or len(step.losses) < config.validation.batches:
            return None
        return validation_loss(config, config.version_of(number), step.losses.values())

    def last_validated(self, record: LastValidated) -> None:
        """A version that the run ends with is validated, durably; nobody has to forget its step: the run is over."""
        del self._steps[record.step]
        self._last_known(record)
        self._send_reports()

    def _last_known(self, record: LastValidated) -> None:
        """The report of the run's last step tells it."""
        self._finals[record.step] = record.validation
        last = self._reports.get(self._context.config.steps - 1)
        if last is not None and record.validation not in last.validations:
            validations = sorted((*last.validations, record.validation), key=lambda found: found.version)
            self._reports[last.step] = msgspec.structs.replace(last, validations=tuple(validations))

    def done(self, record: StepDone, now: float) -> None:
        """The step is over for good: tell the stages and the coordinator, open the next."""
        self._closed = record.step
        self._early.pop(record.step, None)
        step = self._steps.pop(record.step)
        assert step.decision is not None
        duration_s = now - step.opened_at
        self._reports[record.step] = self._report(step.decision, duration_s, record.shares, record.validation)
        for stage in range(self._stage_count):
            self._out.send(
                self._context.plan.ledger_of(stage),
                StepClosed(ledger_generation=self._context.generation, step=record.step),
            )
        self._send_reports()
        self._open_steps(now)
        self._close_next()

    # ---- reports -------------------------------------------------------------------------------------------------

    def _report(
        self,
        decision: StepDecided,
        duration_s: float,
        shares: tuple[Share, ...] = (),
        validation: ValidationLoss | None = None,
    ) -> StepReport:
        return StepReport(
            ledger_generation=self._context.generation,
            step=decision.step,
            loss=decision.loss,
            tokens=(decision.data_cursor[1] - decision.data_cursor[0]) * self._context.config.model.context,
            gradient_norm=decision.gradient_norm,
            clip_factor=decision.clip_factor,
            skipped=decision.skipped,
            learning_rate=(
                learning_rate(self._context.written, decision.step)
                if decision.learning_rate < 0
                else decision.learning_rate
            ),
            duration_s=duration_s,
            shares=shares,
            changes=decision.changes,
            validations=() if validation is None else (validation,),
        )

    def _send_reports(self) -> None:
        """Sends the oldest unacknowledged reports, each once a link. The last step's waits for the last checkpoint,
        unless that is where these ledgers begin, and for the last versions' validation."""
        if not self._coordinator_linked:
            return
        last = self._context.config.steps
        for step in list(self._reports)[:REPORTS_IN_FLIGHT_MAX]:
            if step + 1 == last and self._last_is_unsaved:
                break
            if step + 1 == last and self._finals_due:
                break
            if step > self._reported:
                self._reported = step
                self._out.send(self._coordinator, self._reports[step])

    def on_stored(self, step: int) -> None:
        """The coordinator has stored the reports up to `step`. If it misses some, it gets what there is, once more."""
        for key in [key for key in self._reports if key <= step]:
            del self._reports[key]
        oldest = next(iter(self._reports), step + 1)
        if step < self._acknowledged or (oldest > step + 1 and step != self._gap_answered):
            self._reported = self._gap_answered = step
        self._acknowledged = step
        self._send_reports()

    def coordinator_here(self) -> None:
        self._coordinator_linked = True
        self._acknowledged = self._reported = -1
        self._gap_answered = -2
        self._send_reports()

    def coordinator_gone(self) -> None:
        self._coordinator_linked = False

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def on_checkpoint_part(self, message: CheckpointPart) -> None:
        """Collects the parts; the manifest is written when all are durable, so half a checkpoint is none."""
        if message.step in self._manifests:
            return
        parts = self._parts.setdefault(message.step, {})
        parts[message.stage, message.shard] = message
        wanted = sum(len(stage.servers) for stage in self._context.plan.stages)
        if len(parts) == wanted:
            ordered = [parts[key] for key in sorted(parts)]
            entries = tuple((p.stage, p.shard, p.file, p.byte_count, p.digest) for p in ordered)
            self._out.compute(WriteManifest(message.step, entries, self._context.batches.samples(message.step)[0]))

    def manifest_written(self, job: WriteManifest | BringManifest, manifest: str) -> None:
        for step in [step for step in self._parts if step <= job.step]:
            del self._parts[step]
        self._out.persist(
            CheckpointWritten(ledger_generation=self._context.generation, step=job.step, manifest=manifest)
        )

    def manifest_durable(self, record: CheckpointWritten) -> None:
        self._manifests[record.step] = None
        self._out.log("info", "checkpoint written", step=record.step, manifest=record.manifest)
        if record.step == self._context.config.steps:
            # manifest.json lies in a step's folder, and that in the run's
            hint = self._context.config.checkpoint.export_hint(above(record.manifest, 2))
            self._out.log("info", "the last checkpoint is written", detail=hint)
        for node in self._context.plan.server_nodes():
            self._tell_checkpoint(node, record.step)
        if record.step == self._context.config.steps:
            self._send_reports()

    def _tell_checkpoint(self, node: NodeId, step: int) -> None:
        self._out.send(node, CheckpointDone(ledger_generation=self._context.generation, step=step))

    # ---- links ---------------------------------------------------------------------------------------------------

    def sync(self, peer: NodeId) -> None:
        """A server is ready: tell it what it may have missed. The newest checkpoint, because a run goes back to one
        that all have named; if it is a ledger, the open steps and the decisions."""
        context = self._context
        if self._manifests:
            self._tell_checkpoint(peer, max(self._manifests))
        if not context.plan.is_ledger(peer):
            return
        self._out.send(peer, StepClosed(ledger_generation=context.generation, step=self._closed))
        for number, step in self._steps.items():
            if number <= self._opened:
                self._out.send(peer, self._opened_message(number))
            if step.decision is not None and step.decision_durable:
                self._out.send(peer, self._decision_message(step.decision))

    def waiting_for(self) -> Wait | None:
        """Which other stages hold up the oldest open step, or nothing. What its own waits for, the ledger says."""
        if not self._steps:
            return None
        number = min(self._steps)
        step = self._steps[number]
        if number >= self._context.config.steps:
            return self._losses_missing(number, step)
        if step.decision is None:
            return self._others_to("finish the gradients", number, step.frozen)
        return self._others_to("save the update", number, step.committed) or self._losses_missing(number, step)

    def _losses_missing(self, number: int, step: _Step) -> Wait | None:
        if not self._context.config.validates(number):
            return None
        missing = self._context.config.validation.batches - len(step.losses)
        if not missing:
            return None
        return Wait(number, f"{missing} microbatch{'' if missing == 1 else 'es'} of the validation")

    def _others_to(self, what: str, number: int, done: Collection[int]) -> Wait | None:
        own = self._context.stage
        missing = [str(stage) for stage in range(self._stage_count) if stage not in done and stage != own]
        if not missing:
            return None
        return Wait(number, f"stage{'' if len(missing) == 1 else 's'} {listed(missing)} to {what}")

    def check(self) -> None:
        delay = self._context.config.batch.delay
        assert self._opened <= self._closed + 1 + delay, f"step {self._opened} opened at {self._closed} (T-I8)"
