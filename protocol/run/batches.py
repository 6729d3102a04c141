"""How many microbatches each step of a run has: what its file says, and what an operator has made of that since.

A step has the number that held when it was opened, however late somebody asks. So nobody takes it from the run as it
is now (`protocol.run.changes.running`), which would give the steps before a change the number of those behind it.
Samples are numbered through: a step begins with the first that no step before it has, whatever their numbers were, so
none is used twice and none is left out.

The gradient of a microbatch always has the unit that the file gives it, one over the tokens of a step *of the file*:
who computes it need not know what the step has, and one of any step is as large as one of another. What a step's sum
is multiplied with to be the mean over its own tokens is its `scale`; the servers apply it with the clip factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.run.changes import RunChange, counts_of, running
from protocol.run.course import VALIDATION_FIRST
from protocol.run.run import RunConfig


@dataclass(frozen=True, slots=True)
class Batches:
    """Made anew whenever the run is changed: that reads the whole run again (milliseconds)."""

    now: RunConfig
    """The run as it is now, of which everything is right but the number of microbatches."""
    unit: int
    """Microbatches of a step as the file has it."""
    counts: tuple[tuple[int, int], ...]
    """(first step, microbatches from there on), rising; the first is step 0."""

    @classmethod
    def of(cls, written: RunConfig, changes: Sequence[RunChange] = ()) -> Batches:
        """`written`: the run as its file has it."""
        return cls(running(written, changes), written.batch.microbatches, counts_of(written, changes))

    def count(self, step: int) -> int:
        """Microbatches that a step trains on, if it trains."""
        return next(count for first, count in reversed(self.counts) if first <= max(0, step))

    def tokens(self, step: int) -> int:
        """Tokens that a step trains on: every label counts."""
        return self.count(step) * self.now.batch.samples * self.now.model.context

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""
        return self.samples(step)[0] * self.now.model.context

    def samples(self, step: int) -> tuple[int, int]:
        """The samples of a step by number in the data's order: the first, and one past the last."""
        microbatches = 0
        ends = [first for first, _ in self.counts[1:]]
        for (first, count), end in zip(self.counts, [*ends, step], strict=True):
            microbatches += max(0, min(end, step) - first) * count
        each = self.now.batch.samples
        return microbatches * each, (microbatches + self.count(step)) * each

    def scale(self, step: int) -> float:
        """What the sum of a step's gradients is multiplied with; 1 while nothing is changed."""
        return self.unit / self.count(step)

    def microbatches_of(self, step: int) -> tuple[int, ...]:
        """The microbatches of a step by number: those that it trains on, then those of the validation."""
        training = range(self.count(step)) if step < self.now.steps else range(0)
        aside = self.now.validation.batches * self.now.validates(step)
        return (*training, *range(VALIDATION_FIRST, VALIDATION_FIRST + aside))

    def has(self, step: int, microbatch: int) -> bool:
        """Whether the step has a microbatch with this number."""
        if microbatch >= VALIDATION_FIRST:
            return microbatch - VALIDATION_FIRST < self.now.validation.batches and self.now.validates(step)
        return 0 <= step < self.now.steps and 0 <= microbatch < self.count(step)
