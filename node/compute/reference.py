"""The oracle: the same run in one process, without any of the machinery.

Whatever the machinery does, with whomever dying, must end with these weights (fp32 tolerance; wire forms other than
fp32 round more). Keep it so short that it is obviously right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.compute.export import export_model, initial_weights
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.optimizer import AdamWShard, partial_square_norm
from node.data.dataset import Dataset
from node.numbers import clip_factor
from protocol.run import RunConfig


@dataclass(frozen=True)
class ReferenceStep:
    """What a step reports."""

    step: int
    loss: float
    """Mean nats per token over the step's batch."""
    gradient_norm: float
    """Before clipping."""
    skipped: bool
    """The gradient was not finite: weights and moments stay."""


@dataclass(frozen=True)
class ReferenceResult:
    """What a run leaves behind."""

    steps: list[ReferenceStep]
    tokens_per_second: float
    """Training alone: reading the data is not counted."""
    layout: StageLayout
    params: Tensor
    """The newest version's weights [layout.parameter_count]."""
    dataset: Dataset

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def validation_loss(self, batches: int) -> float:
        """Mean nats per token over the first `batches` batches that were kept aside."""
        return validation_loss(self.layout, self.params, self.dataset, batches)

    def export(self, folder: Path) -> None:
        """Writes the trained model as a Hugging Face folder."""
        export_model(folder, [(self.layout, self.params)], self.dataset.tokenizer)


def train_reference(
    config: RunConfig,
    steps: int | None = None,
    on_step: Callable[[ReferenceStep], None] | None = None,
    dataset: Dataset | None = None,
    threads: int = 1,
) -> ReferenceResult:
    """Trains the first `steps` steps (default: all) of the run, calling `on_step` after each.

    Step t runs on version max(0, t - delay), and its update makes version t + 1 from version t (design section 3). The
    gradient is the sum over microbatches in order of the loss sum's gradient over the tokens of the whole batch.
    """
    torch.set_num_threads(threads)
    dataset = Dataset(config) if dataset is None else dataset
    layout = StageLayout.whole(config, dataset.vocabulary)
    model = StageModel(layout)
    optimizer = AdamWShard(config, layout.decay_mask)
    versions = {0: initial_weights(layout)}
    reports: list[ReferenceStep] = []
    steps = config.steps if steps is None else steps
    began_s = time.perf_counter()
    for step in range(steps):
        params = versions[config.version_of(step)]
        exact = torch.zeros_like(params, dtype=torch.float64)  # so that the order of summation does not matter
        loss_sum = 0.0
        for microbatch in range(config.batch.microbatches):
            tokens, labels = (torch.from_numpy(array).long() for array in dataset.batch(step, microbatch))
            gradient = torch.zeros_like(params)
            loss_sum += model.loss(params, tokens, labels, 1.0 / config.step_tokens, gradient)[0]
            exact += gradient
        gradient = exact.float()
        square_norm = partial_square_norm(gradient)
        skipped = not math.isfinite(square_norm)
        versions[step + 1] = versions[step].clone()
        if not skipped:
            optimizer.apply(versions[step + 1], gradient, step, clip_factor([square_norm], config.optimizer.clip_norm))
        for version in [each for each in versions if each < config.version_of(step + 1)]:
            del versions[version]
        reports.append(ReferenceStep(step, loss_sum / config.step_tokens, math.sqrt(square_norm), skipped))
        if on_step is not None:
            on_step(reports[-1])
    elapsed_s = time.perf_counter() - began_s
    return ReferenceResult(reports, steps * config.step_tokens / elapsed_s, layout, versions[steps], dataset)


def validation_loss(layout: StageLayout, params: Tensor, dataset: Dataset, batches: int) -> float:
    """Mean nats per token of whole-model weights over the first `batches` validation batches."""
    model = StageModel(layout)
    total, count = 0.0, 0
    for index in range(batches):
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.validation_batch(index))
        loss_sum, labels_seen = model.evaluate(params, tokens, labels)
        total, count = total + loss_sum, count + labels_seen
    return total / count
