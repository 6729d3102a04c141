"""Tests of `node.compute.split_backward`: I and then W are one backward, to the last bit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from node.compute.devices.device import SmallDevice
from node.compute.layout import StageLayout
from node.compute.memory import stage_memory
from node.compute.model import DTYPES, StageModel
from node.compute.worker import StageWorker
from protocol.run.run import ComputeSection
from tests.node.compute.small import VOCABULARY, random_batch, small_run


def model_of(blocks: tuple[int, int], dtype: str) -> StageModel:
    config = small_run(compute=ComputeSection(dtype=dtype, split_backward=True))  # type: ignore[arg-type]
    return StageModel(StageLayout(config, VOCABULARY, *blocks))


def hidden(model: StageModel, seed: int) -> torch.Tensor:
    """[samples, context, hidden] of random values."""
    config = model.layout.config
    shape = (config.batch.samples, config.model.context, config.model.hidden)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.dtype)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("blocks", [(1, 2), (2, 3), (1, 4), (2, 7)])
def test_input_first_and_weights_later_give_the_bits_of_one_backward(blocks: tuple[int, int], dtype: str) -> None:
    """In both numerics, for attention, feed-forward and several of both; W may come after other tasks' work."""
    model = model_of(blocks, dtype)
    params = model.layout.initial(1).to(model.dtype)
    whole, parts = (torch.zeros(model.layout.parameter_count) for _ in range(2))
    dx = model.backward(model.forward(params, hidden(model, 1))[1], hidden(model, 2), whole)
    first, owed = model.input_gradient(model.forward(params, hidden(model, 1))[1], hidden(model, 2))
    other = model.forward(params, hidden(model, 3))[1]
    model.backward(other, hidden(model, 4), torch.zeros_like(parts))
    assert not parts.any()
    model.weight_gradients(owed, parts)
    assert dx is not None and torch.equal(first, dx)
    assert whole.any() and torch.equal(parts, whole)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("first_block", [3, 6, 7])
def test_a_route_end_splits_into_the_same_bits(first_block: int, dtype: str) -> None:
    """Loss, input gradient and all weights, also of a chunk that is the head alone."""
    model = model_of((first_block, 8), dtype)
    params, x = model.layout.initial(1).to(model.dtype), hidden(model, 1)
    _, labels = random_batch(model.layout.config)
    whole, parts = (torch.zeros(model.layout.parameter_count) for _ in range(2))
    loss, _, dx = model.loss(params, x, labels, 0.01, whole)
    loss_of_parts, first, owed = model.loss_input_gradient(params, x, labels, 0.01)
    model.weight_gradients(owed, parts)
    assert dx is not None and (loss_of_parts, True) == (loss, torch.equal(first, dx))
    assert whole.any() and torch.equal(parts, whole)


def test_the_input_gradient_computes_no_gradient_of_a_matrix() -> None:
    """What others wait for takes the products that lead to it and no more: half of a backward's."""
    model = model_of((1, 3), "fp32")
    params = model.layout.initial(1)
    counts = []
    for split in (False, True):
        _, context = model.forward(params, hidden(model, 1))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if split:
                model.input_gradient(context, hidden(model, 2))
            else:
                model.backward(context, hidden(model, 2), torch.zeros(model.layout.parameter_count))
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::mm"))
    assert counts == [8, 4]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("blocks", [(1, 2), (2, 3), (1, 3), (3, 7)])
def test_what_is_owed_takes_what_is_counted(blocks: tuple[int, int], dtype: str) -> None:
    """A graph, and beside it what I has written down for W: to the byte."""
    model = model_of(blocks, dtype)
    _, context = model.forward(model.layout.initial(0).to(model.dtype), hidden(model, 1))
    dy = hidden(model, 2)
    _, owed = model.input_gradient(context, dy)
    assert owed.matrices is not None
    storages = {into.untyped_storage().data_ptr(): into.untyped_storage().nbytes() for into in owed.matrices.noted}
    whole = msgspec.structs.replace(model.layout.config, compute=ComputeSection(dtype=dtype))  # type: ignore[arg-type]
    without = stage_memory(StageLayout(whole, VOCABULARY, *blocks))
    assert sum(storages.values()) == stage_memory(model.layout).graph_bytes - without.graph_bytes


@pytest.mark.parametrize("room", ["whole graphs", "inputs only"])
def test_a_worker_splits_where_there_is_room_and_changes_no_bit(room: str) -> None:
    """Kept graph, recomputation and route end: dx at once, sums when finished. A device without memory for whole graphs
    does all at once, and finishing is nothing; whatever was claimed is given back."""
    config = small_run(compute=ComputeSection(split_backward=True))
    layout = StageLayout(config, VOCABULARY, 3, 8)
    memory = stage_memory(layout)
    size = 1 << 30 if room == "whole graphs" else int((memory.fixed_bytes() + 1.5 * memory.graph_bytes) / 0.9) + 1
    device = SmallDevice(size)
    middle = StageWorker(config, VOCABULARY, 3, 8, device=device)
    middle.set_params(0, [layout.initial(1)])
    claims = dict(middle._claims)
    x = hidden(StageModel(layout), 1)
    _, labels = random_batch(config)
    loss, expected = middle.tail(0, x, labels, "whole")
    split_loss, dx = middle.tail_input(0, x, labels, "parts", "task")
    assert expected is not None and dx is not None and torch.equal(dx, expected) and split_loss == loss
    middle.finish("task", "parts")
    assert torch.equal(middle.take_gradient("parts"), middle.take_gradient("whole"))
    middle.tail_input(0, x, labels, "parts", "dropped")
    middle.drop_graph("dropped")
    assert middle._claims == claims
    front = StageWorker(config, VOCABULARY, 1, 3, device=SmallDevice(size))
    front.set_params(0, [front.layout.initial(1)])
    front.forward("a", 0, x), front.forward("b", 0, x)
    whole = front.backward("a", dx, "whole")
    kept, again = front.backward_input("b", dx, "parts", "b'"), front.recompute_backward_input(0, x, dx, "again", "c'")
    assert whole is not None and kept is not None and again is not None
    assert torch.equal(kept, whole) and torch.equal(again, whole)
    front.finish("b'", "parts")
    front.finish("c'", "again")
    sums = [front.take_gradient(name) for name in ("whole", "parts", "again")]
    assert sums[0].any() and torch.equal(sums[1], sums[0]) and torch.equal(sums[2], sums[0])
