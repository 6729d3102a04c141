"""The oracle against the pieces that volunteers and servers run, and against a textbook of its own rules."""

from __future__ import annotations

import itertools
import math
from collections import deque
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.reference import ReferenceStep, train_reference
from node.compute.shard import ShardWorker
from node.compute.worker import StageWorker
from node.data.dataset import Dataset
from node.data.grammar import floor
from node.numbers import clip_factor, learning_rate
from protocol.run import BatchSection, DataSection, ModelSection, OptimizerSection, RunConfig

SMALL = RunConfig(
    steps=12,
    model=ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=32),
    data=DataSection(source="builtin:grammar"),
    optimizer=OptimizerSection(warmup_steps=3, learning_rate=1e-2, clip_norm=0.5),
)


def small_run(delay: int) -> RunConfig:
    batch = BatchSection(microbatches=4, samples=2, delay=delay)  # type: ignore[arg-type]
    return msgspec.structs.replace(SMALL, batch=batch)


class Pipeline:
    """Stages of one worker and two shards each, driven as servers and volunteers drive them, without any network."""

    def __init__(self, config: RunConfig, vocabulary: int, cuts: tuple[int, ...]) -> None:
        self.config = config
        edges = [0, *cuts, config.block_count]
        self.workers = [StageWorker(config, vocabulary, *blocks) for blocks in itertools.pairwise(edges)]
        self.shards = [[ShardWorker(worker.layout, index, 2) for index in range(2)] for worker in self.workers]
        for shard in itertools.chain(*self.shards):
            shard.initial()

    def step(self, step: int, dataset: Dataset) -> float:
        """Runs a step whose microbatches come back in two contributions a stage; returns the mean loss."""
        version = self.config.version_of(step)
        for worker, shards in zip(self.workers, self.shards, strict=True):
            worker.set_params(version, [shard.params(version) for shard in shards])
        half = self.config.batch.microbatches // 2
        # The halves are summed from their ends, as tasks come back in any order.
        losses = [self.microbatch(step, version, index, index // half, dataset) for index in reversed(range(2 * half))]
        reduced = []
        for worker, shards in zip(self.workers, self.shards, strict=True):
            contributions = [worker.take_gradient(into) for into in range(2)]
            for shard in shards:
                reduced.append((shard, shard.reduce([each[shard.begin : shard.end] for each in contributions])))
        factor = clip_factor([square_norm for _, (_, square_norm, _) in reduced], self.config.optimizer.clip_norm)
        for shard, (total, _, finite) in reduced:
            assert finite
            shard.apply(step, total, step, factor)
        return sum(losses) / self.config.step_tokens

    def microbatch(self, step: int, version: int, index: int, into: int, dataset: Dataset) -> float:
        tokens, labels = (torch.from_numpy(array).long() for array in dataset.batch(step, index))
        x, inputs = tokens, deque[Tensor]()
        for worker in self.workers[:-1]:
            inputs.appendleft(x)
            x = worker.forward(index, version, x)
        loss, dx = self.workers[-1].tail(version, x, labels, into)
        for place, (worker, x) in enumerate(zip(self.workers[-2::-1], inputs, strict=True)):
            assert dx is not None
            if (index + place) % 3 == 0:  # as if whoever did the forward had gone
                worker.drop_graph(index)
                dx = worker.recompute_backward(version, x, dx, into)
            else:
                dx = worker.backward(index, dx, into)
        return loss

    def params(self, version: int) -> Tensor:
        return torch.cat([shard.params(version) for shard in itertools.chain(*self.shards)])


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("cuts", [(4,), (3, 6), (1, 7)])
def test_stages_and_shards_train_as_the_reference(cuts: tuple[int, ...], delay: int) -> None:
    """Two and three stages of two shards, with tasks regrouped and recomputed, end with the reference's exact bits."""
    config = small_run(delay)
    reference = train_reference(config)
    pipeline = Pipeline(config, reference.dataset.vocabulary, cuts)
    losses = [pipeline.step(step, reference.dataset) for step in range(config.steps)]
    assert losses == pytest.approx(reference.losses, rel=1e-12)
    assert torch.equal(pipeline.params(config.steps), reference.params)
    assert losses[-1] < losses[0] - 1.0


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
