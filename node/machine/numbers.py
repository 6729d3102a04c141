"""Small arithmetic that the machines and torch's side must agree on to the last bit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from protocol.base.ids import TaskId
from protocol.run.run import RunConfig
from protocol.run.validation import ValidationLoss

NORM_FLOOR = 1e-6
"""Added to the norm before dividing, as torch's `clip_grad_norm_` does."""


def clip_factor(square_norms: list[float], clip_norm: float, scale: float = 1.0) -> float:
    """What every gradient is multiplied with so that the global norm is at most `clip_norm` (0: never clipped).

    The square norms are those of the stages, in their order, of sums that have still to be multiplied with `scale`.
    """
    if clip_norm <= 0:
        return 1.0
    return min(1.0, clip_norm / (scale * math.sqrt(math.fsum(square_norms)) + NORM_FLOOR))


def same_losses(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether both are the same numbers. NaN is the same as NaN: a contribution of a run that diverges repeats it."""
    return len(one) == len(other) and all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))


def task_count(tasks: Sequence[TaskId]) -> int:
    """Microbatches that went through a stage, there and back: what credit counts. The loss at a route's end is part of
    its backward."""
    return sum(task.op == "B" for task in tasks)


def validation_loss(config: RunConfig, version: int, loss_sums: Iterable[float]) -> ValidationLoss:
    """What a version comes to, of the loss sums of all microbatches of the validation, whatever their order."""
    tokens = config.validation.batches * config.batch.samples * config.model.context
    sums = list(loss_sums)
    total = math.fsum(sums) if all(map(math.isfinite, sums)) and sum(sums) < math.inf else math.inf
    return ValidationLoss(version=version, loss=total / tokens, tokens=tokens)


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of the update that step `step` (from 0) makes: linear warm-up, then decay to `final_ratio`."""
    optimizer = config.optimizer
    if step < optimizer.warmup_steps:
        return optimizer.learning_rate * (step + 1) / optimizer.warmup_steps
    if optimizer.decay == "constant":
        return optimizer.learning_rate
    # The first step after the warm-up has the peak, the last step `final_ratio` of it.
    span = max(1, config.steps - 1 - optimizer.warmup_steps)
    progress = min(1.0, (step - optimizer.warmup_steps) / span)
    if optimizer.decay == "wsd":
        falling = max(1, round(optimizer.decay_share * config.steps))
        share = max(0.0, min(1.0, (config.steps - 1 - step) / falling))
    elif optimizer.decay == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return optimizer.learning_rate * (optimizer.final_ratio + (1.0 - optimizer.final_ratio) * share)
