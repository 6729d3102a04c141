"""The oracle: the same run in one process, without any of the machinery.

Whatever the machinery does, with whomever dying, must end with these weights. Each microbatch goes its route of the
course, chunk by chunk. What crosses the wire is rounded here as it is there: activations, their gradients and
parameters go through the run's forms at the cuts between chunks. Sums of weight gradients are whole numbers on the
run's grid with `gi`, else those of fp64, whatever their form. Tasks are computed on the device that volunteers have,
everything else on the processor, as there. Keep it so short that it is obviously right."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device
from node.compute.export import export_model, initial_weights
from node.compute.forms import p12
from node.compute.layout import StageLayout
from node.compute.model import StageContext, StageModel
from node.compute.optimizer import AdamWShard, partial_square_norm
from node.compute.segments import SegmentModel, Visit
from node.compute.stage_grid import StageGrid
from node.compute.wire import arrived, round_trip
from node.data.dataset import Dataset
from node.machine.numbers import clip_factor, learning_rate
from node.machine.numbers import validation_loss as validation_loss_of
from protocol.run.batches import Batches
from protocol.run.changes import RunChange, changed, in_force, laid_out_at, mixtures
from protocol.run.course import Course, course_of
from protocol.run.run import RunConfig
from protocol.run.segments import segment_ranges
from protocol.run.validation import ValidationLoss


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
    validations: list[ValidationLoss]
    """Of the versions that the run validates, oldest first."""

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
    course: Course | None = None,
    changes: Sequence[RunChange] = (),
    device: Device | None = None,
) -> ReferenceResult:
    """Trains the first `steps` steps (default: all) of the run, calling `on_step` after each.

    Step t runs on version max(0, t - delay), and its update makes version t + 1 from version t (design section 3). The
    gradient is the sum over microbatches in order of the loss sum's gradient over the tokens of the whole batch (of the
    file's; where a step has another number of microbatches, its `scale` mends that).
    `course` is what a plan from elsewhere computes; without it the one that the run's own words ask for. `changes` is
    what an operator changed while the run ran, each from its step on: a layout, too, which cuts the model anew.
    `device` is what tasks are computed on (the processor): bits are equal on the same kind of device and torch only.
    """
    torch.set_num_threads(threads)
    device = open_device(DeviceChoice("cpu")) if device is None else device
    dataset = Dataset(config) if dataset is None else dataset
    layout = StageLayout.whole(config, dataset.vocabulary)
    begun = course_of(config) if course is None else course
    course, models = begun, _models(layout, begun)
    optimizer = AdamWShard(config, layout.decay_mask)
    versions = {0: initial_weights(layout)}
    grid = StageGrid.of(layout) if config.wire.gradients == "gi" else None
    averages = torch.empty(0) if grid is None else grid.first_averages()
    steps_of = {} if grid is None else {0: grid.steps(averages)}  # by version: the grid of the gradients made on it
    reports: list[ReferenceStep] = []
    validations: list[ValidationLoss] = []
    last, batches = changed(config, changes), Batches.of(config, changes)
    steps = last.steps if steps is None else steps
    began_s = time.perf_counter()
    for step in range(steps):
        params = device.upload(_as_sent(versions[config.version_of(step)], config), models[0].dtype)
        exact = torch.zeros(params.shape, dtype=torch.float64 if grid is None else torch.int32)
        loss_sum = 0.0
        drawn_by = mixtures(changes, step)
        laid_out = laid_out_at(config, changes, step)
        now_cut = begun if laid_out.stages == config.stages else course_of(laid_out)
        if now_cut != course:
            course, models = now_cut, _models(layout, now_cut)
        for microbatch in range(batches.count(step)):
            arrays = dataset.batch(step, microbatch, drawn_by, batches.counts)
            tokens, labels = (device.upload(torch.from_numpy(array).long()) for array in arrays)
            visits = [models[chunk] for chunk in course.route(step, microbatch)]
            along = along_route if config.batch.segments == 1 else along_route_in_segments
            loss, gradients = along(config, visits, params, tokens, labels)
            loss_sum += loss
            for gradient in (each.cpu() for each in gradients):
                if grid is None:
                    exact += gradient  # in fp64, so that the order of summation does not matter
                else:
                    grid.add(exact, gradient, steps_of[config.version_of(step)], step, microbatch)
        gradient = exact.float() if grid is None else grid.value(exact, steps_of[config.version_of(step)])
        square_norm = partial_square_norm(gradient)
        skipped = not math.isfinite(square_norm)
        versions[step + 1] = versions[step].clone()
        if grid is not None:
            if not skipped:
                averages = grid.next_averages(averages, exact, steps_of[config.version_of(step)])
            steps_of[step + 1] = grid.steps(averages)
        if not skipped:
            now = changed(config, changes[: in_force(changes, step)])
            factor = batches.scale(step) * clip_factor([square_norm], now.optimizer.clip_norm, batches.scale(step))
            optimizer.apply(versions[step + 1], gradient, step, factor, learning_rate(now, step))
        validations += _validations(last, models, versions, step, dataset, device)
        for version in [each for each in versions if each < config.version_of(step + 1)]:
            del versions[version]
            steps_of.pop(version, None)
        norm = batches.scale(step) * math.sqrt(square_norm)
        reports.append(ReferenceStep(step, loss_sum / batches.tokens(step), norm, skipped))
        if on_step is not None:
            on_step(reports[-1])
    elapsed_s = time.perf_counter() - began_s
    for step in last.final_steps if steps == last.steps else ():
        validations += _validations(last, models, versions, step, dataset, device)
    speed = batches.tokens_before(steps) / elapsed_s
    return ReferenceResult(reports, speed, layout, versions[steps], dataset, validations)


def _models(layout: StageLayout, course: Course) -> list[SegmentModel]:
    """The chunks of the whole model."""
    return [SegmentModel(layout, (chunk.first_block, chunk.end_block)) for chunk in course.chunks]


def _validations(
    config: RunConfig,
    models: Sequence[StageModel],
    versions: Mapping[int, Tensor],
    step: int,
    dataset: Dataset,
    device: Device,
) -> list[ValidationLoss]:
    """What the version that a step runs on comes to, if it is validated: forwards through all chunks, as on the way."""
    if not config.validates(step):
        return []
    version = config.version_of(step)
    params = device.upload(_as_sent(versions[version], config), models[0].dtype)
    sums = []
    for index in range(config.validation.batches):
        x, labels = (device.upload(torch.from_numpy(array).long()) for array in dataset.validation_batch(index))
        for position, model in enumerate(models[:-1]):
            x = arrived(model.outputs(params, x).float(), x if position else None, config.wire.activations_up)
        sums.append(models[-1].evaluate(params, x, labels)[0])
    return [validation_loss_of(config, version, sums)]


def _as_sent(params: Tensor, config: RunConfig) -> Tensor:
    """[n] fp32: the weights that volunteers compute with when a version is `params`."""
    form = config.wire.parameters
    return p12.received(params, p12.fixed_bits(config)) if form == "p12" else round_trip(params, form)


def along_route(
    config: RunConfig, visits: Sequence[SegmentModel], params: Tensor, tokens: Tensor, labels: Tensor
) -> tuple[float, list[Tensor]]:
    """Forward, loss and backward of a microbatch: the loss sum, and weight gradients that are terms of the step's sum.

    Visits of different chunks concern different weights and share a term; but where head and embedding are tied, they
    are two tasks with gradients of one matrix, so two terms.
    """
    form = config.wire.activations_up
    x, graphs = tokens, list[StageContext]()
    for model in visits[:-1]:
        y, graph = model.forward(params, x)
        x = arrived(y.float(), x if graphs else None, form)
        graphs.append(graph)
    terms = [torch.zeros_like(params, dtype=torch.float32)]
    loss_sum, _, dx = visits[-1].loss(params, x, labels, 1.0 / config.step_tokens, terms[0])
    if graphs and config.model.tied_embeddings:
        terms.append(torch.zeros_like(params, dtype=torch.float32))
    dy: Tensor | None = None
    for model, graph in reversed(list(zip(visits[:-1], graphs, strict=True))):
        assert dx is not None, "only the first visit has no input gradient"
        dy = arrived(dx.float(), dy, form)
        dx = model.backward(graph, dy.to(model.dtype), terms[-1])
    return loss_sum, terms


def along_route_in_segments(
    config: RunConfig, visits: Sequence[SegmentModel], params: Tensor, tokens: Tensor, labels: Tensor
) -> tuple[float, list[Tensor]]:
    """The same, segment by segment: forward in order, then loss and backward in reverse order."""
    form = config.wire.activations_up
    ranges = segment_ranges(config)
    open_visits = [Visit() for _ in visits]
    for first, end in ranges:
        x = tokens[:, first:end]
        for position, (model, visit) in enumerate(zip(visits[:-1], open_visits[:-1], strict=True)):
            x = arrived(model.forward_segment(params, x, visit).float(), x if position else None, form)
        visits[-1].forward_segment(params, x, open_visits[-1])
    terms = [torch.zeros_like(params, dtype=torch.float32)]
    if len(visits) > 1 and config.model.tied_embeddings:
        terms.append(torch.zeros_like(params, dtype=torch.float32))
    loss_sum = 0.0
    for first, end in reversed(ranges):
        scale = 1.0 / config.step_tokens
        loss, _, dx = visits[-1].loss_segment(open_visits[-1], labels[:, first:end], scale, terms[0])
        loss_sum += loss
        dy: Tensor | None = None
        for model, visit in reversed(list(zip(visits[:-1], open_visits[:-1], strict=True))):
            assert dx is not None, "only the first visit has no input gradient"
            dy = arrived(dx.float(), dy, form)
            dx = model.backward_segment(visit, dy.to(model.dtype), terms[-1])
    return loss_sum, terms


def validation_loss(layout: StageLayout, params: Tensor, dataset: Dataset, batches: int) -> float:
    """Mean nats per token of whole-model weights over the first `batches` validation batches: nothing is skipped."""
    model = StageModel(layout)
    total, count = 0.0, 0
    for index in range(batches):
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.validation_batch(index))
        loss_sum, labels_seen = model.evaluate(params, tokens, labels)
        total, count = total + loss_sum, count + labels_seen
    return total / count
