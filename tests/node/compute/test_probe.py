"""Tests of `node.compute.probe`: what it counts; how fast the machine is, no test asserts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from node.compute import probe as probe_module
from node.compute.devices.device import RESERVE_SHARE, SmallDevice
from node.compute.layout import StageLayout
from node.compute.memory import stage_memory
from node.compute.model import StageModel
from node.compute.probe import FEW_TOKENS, flops_per_token, probe
from node.compute.probe_process import answer
from node.visit.device_facts import Question
from protocol.run.run import RunConfig
from tests.node.compute.small import VOCABULARY, random_batch, small_run

CONFIG = small_run()


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied: bool) -> None:
    """The planner's rule gives what torch's own counter sees in the matrix products; attention is on top."""
    config = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, tied_embeddings=tied))
    layout = StageLayout.whole(config, VOCABULARY)
    params = layout.initial(1)
    tokens, labels = random_batch(config)
    with FlopCounterMode(display=False) as counter:
        StageModel(layout).loss(params, tokens, labels, 1.0, torch.zeros_like(params))
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 12 * config.model.layers * config.model.context * config.model.hidden
    assert tokens.numel() * (flops_per_token(layout) - attention) == products


@pytest.mark.parametrize(("first", "end"), [(0, 3), (3, 4), (5, 8), (0, 8)])
def test_any_stage_can_be_measured(first: int, end: int) -> None:
    """Every kind of stage gives positive figures that agree with each other, in the time asked for."""
    found = probe(CONFIG, VOCABULARY, first, end, budget_s=0.01)
    assert found.microbatch_s > 0 and found.memory_free_bytes > 0
    tokens = CONFIG.batch.samples * CONFIG.model.context
    assert found.tokens_per_s == pytest.approx(tokens / found.microbatch_s)
    per_token = flops_per_token(StageLayout(CONFIG, VOCABULARY, first, end))
    assert found.flops_per_s == pytest.approx(per_token * found.tokens_per_s)


def test_without_a_range_a_layer_is_measured() -> None:
    """A machine that has no stage yet measures one layer, and so does the smallest model."""
    one_layer = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, layers=1))
    for config in (CONFIG, one_layer):
        assert probe(config, VOCABULARY, budget_s=0.01).tokens_per_s > 0


@pytest.mark.parametrize(("seconds", "whole"), [(0.001, True), (4.0, False)])
def test_a_stage_that_would_take_long_is_measured_by_a_few_tokens(
    seconds: float, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A middle stage of 1.1 B parameters takes one core a minute and a half for a microbatch; two of them were more
    than a newcomer waits, and it could not join."""
    asked = []

    def best_s(layout: StageLayout, *_: object, **__: object) -> float:
        tokens = layout.config.batch.samples * layout.config.model.context
        asked.append(tokens)
        return seconds * tokens / FEW_TOKENS

    monkeypatch.setattr("node.compute.probe._best_s", best_s)
    large = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, context=16 * FEW_TOKENS))
    found = probe(large, VOCABULARY)
    tokens = large.batch.samples * large.model.context
    assert asked == ([FEW_TOKENS, tokens] if whole else [FEW_TOKENS])
    assert found.microbatch_s == pytest.approx(seconds * tokens / FEW_TOKENS)
    assert found.tokens_per_s == pytest.approx(FEW_TOKENS / seconds)


def room(graphs: float, light: bool = False) -> int:
    """A device on which a middle stage of one layer has room for so many graphs."""
    memory = stage_memory(StageLayout(CONFIG, VOCABULARY, 1, 3))
    each = memory.light_graph_bytes if light else memory.graph_bytes
    return int((memory.fixed_bytes(light) + graphs * each) / (1 - RESERVE_SHARE)) + 64


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (SmallDevice(1 << 30), [("few", False), ("whole", False)]),
        (SmallDevice(room(1.5, light=True)), [("few", True), ("whole", True)]),
        (SmallDevice(room(0.5, light=True)), [("few", True)]),
        (SmallDevice(1 << 30, cap_bytes=room(0.5, light=True)), [("few", True)]),
        (SmallDevice(1 << 30, fail_claims=(3,)), [("few", False), ("whole", False), ("whole", True)]),
        (SmallDevice(1 << 30, fail_claims=(3, 4)), [("few", False), ("whole", False), ("whole", True)]),
    ],
    ids=["all", "inputs only", "no graph", "no graph below the cap", "less than counted", "far less than counted"],
)
def test_a_device_is_measured_with_what_has_room_there(
    device: SmallDevice, expected: list[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the stage will keep its graphs there, and by a few tokens where no microbatch has room. (Whole graphs were
    tried on every card, and whoever had too little memory for those could not join.)"""
    measured, real = [], probe_module._best_s

    def best_s(layout: StageLayout, params: Any, device: Any, budget_s: float, light: bool) -> float:
        measured.append(("few" if layout.config.batch.samples == 1 else "whole", light))
        return real(layout, params, device, budget_s, light)

    monkeypatch.setattr(probe_module, "_best_s", best_s)
    assert probe(CONFIG, VOCABULARY, 1, 3, device=device, budget_s=0.0).tokens_per_s > 0
    assert measured == expected and device.used_bytes() == 0


def question(device: str, config: RunConfig = CONFIG) -> Question:
    return Question(config, VOCABULARY, 1, device, True)


def test_a_device_without_room_for_a_few_tokens_is_refused_in_words() -> None:
    """One sentence that names the device and what can be done; the cap is the owner's own word."""
    model = msgspec.structs.replace(CONFIG.model, hidden=512, feed_forward=1024)
    large = msgspec.structs.replace(CONFIG, model=model)
    assert "--device small:1: a small device for trying, 1 MB" in answer(question("small:1", large)).problem
    facts = answer(msgspec.structs.replace(question("small:64", large), cap_bytes=1e6))
    assert "has no room for a stage of this run" in facts.problem and "gpu-memory" in facts.problem
    assert not answer(question("small:64", large)).problem


def test_a_device_whose_driver_fails_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's first sentence. (The owner read the command of a process that had ended with status 1.)"""

    def fails(*_: object, **__: object) -> float:
        raise RuntimeError("CUDA error: unspecified launch failure\nCompile with `TORCH_USE_CUDA_DSA`.")

    monkeypatch.setattr(probe_module, "_best_s", fails)
    problem = answer(question("small:64")).problem
    assert problem == "--device small:64: it cannot be used: CUDA error: unspecified launch failure"
