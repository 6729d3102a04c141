"""Tests of `node.compute.worker`."""

from __future__ import annotations

import pytest
import torch

from node.compute.devices.device import Device, SmallDevice
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.stage_grid import StageGrid
from node.compute.worker import StageWorker
from protocol.run.run import WireSection
from tests.node.compute.small import VOCABULARY, random_batch, small_run

CONFIG = small_run()
CUT = 4


def worker(first: int, end: int) -> StageWorker:
    """A worker of a stage that holds version 0, put together from three shards."""
    made = StageWorker(CONFIG, VOCABULARY, first, end)
    flat = made.layout.initial(CONFIG.seed)
    edges = [made.layout.shard_range(index, 3) for index in range(3)]
    made.set_params(0, [flat[begin:finish].clone() for begin, finish in edges])
    return made


def test_two_workers_do_what_one_model_does() -> None:
    """Forward, tail and backward over two workers give the whole model's loss and gradient, bit for bit."""
    tokens, labels = random_batch(CONFIG)
    front, back = worker(0, CUT), worker(CUT, CONFIG.block_count)
    y = front.forward("task", 0, tokens)
    loss, dx = back.tail(0, y, labels, into=1)
    assert dx is not None
    assert front.backward("task", dx, into=1) is None
    layout = StageLayout.whole(CONFIG, VOCABULARY)
    expected = torch.zeros(layout.parameter_count)
    scale = 1.0 / CONFIG.step_tokens
    expected_loss, _, _ = StageModel(layout).loss(layout.initial(CONFIG.seed), tokens, labels, scale, expected)
    assert loss == expected_loss
    assert torch.equal(torch.cat([front.take_gradient(1), back.take_gradient(1)]), expected)


def test_recomputing_gives_the_same_bits() -> None:
    """Whoever did not do the forward gets the same gradients as whoever kept the graph."""
    middle = worker(2, 5)
    generator = torch.Generator().manual_seed(3)
    x, dy = torch.randn(2, 2, 16, 32, generator=generator)
    middle.forward("task", 0, x)
    kept = middle.backward("task", dy, into="kept")
    again = middle.recompute_backward(0, x, dy, into="again")
    assert kept is not None and again is not None
    assert torch.equal(kept, again)
    assert torch.equal(middle.take_gradient("kept"), middle.take_gradient("again"))


def test_graphs_end_with_their_backward_and_outlive_their_version() -> None:
    """A graph is used once, can be dropped, and does not need its version to be kept."""
    front = worker(0, CUT)
    tokens, _ = random_batch(CONFIG)
    dy = torch.ones(2, 16, 32)
    front.forward("a", 0, tokens)
    front.forward("b", 0, tokens)
    front.drop_params(0)
    with pytest.raises(KeyError):
        front.forward("c", 0, tokens)
    front.backward("a", dy, into=1)
    front.drop_graph("b")
    assert not front.has_graph("a") and not front.has_graph("b")
    with pytest.raises(KeyError):
        front.backward("a", dy, into=1)


def test_sums_are_kept_apart_and_forgotten_when_taken() -> None:
    """Each sum holds what was added to it; None throws away; a taken or dropped sum begins anew at zero."""
    front = worker(0, CUT)
    tokens, _ = random_batch(CONFIG)
    dy = torch.ones(2, 16, 32)
    for into in (1, 2, 2, None, 3):
        front.recompute_backward(0, tokens, dy, into)
    front.drop_gradient(3)
    once, twice = front.take_gradient(1), front.take_gradient(2)
    assert once.any()
    torch.testing.assert_close(twice, 2 * once)
    for into in (1, 2, 3):
        assert not front.take_gradient(into).any()


def test_shards_that_do_not_fill_the_stage_are_refused() -> None:
    """A version is only taken whole."""
    made = worker(0, CUT)
    with pytest.raises(ValueError, match="shards hold"):
        made.set_params(1, [torch.zeros(made.layout.parameter_count - 1)])
    with pytest.raises(KeyError):
        made.forward("a", 1, random_batch(CONFIG)[0])


def test_keys_that_are_made_beside_a_backward_are_those_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device the hash's keys are made by another thread meanwhile. Also when a task fails after they were ordered,
    and when the same task is done in another order, the sum is the processor's."""
    config = small_run(wire=WireSection(gradients="gi"))
    generator = torch.Generator().manual_seed(3)
    x, *gradients = torch.randn(3, 2, 16, 32, generator=generator)
    made = []
    for device in (Device(torch.device("cpu")), SmallDevice(1 << 28)):
        middle = StageWorker(config, VOCABULARY, 2, 5, device=device)
        grid = StageGrid.of(middle.layout)
        middle.set_params(0, [middle.layout.initial(config.seed)])
        middle.set_grid(0, [grid.steps(grid.first_averages())])
        for microbatch in (1, 0) if device.is_accelerator else (0, 1):
            middle.forward(microbatch, 0, x)
            middle.begin_task(0, 4, microbatch)
            if device.is_accelerator:
                with monkeypatch.context() as patch:
                    patch.setattr(StageModel, "backward", lambda *_: torch.empty(0).item())
                    with pytest.raises(RuntimeError):
                        middle.backward(microbatch, gradients[microbatch], "sum")
                middle.forward(microbatch, 0, x)
                middle.begin_task(0, 4, microbatch)
            middle.backward(microbatch, gradients[microbatch], "sum")
        made.append(middle.take_gradient("sum"))
        middle.close()
    assert made[0].any() and torch.equal(*made)
