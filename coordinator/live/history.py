"""What the run has reported: closed steps, in order, each durable before it is acknowledged; and the data's facts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from coordinator.live.outbox import Outbox
from coordinator.live.records import TAIL_STEPS, HistoryEnded, StepRow, StoredState
from protocol.base.ids import NodeId
from protocol.messages import Share, StepReport, StepReportStored, ValidationLoss
from protocol.run.batches import Batches
from protocol.run.run import RunConfig

LOSS_MAX = 700.0
"""Nats whose exponential is still a number."""


def first_step_after(restore_step: int) -> int:
    """The first step that a run works on after going back to a checkpoint (-1: the seed).

    A checkpoint's number is that of the version in it, which is what its steps 0 to number - 1 have made.
    """
    return max(0, restore_step)


def perplexity(loss: float) -> float:
    """Of a loss in nats a token: among how many tokens the model is as unsure as if they were equally likely."""
    return math.exp(loss) if not loss >= LOSS_MAX else math.inf


class History:
    """Closed steps of the present ledger generation, with the steps before it that still count."""

    def __init__(self, config: RunConfig, stored: StoredState, outbox: Outbox) -> None:
        self.tail: deque[StepRow] = deque(stored.steps, maxlen=TAIL_STEPS)
        """The newest rows that count, oldest first."""
        self.newest_step = self.tail[-1].step if self.tail else -1
        """The newest closed step that is durable here and not thrown away; -1: none."""
        self.validations: deque[ValidationLoss] = deque(stored.validations, maxlen=TAIL_STEPS)
        """The newest that count, oldest first."""
        self.tokens = stored.tokens
        """Tokens of all steps up to it."""
        self.rollback_count = stored.rollback_count
        self.lost_steps = stored.lost_steps
        self.batches = Batches.of(config)
        """The run as it is now, and how many microbatches each step has."""
        self._outbox = outbox
        self.on_going_back: Callable[[int], None] = lambda first_step: None
        """Called when steps from this one on are thrown away."""
        self._accepted = self.newest_step
        """The newest step that was sent to the disk."""
        self._gap_asked = -1
        self._thrown = {row.step: row for row in stored.thrown}
        """The newest row of each step thrown away: it counts again if a checkpoint with its step becomes readable."""
        self._ended = stored.ended
        """The run went back to its last checkpoint, and nobody has the reports that are missing up to it."""
        self._ending = False
        """That is on its way to the disk."""

    @property
    def config(self) -> RunConfig:
        """The run as it is now."""
        return self.batches.now

    @property
    def finished(self) -> bool:
        """Whether the run's last step is stored, or its report is lost for good while a checkpoint has the step."""
        return self.newest_step >= self.config.steps - 1 or self._ended

    def end(self, ledger_generation: int) -> HistoryEnded | None:
        """What to write when the decider of a run that went back to its last checkpoint has no report left to make;
        None while one is on its way, or when nothing is missing."""
        if self.finished or self._ending or self._accepted != self.newest_step:
            return None
        self._ending = True
        first = self.newest_step + 1
        self._outbox.log("warning", "step reports missing", first=first, last=self.config.steps - 1)
        return HistoryEnded(ledger_generation=ledger_generation, first_missing=first)

    def ended(self, still: bool) -> None:
        """The end without the missing reports is durable; `still`: and the run does not go back once more."""
        self._ended, self._ending = still, False

    def newest_of(self, ledger_generation: int) -> int:
        """The newest closed step of these ledgers; -1 when they have closed none."""
        if self.tail and self.tail[-1].ledger_generation == ledger_generation:
            return self.newest_step
        return -1

    def lost_by(self, restore_step: int) -> int:
        """Closed steps that going back to a checkpoint throws away, those on their way to the disk included."""
        return max(0, self._accepted + 1 - first_step_after(restore_step))

    def go_back(self, restore_step: int, lost_steps: int) -> None:
        """Forgets the steps after a checkpoint; they will be reported again. `lost_steps` were closed, reported or not.

        The checkpoint may also lie ahead of the history: one that could not be read when the run went back the time
        before. The steps that made it count again.
        """
        first = first_step_after(restore_step)
        self.on_going_back(first)
        lost = self.lost_by(restore_step)
        last, delay = self.config.steps - 1, self.config.batch.delay
        kept = [found for found in self.validations if min(found.version + delay, last) < first]
        self.validations = deque(kept, maxlen=TAIL_STEPS)
        while self.tail and self.tail[-1].step >= first:
            row = self.tail.pop()
            self.tokens -= row.tokens
            self._thrown[row.step] = row
        remaining = self.newest_step - lost
        if not self.tail and remaining >= 0:  # farther back than the rows in memory
            self.tokens = self.batches.tokens_before(remaining + 1)
        for step in range(remaining + 1, first):
            again = self._thrown.pop(step, None)
            if again is not None:
                self.tail.append(again)
                self.validations.extend(again.validations)
                self.tokens += again.tokens
                remaining = step
        for step in sorted(self._thrown)[:-TAIL_STEPS]:
            del self._thrown[step]
        self.newest_step = self._accepted = remaining
        self.rollback_count += 1
        self.lost_steps += lost_steps
        self._gap_asked = -1

    def take(self, peer: NodeId, report: StepReport, wall_s: float, shares: tuple[Share, ...] = ()) -> StepRow | None:
        """The row to store for a decider's report; None when it was answered here. `shares`: of members alone.

        A report beyond the next one means that some were lost on the way: the answer names the newest that is stored,
        and the decider repeats what it has. If the same one comes again it has no older, and the gap is logged.
        """
        if report.step <= self.newest_step:
            self._outbox.send(peer, StepReportStored(step=self.newest_step))
            return None
        if report.step <= self._accepted:
            return None  # on its way to the disk; the answer follows
        if report.step > self._accepted + 1 and (self._gap_asked < 0 or report.step > self._gap_asked):
            if self._gap_asked < 0:
                self._gap_asked = report.step
                self._outbox.send(peer, StepReportStored(step=self.newest_step))
            return None  # those behind the gap come again with it
        if report.step > self._accepted + 1:
            missing = (self._accepted + 1, report.step - 1)
            self._outbox.log("warning", "step reports missing", first=missing[0], last=missing[1])
        self._accepted = report.step
        self._gap_asked = -1
        return StepRow(
            ledger_generation=report.ledger_generation,
            step=report.step,
            loss=report.loss,
            tokens=report.tokens,
            gradient_norm=report.gradient_norm,
            clip_factor=report.clip_factor,
            skipped=report.skipped,
            learning_rate=report.learning_rate,
            duration_s=report.duration_s,
            wall_s=round(wall_s, 3),
            shares=shares,
            changes=report.changes,
            validations=report.validations,
        )

    def store(self, row: StepRow) -> None:
        """The row is durable."""
        run = self.config.name
        self.tail.append(row)
        self.newest_step = row.step
        self.tokens += row.tokens
        for found in row.validations:
            self._validated(found)
        self._outbox.count("barnraise_run_tokens_total", row.tokens, run=run)
        self._outbox.count("barnraise_run_step_duration_seconds", row.duration_s, run=run)
        if row.skipped:
            self._outbox.count("barnraise_run_bad_steps_total", run=run, reason="skipped")
        self._outbox.log(
            "info", "step", step=row.step, done=f"{row.step + 1} of {self.config.steps}", loss=row.loss,
            tokens=row.tokens, skipped=row.skipped, learning_rate=row.learning_rate,
            gradient_norm=row.gradient_norm, duration_s=row.duration_s,
        )  # fmt: skip

    def _validated(self, found: ValidationLoss) -> None:
        self.validations.append(found)
        self._outbox.log(
            "info", "validation", version=found.version, loss=found.loss, perplexity=perplexity(found.loss),
            tokens=found.tokens,
        )  # fmt: skip

    def check(self) -> None:
        """Raises if an invariant is broken."""
        steps = [row.step for row in self.tail]
        assert steps == sorted(set(steps)), "steps stored out of order"
        assert not steps or steps[-1] == self.newest_step
        assert self.newest_step <= self._accepted
        assert self.tokens >= 0
