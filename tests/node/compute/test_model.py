"""Tests of `node.compute.model` and `node.compute.blocks`."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from node.compute.blocks import rotary_table, rotate
from node.compute.layout import StageLayout
from node.compute.model import StageModel
from protocol.run.run import ModelSection, RunConfig, WireSection
from tests.node.compute.small import VOCABULARY, random_batch, small_run

SCALE = 1 / 96


def textbook_loss(config: RunConfig, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The same model written as plainly as possible: complex rotations, masks, loops over heads; float64."""
    model = config.model
    width, group = model.hidden // model.heads, model.heads // model.kv_heads
    samples, length = tokens.shape

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[name]

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :])
        rates = model.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    hidden = weights["model.embed_tokens.weight"][tokens]
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        x = rms(hidden, f"{prefix}.input_layernorm.weight")
        q, k, v = (x @ weights[f"{prefix}.self_attn.{kind}_proj.weight"].T for kind in "qkv")
        heads = []
        for head in range(model.heads):
            mine, shared = slice(head * width, (head + 1) * width), head // group
            theirs = slice(shared * width, (shared + 1) * width)
            scores = turned(q[..., mine]) @ turned(k[..., theirs]).transpose(1, 2) / math.sqrt(width)
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[..., theirs])
        hidden = hidden + torch.cat(heads, dim=-1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        x = rms(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate, up = (x @ weights[f"{prefix}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
    output = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = rms(hidden, "model.norm.weight") @ output.T
    return functional.cross_entropy(logits.reshape(samples * length, -1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradient_are_the_textbooks(tied: bool) -> None:
    """Loss and every weight's gradient agree with the plain model in float64."""
    config = small_run(
        model=ModelSection(
            layers=2, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=16, tied_embeddings=tied, norm_eps=1e-3
        ),
        wire=WireSection(gradient_grid_bits=0),
    )
    layout = StageLayout.whole(config, VOCABULARY)
    # Weights far from their small start, so that no term hides behind another.
    params = layout.initial(3) * 5
    gradient = torch.zeros_like(params)
    tokens, labels = random_batch(config)
    loss, count, dx = StageModel(layout).loss(params, tokens, labels, SCALE, gradient)

    leaves = {name: view.double().requires_grad_(True) for name, view in layout.views(params).items()}
    expected = textbook_loss(config, leaves, tokens, labels)
    torch.autograd.backward(expected * SCALE)
    expected = expected.detach()
    assert (count, dx) == (tokens.numel(), None)
    assert loss == pytest.approx(float(expected), rel=1e-6)
    for name, view in layout.views(gradient).items():
        wanted = leaves[name].grad
        assert wanted is not None
        assert float((view.double() - wanted).norm() / wanted.norm()) < 1e-5, name


@pytest.mark.parametrize("cuts", [(1,), (4,), (2, 5), (1, 2, 3, 4, 5, 6, 7)])
def test_stages_in_a_row_are_the_whole_model_bit_for_bit(cuts: tuple[int, ...]) -> None:
    """Loss and gradients of any partition equal the uncut model's exactly: the same kernels run in the same order."""
    config = small_run()
    tokens, labels = random_batch(config)
    whole = StageLayout.whole(config, VOCABULARY)
    expected = torch.zeros(whole.parameter_count)
    loss_expected, _, _ = StageModel(whole).loss(whole.initial(1), tokens, labels, SCALE, expected)

    edges = (0, *cuts, config.block_count)
    models = [StageModel(StageLayout(config, VOCABULARY, first, end)) for first, end in itertools.pairwise(edges)]
    gradients = [torch.zeros(model.layout.parameter_count) for model in models]
    x, contexts = tokens, []
    for model in models[:-1]:
        x, context = model.forward(model.layout.initial(1), x)
        contexts.append(context)
    last = models[-1]
    loss, _, dx = last.loss(last.layout.initial(1), x, labels, SCALE, gradients[-1])
    for model, context, gradient in reversed(list(zip(models, contexts, gradients, strict=False))):
        assert dx is not None
        dx = model.backward(context, dx, gradient)
    assert dx is None
    assert loss == loss_expected
    assert torch.equal(torch.cat(gradients), expected)


def test_equal_calls_give_equal_bits() -> None:
    """On one thread the same call twice gives the same loss and gradient, bit for bit."""
    config = RunConfig()
    layout = StageLayout.whole(config, 257)
    tokens, labels = random_batch(config)
    results = []
    for _ in range(2):
        gradient = torch.zeros(layout.parameter_count)
        results.append((StageModel(layout).loss(layout.initial(1), tokens, labels, SCALE, gradient)[0], gradient))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_gradients_add_to_what_is_there_and_weights_stay() -> None:
    """A second microbatch adds to the sum; the vector of weights is never written."""
    config = small_run()
    layout = StageLayout.whole(config, VOCABULARY)
    params, model = layout.initial(1), StageModel(layout)
    before = params.clone()
    one, two, both = (torch.zeros_like(params) for _ in range(3))
    for seed, separate in ((0, one), (1, two)):
        model.loss(params, *random_batch(config, seed), SCALE, separate)
        model.loss(params, *random_batch(config, seed), SCALE, both)
    assert torch.equal(both, one + two)
    assert torch.equal(params, before)


@pytest.mark.parametrize("bits", [0, 22, 24])
def test_sums_on_the_grid_do_not_depend_on_their_order(bits: int) -> None:
    """However ten tasks' gradients are grouped and ordered, the sum has the same bits; without the grid it has not."""
    config = small_run(wire=WireSection(gradient_grid_bits=bits))
    layout = StageLayout.whole(config, VOCABULARY)
    model, params = StageModel(layout), layout.initial(1)
    tasks = [random_batch(config, seed) for seed in range(10)]

    def summed(groups: list[list[int]]) -> Tensor:
        contributions = []
        for group in groups:
            contributions.append(torch.zeros_like(params))
            for task in group:
                model.loss(params, *tasks[task], SCALE, contributions[-1])
        return torch.stack(contributions).cumsum(0)[-1]

    in_order = summed([list(range(10))])
    others = [summed([[9, 0, 4], [1, 2, 3], [8], [7, 6, 5]]), summed([[task] for task in reversed(range(10))])]
    assert all(torch.equal(other, in_order) == (bits > 0) for other in others)
    if bits:
        assert torch.equal(in_order * 2**bits, (in_order * 2**bits).round())


def test_the_grid_moves_a_gradient_by_half_a_step_at_most() -> None:
    """Rounded and plain gradients differ by no more than half of 2^-bits, whatever their size."""
    results = []
    for bits in (0, 20):
        config = small_run(wire=WireSection(gradient_grid_bits=bits))
        layout = StageLayout.whole(config, VOCABULARY)
        results.append(torch.zeros(layout.parameter_count))
        StageModel(layout).loss(layout.initial(1), *random_batch(config), SCALE, results[-1])
    plain, rounded = results
    assert 0 < float((plain - rounded).abs().max()) <= 2**-21


def test_without_a_sum_only_the_input_gradient_is_computed() -> None:
    """Throwing weight gradients away changes neither the loss nor the input's gradient."""
    config = small_run()
    layout = StageLayout(config, VOCABULARY, 3, config.block_count)
    model, params = StageModel(layout), layout.initial(1)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(5))
    _, labels = random_batch(config)
    kept = model.loss(params, x, labels, SCALE, torch.zeros_like(params))
    thrown = model.loss(params, x, labels, SCALE, None)
    assert kept[0] == thrown[0]
    assert kept[2] is not None and thrown[2] is not None
    assert torch.equal(kept[2], thrown[2])


def test_open_graphs_do_not_disturb_each_other() -> None:
    """Two forwards of two versions may be open at once, and be pulled back in any order into any sum."""
    config = small_run()
    model = StageModel(StageLayout(config, VOCABULARY, 0, 4))
    old, new = model.layout.initial(1), model.layout.initial(2)
    tokens = [random_batch(config, seed)[0] for seed in range(2)]
    dy = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(5))
    expected = []
    for params, x in zip((old, new), tokens, strict=True):
        alone = torch.zeros_like(params)
        model.backward(model.forward(params, x)[1], dy, alone)
        expected.append(alone)
    contexts = [model.forward(params, x)[1] for params, x in zip((old, new), tokens, strict=True)]
    for index in (1, 0):
        together = torch.zeros_like(old)
        model.backward(contexts[index], dy, together)
        assert torch.equal(together, expected[index])


def test_first_loss_is_the_vocabularys_logarithm() -> None:
    """Fresh weights know nothing: the mean loss lies within 3 % of ln(vocabulary)."""
    config = RunConfig()
    layout = StageLayout.whole(config, 257)
    tokens, _ = random_batch(config)
    loss, count = StageModel(layout).evaluate(layout.initial(1), tokens, tokens.roll(-1, dims=1))
    assert loss / count == pytest.approx(math.log(257), rel=0.03)


def test_no_token_sees_the_future() -> None:
    """Changing the last token changes only the last position's scores."""
    config = small_run()
    layout = StageLayout.whole(config, VOCABULARY)
    model, params = StageModel(layout), layout.initial(1)
    tokens, _ = random_batch(config)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    one, two = model.logits(params, tokens), model.logits(params, changed)
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


def test_rotation_depends_on_distance_alone() -> None:
    """The product of a query and a key depends on how far apart they stand, not on where."""
    model = ModelSection(hidden=32, heads=2)
    rotary = rotary_table(model, 12, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 16, generator=generator).expand(2, 1, 1, 12, 16)
    products = rotate(query, rotary)[0, 0] @ rotate(key, rotary)[0, 0].T
    for distance in range(12):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
