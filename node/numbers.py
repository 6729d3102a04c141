"""Numbers of a step that the machines and torch's side must agree on to the last bit. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from protocol.run import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """The rate of the update that `step` makes: linear warm-up from peak / warm-up, then decay to the last step."""
    section = config.optimizer
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return section.learning_rate
    # The first step after the warm-up has the peak, the last one `final_ratio` of it.
    span = max(1, config.steps - 1 - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / span)
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if section.decay == "cosine" else 1.0 - progress
    return section.learning_rate * (section.final_ratio + (1.0 - section.final_ratio) * left)


def global_norm(square_norms: Iterable[float]) -> float:
    """The norm of a gradient whose shards have these square norms; exact in the sum, so their order does not matter."""
    return math.sqrt(math.fsum(square_norms))


def clip_factor(square_norms: Iterable[float], clip_norm: float) -> float:
    """What the gradient is multiplied by, so that its global norm is at most `clip_norm`; 0 switches clipping off.

    Pascanu et al., arXiv:1211.5063. All shards of all stages must be given: the norm is the whole gradient's.
    """
    total = global_norm(square_norms)
    return clip_norm / total if 0.0 < clip_norm < total else 1.0
