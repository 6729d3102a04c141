"""Whether the end of a step follows from what its stages came to: every server computes it again, and believes nobody.

The decider tells with its decision what each stage came to, and each ledger with its seal what each shard did. So who
would clip, skip or speed up a step against the arithmetic must say a number that somebody else has said otherwise: a
stage knows its own, and ledgers tell theirs to each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.machine.jobs import Apply
from node.machine.numbers import clip_factor, learning_rate
from node.machine.records import StepCommitted
from node.server.context import StageContext
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.messages import Commit, Decision, StageFrozen, StageSum
from protocol.run.changes import changed
from protocol.run.run import RunConfig

NEAR = 1e-9
"""Relative: cosines and sums of other builds of Python differ by their last bits."""
ALERT = "decision"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a step ends."""

    clip_factor: float
    skipped: bool
    learning_rate: float


def sum_of(message: StageFrozen) -> StageSum:
    return StageSum(message.square_norm, message.finite, message.loss_sum)


def is_finite(stages: Sequence[StageSum]) -> bool:
    """Plain sums: of what a volunteer may say (inf and -inf, or two huge numbers) `fsum` would raise."""
    total, loss_sum = sum(stage.square_norm for stage in stages), sum(stage.loss_sum for stage in stages)
    return all(stage.finite for stage in stages) and math.isfinite(total) and math.isfinite(loss_sum)


def ending(as_changed: RunConfig, step: int, stages: Sequence[StageSum], scale: float) -> Ending:
    """What follows from the sums of all stages; the run with what was changed in it up to this step."""
    finite = is_finite(stages)
    norms = [stage.square_norm for stage in stages]
    factor = clip_factor(norms, as_changed.optimizer.clip_norm, scale) if finite else 0.0
    return Ending(factor, not finite, learning_rate(as_changed, step))


def apply_job(context: StageContext, end: Commit | StepCommitted) -> Apply:
    """The update of a shard, by how its step ended."""
    scale = context.batches.scale(end.step)
    return Apply(end.step, end.clip_factor, end.skipped, end.learning_rate, scale)


class Judge:
    """Checks each decision and each seal that comes to one server."""

    def __init__(self, context: StageContext) -> None:
        self._context = context

    def check(self, message: Decision | Commit, stages: Mapping[int, StageSum], norms: Mapping[int, float]) -> None:
        """Raises `RemoteProtocolError`, and alerts, where it does not follow.

        Args:
            stages: what this server knows from others than the sender, by stage.
            norms: the same of the shards' square norms.
        """
        why = self._why_not(message, stages, norms)
        if why:
            who = "stage 0's decision on" if isinstance(message, Decision) else "the ledger's seal of"
            self._context.alerts[ALERT] = f"{who} step {message.step + 1} is refused: {why}"
            raise RemoteProtocolError("unexpected", why)
        self._context.alerts.pop(ALERT, None)
        # The coordinator may have told others first, or have no link to this server: the run does not wait for that.
        # But whoever decides by a change that nobody ordered says so to all.
        if unheard := message.changes[len(self._context.plan.changes) :]:
            keys = ", ".join(change.key for change in unheard)
            self._context.alerts[ALERT] = f"step {message.step + 1} counts a change that was not told here: {keys}"

    def _why_not(self, message: Decision | Commit, stages: Mapping[int, StageSum], norms: Mapping[int, float]) -> str:
        context = self._context
        said = message.stages
        if len(said) != len(context.plan.stages):
            return f"it tells what {len(said)} of {len(context.plan.stages)} stages came to"
        for number, known in stages.items():
            if not same_sum(said[number], known):
                return f"it says that stage {number} came to {_words(said[number])}, which says {_words(known)}"
        if isinstance(message, Commit):
            if len(message.norms) != len(context.stage_servers):
                return f"it tells what {len(message.norms)} of {len(context.stage_servers)} servers came to"
            for shard, norm in norms.items():
                if not _same(message.norms[shard], norm):
                    return f"it says that shard {shard} came to {message.norms[shard]:.9g}, where it is {norm:.9g}"
            if not _same(sum(message.norms), said[context.stage].square_norm):
                return "its servers do not come to what it says of the stage"
        for ordered, counted in zip(context.plan.changes, message.changes, strict=False):
            if (ordered.key, ordered.value) != (counted.key, counted.value):
                return f"it counts {counted.key} = {counted.value}, where {ordered.key} = {ordered.value} was ordered"
        try:
            as_changed = changed(context.written, message.changes)
        except BadInputError as error:
            return str(error)
        end = ending(as_changed, message.step, said, context.batches.scale(message.step))
        for what, told, right in (
            ("clip factor", message.clip_factor, end.clip_factor),
            ("learning rate", message.learning_rate, end.learning_rate),
        ):
            if not _same(told, right):
                return f"a {what} of {told:.9g}, where {right:.9g} follows"
        if message.skipped != end.skipped:
            return "a step that counts is skipped" if message.skipped else "a step that is not finite counts"
        return ""


def same_sum(one: StageSum, other: StageSum) -> bool:
    return (
        _same(one.square_norm, other.square_norm) and one.finite == other.finite and _same(one.loss_sum, other.loss_sum)
    )


def _same(one: float, other: float) -> bool:
    """NaN is NaN: a run that diverges says it everywhere."""
    return one == other or (one != one and other != other) or math.isclose(one, other, rel_tol=NEAR)


def _words(stage: StageSum) -> str:
    return f"norm {math.sqrt(max(stage.square_norm, 0.0)):.9g}, loss {stage.loss_sum:.9g}"
