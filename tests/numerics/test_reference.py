"""The oracle against the pieces that volunteers and servers run, and against a textbook of its own rules."""

from __future__ import annotations

import itertools
import math
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from node.compute.fixed_parameters import FixedParameters
from node.compute.forms import p12, packed
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.reference import ReferenceStep, train_reference
from node.compute.shard import ShardWorker
from node.compute.wire import arrived
from node.compute.worker import StageWorker
from node.data.dataset import Dataset
from node.data.grammar import floor
from node.machine.numbers import clip_factor, learning_rate
from protocol.run.changes import RunChange
from protocol.run.course import Chunk, Course
from protocol.run.run import (
    BatchSection,
    ComputeSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    StagesSection,
    ValidationSection,
    WireSection,
)

SMALL = RunConfig(
    steps=12,
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=32),
    data=DataSection(source="builtin:grammar"),
    optimizer=OptimizerSection(warmup_steps=3, learning_rate=1e-2, clip_norm=0.5),
)


def small_run(delay: int, form: str = "fp32", dtype: str = "fp32", gradients: str = "fp64") -> RunConfig:
    """With activations in `q8`, which is the default, or `d4`, parameters travel in the default, too; otherwise as they
    are."""
    batch = BatchSection(microbatches=4, samples=2, delay=delay)  # type: ignore[arg-type]
    wire = WireSection(
        activations_up=form,  # type: ignore[arg-type]
        activations_down="q8" if form == "d4" else form,  # type: ignore[arg-type]
        gradients=gradients,  # type: ignore[arg-type]
        parameters="p12" if form in ("q8", "d4") else "fp32",
    )
    stages = StagesSection(back_servers=0 if form == "d4" else 1)
    compute = ComputeSection(dtype=dtype)  # type: ignore[arg-type]
    return msgspec.structs.replace(SMALL, batch=batch, wire=wire, compute=compute, stages=stages)


class Pipeline:
    """Stages of one worker and two shards each, driven as servers and volunteers drive them, without any network."""

    def __init__(self, config: RunConfig, vocabulary: int, cuts: tuple[int, ...]) -> None:
        self.config = config
        edges = [0, *cuts, config.block_count]
        self.workers = [StageWorker(config, vocabulary, *blocks) for blocks in itertools.pairwise(edges)]
        self.shards = [[ShardWorker(worker.layout, index, 2) for index in range(2)] for worker in self.workers]
        self.fixed = [
            FixedParameters(p12.fixed_bits(config), [(shard.begin, shard.end) for shard in shards])
            for shards in self.shards
        ]
        self.skipped: list[int] = []
        for shard in itertools.chain(*self.shards):
            shard.initial()

    def step(self, step: int, dataset: Dataset) -> float:
        """Runs a step whose microbatches come back in two contributions a stage; returns the mean loss."""
        version = self.config.version_of(step)
        for worker, shards, fixed in zip(self.workers, self.shards, self.fixed, strict=True):
            if self.config.wire.parameters == "p12":
                worker.set_params(version, [fixed.load(version, [self.sent(s, version) for s in shards], version)])
            else:
                worker.set_params(version, [shard.params(version) for shard in shards])
            if self.config.wire.gradients == "gi":
                worker.set_grid(
                    version, [steps for shard in shards if (steps := shard.grid_steps(version)) is not None]
                )
        half = self.config.batch.microbatches // 2
        # The halves are summed from their ends, as tasks come back in any order.
        losses = [self.microbatch(step, version, index, index // half, dataset) for index in reversed(range(2 * half))]
        reduced = []
        for worker, shards in zip(self.workers, self.shards, strict=True):
            contributions = [worker.take_gradient(into) for into in range(2)]
            for shard in shards:
                for each in contributions:
                    part = each[shard.begin : shard.end]
                    if self.config.wire.gradients == "gi":
                        shard.fold_packed(step, packed.pack(part.numpy()))
                    else:
                        shard.fold(step, part)
                reduced.append((shard, shard.reduce(step)))
        if all(finite for _, (_, _, finite) in reduced):
            factor = clip_factor([square_norm for _, (_, square_norm, _) in reduced], self.config.optimizer.clip_norm)
            for shard, (total, _, _) in reduced:
                shard.apply(step, total, step, factor)
        else:
            self.skipped.append(step)
            for shard, _ in reduced:
                shard.skip(step)
        return sum(losses) / self.config.step_tokens

    def sent(self, shard: ShardWorker, version: int) -> list[bytearray]:
        """The first version whole, the others as what changed."""
        bits = p12.fixed_bits(self.config)
        if version == 0:
            return [p12.encode(shard.params(0), None, 0, bits)]
        return [p12.encode(shard.params(version), shard.params(version - 1), version - 1, bits)]

    def microbatch(self, step: int, version: int, index: int, into: int, dataset: Dataset) -> float:
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.batch(step, index))
        x, inputs = tokens, deque[Tensor]()
        for worker in self.workers[:-1]:
            inputs.appendleft(x)
            form, base = self.config.wire.activations_up, x if len(inputs) > 1 else None
            x = arrived(worker.forward(index, version, x), base, form)
        for worker in self.workers:
            worker.begin_task(version, step, index)
        loss, dx = self.workers[-1].tail(version, x, labels, into)
        dy: Tensor | None = None
        for place, (worker, x) in enumerate(zip(self.workers[-2::-1], inputs, strict=True)):
            assert dx is not None
            dy = arrived(dx, dy, self.config.wire.activations_up)
            if (index + place) % 3 == 0:  # as if whoever did the forward had gone
                worker.drop_graph(index)
                dx = worker.recompute_backward(version, x, dy, into)
            else:
                dx = worker.backward(index, dy, into)
        return loss

    def params(self, version: int) -> Tensor:
        return torch.cat([shard.params(version) for shard in itertools.chain(*self.shards)])


def cut_at(config: RunConfig, cuts: tuple[int, ...]) -> Course:
    """A line of stages that end at these blocks."""
    edges = itertools.pairwise((0, *cuts, config.block_count))
    chunks = tuple(Chunk(*blocks, stage) for stage, blocks in enumerate(edges))
    return Course(chunks, (tuple(range(len(chunks))),))


@pytest.mark.parametrize("delay", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(("form", "gradients"), [("fp32", "fp64"), ("bf16", "gi"), ("q8", "gi"), ("d4", "gi")])
@pytest.mark.parametrize(
    "cuts", [pytest.param((4,), marks=pytest.mark.slow), (3, 6), pytest.param((1, 7), marks=pytest.mark.slow)]
)
def test_stages_and_shards_train_as_the_reference(cuts: tuple[int, ...], form: str, gradients: str, delay: int) -> None:
    """Two and three stages of two shards, with tasks regrouped and recomputed, end with the reference's exact bits,
    whatever the form in which activations, their gradients and sums of weight gradients travel."""
    config = small_run(delay, form, gradients=gradients)
    reference = train_reference(config, course=cut_at(config, cuts))
    pipeline = Pipeline(config, reference.dataset.vocabulary, cuts)
    losses = [pipeline.step(step, reference.dataset) for step in range(config.steps)]
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert torch.equal(pipeline.params(config.steps), reference.params)
    assert losses[-1] < losses[0] - 0.9 and not pipeline.skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "gradients"), [("fp32", "fp64"), ("fp32", "gi"), ("q8", "fp64"), ("q8", "gi"), ("d4", "gi")]
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_overflows_are_skipped_as_in_the_reference(
    monkeypatch: pytest.MonkeyPatch, where: str, form: str, gradients: str
) -> None:
    """One activation, or one gradient behind a loss that is finite, that overflows in one task of step 3: the step is
    skipped here and there, whatever the form, and the run goes on to the same bits."""
    config = small_run(0, form, gradients=gradients)
    dataset = Dataset(config)
    spoilt = torch.from_numpy(dataset.batch(3, 2)[0]).long()
    forward_before: Any = StageModel.forward
    backward_before: Any = StageModel.backward
    marked: list[Any] = []

    def forward(self: StageModel, params: Tensor, x: Tensor) -> tuple[Tensor, Any]:
        y, graph = forward_before(self, params, x)
        if x.shape == spoilt.shape and torch.equal(x, spoilt):
            marked.append(graph)
            if where == "forward":
                y = y.clone()
                y.view(-1)[5] = torch.inf
        return y, graph

    def backward(self: StageModel, graph: Any, dy: Tensor, gradient: Tensor | None) -> Tensor | None:
        if any(graph is each for each in marked):
            dy = dy.clone()
            dy.view(-1)[5] = torch.inf
        found: Tensor | None = backward_before(self, graph, dy, gradient)
        return found

    monkeypatch.setattr(StageModel, "forward", forward)
    if where == "backward":
        monkeypatch.setattr(StageModel, "backward", backward)
    reference = train_reference(config, 6, course=cut_at(config, (3, 6)))
    pipeline = Pipeline(config, dataset.vocabulary, (3, 6))
    losses = [pipeline.step(step, dataset) for step in range(6)]
    assert pipeline.skipped == [3] == [each.step for each in reference.steps if each.skipped]
    assert [math.isfinite(loss) for loss in losses] == [where == "backward" or step != 3 for step in range(6)]
    assert losses == pytest.approx(reference.losses, rel=1e-12, nan_ok=True)
    assert torch.equal(pipeline.params(6), reference.params) and bool(torch.isfinite(reference.params).all())


@pytest.mark.slow
def test_bf16_is_a_class_of_its_own_with_exact_bits_too() -> None:
    """Stages computed in bf16, with graphs that keep inputs only, end with the exact bits of a bf16 reference; its
    losses stay within a fiftieth of fp32's."""
    config = small_run(1, "q8", "bf16", "gi")
    reference = train_reference(config, course=cut_at(config, (4,)))
    pipeline = Pipeline(config, reference.dataset.vocabulary, (4,))
    for worker in pipeline.workers:
        worker._models[0].keeps_inputs_only = True
    losses = [pipeline.step(step, reference.dataset) for step in range(config.steps)]
    assert torch.equal(pipeline.params(config.steps), reference.params)
    assert losses == pytest.approx(train_reference(small_run(1, "q8")).losses, rel=0.02)
    assert config.config_hash() != small_run(1, "q8").config_hash()


@pytest.mark.parametrize("delay", [0, 1])
def test_reference_is_a_plain_torch_loop(delay: int) -> None:
    """Losses equal those of torch.optim.AdamW with torch's own clipping, on the weights that the delay calls for."""
    config = small_run(delay)
    reference = train_reference(config)
    layout = StageLayout.whole(config, reference.dataset.vocabulary)
    model = StageModel(layout)
    weight = layout.initial(config.seed)
    parameters = [view.requires_grad_(True) for view in layout.views(weight.clone()).values()]
    groups = [
        {"params": [each for each in parameters if each.dim() == dim], "weight_decay": decay}
        for dim, decay in ((2, config.optimizer.weight_decay), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.optimizer.beta1, config.optimizer.beta2))
    used = weight
    for step in range(config.steps):
        gradient = torch.zeros_like(weight)
        total = 0.0
        for index in range(config.batch.microbatches):
            tokens, labels = (torch.from_numpy(array).long() for array in reference.dataset.batch(step, index))
            total += model.loss(used if delay else weight, tokens, labels, 1 / config.step_tokens, gradient)[0]
        assert total / config.step_tokens == pytest.approx(reference.losses[step], rel=1e-5)
        for parameter, view in zip(parameters, layout.views(gradient).values(), strict=True):
            parameter.grad = view
        torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        used, weight = weight, torch.cat([each.detach().flatten() for each in parameters])
    # torch's kernels round elsewhere, and AdamW makes much of a rounding where the gradient is almost zero.
    assert float((weight - reference.params).norm() / weight.norm()) < 1e-4


@pytest.mark.slow
def test_reference_repeats_itself_bit_for_bit() -> None:
    """Two runs agree in every bit, the first steps do not depend on how many follow, and each step is reported."""
    config = small_run(1)
    seen: list[ReferenceStep] = []
    whole = train_reference(config, on_step=seen.append)
    again, beginning = train_reference(config), train_reference(config, 5)
    assert torch.equal(whole.params, again.params)
    assert whole.losses == again.losses and whole.losses[:5] == beginning.losses
    assert seen == whole.steps and [each.step for each in seen] == list(range(config.steps))
    other = train_reference(msgspec.structs.replace(config, seed=2), 1)
    assert other.losses != whole.losses[:1]


def test_delay_uses_the_version_before() -> None:
    """With delay 1 steps 0 and 1 both see the first weights; with delay 0 only step 0 does."""
    delayed, prompt = (train_reference(small_run(delay), 3) for delay in (1, 0))
    layout, dataset = delayed.layout, delayed.dataset
    first = StageModel(layout).evaluate
    total = sum(
        first(layout.initial(SMALL.seed), *(torch.from_numpy(each).long() for each in dataset.batch(1, index)))[0]
        for index in range(4)
    )
    assert delayed.losses[1] == pytest.approx(total / small_run(1).step_tokens, rel=1e-6)
    assert delayed.losses[0] == prompt.losses[0] and delayed.losses[1] != prompt.losses[1]


def test_a_run_goes_on_from_its_export(tmp_path: Path) -> None:
    """The exported folder is where another run can start: its first loss is the loss of the exported weights."""
    config = small_run(0)
    trained = train_reference(config)
    trained.export(tmp_path)
    model = msgspec.structs.replace(config.model, start_from=str(tmp_path))
    again = train_reference(msgspec.structs.replace(config, model=model), 1)
    assert again.losses[0] < trained.losses[0] - 1.0


@pytest.mark.slow
def test_grammar_is_learned_and_never_better_than_its_floor() -> None:
    """A small model comes down to twice the floor, and stays above it: the validation loss is a true one."""
    config = msgspec.structs.replace(
        SMALL,
        steps=600,
        model=ModelSection(layers=2, hidden=64, heads=4, kv_heads=2, feed_forward=128, context=64),
        optimizer=OptimizerSection(warmup_steps=20, learning_rate=3e-3),
        batch=BatchSection(microbatches=2, samples=8),
    )
    result = train_reference(config)
    least = floor(config.model.context)
    reached = result.validation_loss(60)
    assert least * 0.95 < reached < least * 2  # 960 samples: their mean entropy lies within 5 % of the floor
    assert result.losses[0] == pytest.approx(math.log(result.dataset.vocabulary), rel=0.05)


def test_changes_of_a_run_are_done_again_from_their_steps_on() -> None:
    """Before a change the run is as in its file; from it on as one with the new value would go on from there; and the
    shards, which are told the rate, come to the same weights."""
    config = small_run(0)
    changes = (RunChange("optimizer.learning_rate", "0.001", 3), RunChange("optimizer.clip_norm", "0.05", 5))
    plain, new = train_reference(config, 6), train_reference(config, 6, changes=changes)
    again = train_reference(config, 6, changes=changes)
    assert [step.loss for step in new.steps[:4]] == [step.loss for step in plain.steps[:4]]
    assert new.steps[4].loss != plain.steps[4].loss
    assert torch.equal(new.params, again.params) and not torch.equal(new.params, plain.params)
    only_first = train_reference(config, 6, changes=changes[:1])
    assert [step.loss for step in only_first.steps] == [step.loss for step in new.steps]
    assert not torch.equal(only_first.params, new.params)


@pytest.mark.parametrize("count", [2, 6])
def test_a_step_with_other_microbatches_is_what_a_run_that_has_them_in_its_file_does(count: int) -> None:
    """The same samples, the mean over as many tokens, the same clipping; only the unit of sums differs, so numbers do
    in their last digits."""
    asked = small_run(1)
    batch = msgspec.structs.replace(asked.batch, microbatches=count)
    written = msgspec.structs.replace(asked, batch=batch)
    changed = train_reference(asked, 4, changes=(RunChange("batch.microbatches", str(count), 0),))
    right, before = train_reference(written, 4), train_reference(asked, 4)
    assert changed.losses == pytest.approx(right.losses, rel=1e-5)
    assert [step.gradient_norm for step in changed.steps] == pytest.approx(
        [step.gradient_norm for step in right.steps], rel=1e-4
    )
    assert torch.allclose(changed.params, right.params, atol=2e-5)
    assert not torch.allclose(changed.params, before.params, atol=1e-3)


def test_the_validation_is_of_the_versions_that_the_run_names() -> None:
    """Every so many versions, the first and the last, also where one is missed because no step runs on it; the last is
    what the whole model says of the same text, and training does not notice it."""
    config = small_run(1)
    asked = msgspec.structs.replace(config, validation=ValidationSection(every_steps=5, batches=3))
    found, plain = train_reference(asked), train_reference(config)
    assert [one.version for one in found.validations] == [0, 5, 10, 12]
    assert found.validations[-1].loss == pytest.approx(found.validation_loss(3), rel=1e-6)
    assert {one.tokens for one in found.validations} == {3 * 2 * config.model.context}
    assert found.losses == plain.losses and torch.equal(found.params, plain.params) and not plain.validations
