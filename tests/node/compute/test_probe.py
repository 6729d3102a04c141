"""Tests of `node.compute.probe`: what it counts; how fast the machine is, no test asserts."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from node.compute.layout import StageLayout
from node.compute.model import StageModel
from node.compute.probe import FEW_TOKENS, flops_per_token, probe
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

    def best_s(layout: StageLayout, *_: object) -> float:
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
