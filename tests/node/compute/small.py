"""A model so small that a test is over at once, and random batches for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from protocol.run.run import BatchSection, ModelSection, OptimizerSection, RunConfig, WireSection

VOCABULARY = 37


def small_run(**sections: Any) -> RunConfig:
    """Three layers of width 32; sections given replace the small ones."""
    values: dict[str, Any] = {
        "steps": 40,
        "model": ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=16),
        "optimizer": OptimizerSection(warmup_steps=4, learning_rate=1e-2),
        "batch": BatchSection(microbatches=3, samples=2, delay=1),
        "wire": WireSection(gradients="fp64"),
    }
    return RunConfig(**(values | sections))


def random_batch(config: RunConfig, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a microbatch, int64 [samples, context]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, config.batch.samples, config.model.context)
    tokens, labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    return tokens, labels
