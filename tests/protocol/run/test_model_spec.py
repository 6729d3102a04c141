"""The arithmetic of known models: parameter counts that everybody can look up, operations by hand."""

from __future__ import annotations

import pytest

from protocol.base.errors import BadInputError
from protocol.run.model_spec import ModelSpec, blocks_of
from protocol.run.run import ModelSection

GPT2_MEDIUM = ModelSpec(
    family="gpt2",
    layers=24,
    hidden=1024,
    heads=16,
    kv_heads=16,
    feed_forward=4096,
    vocabulary=50257,
    context=1024,
    tied_embeddings=True,
)
LLAMA_7B = ModelSpec(layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008, vocabulary=32000, context=2048)
TINYLLAMA = ModelSpec(layers=22, hidden=2048, heads=32, kv_heads=4, feed_forward=5632, vocabulary=32000, context=2048)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [(GPT2_MEDIUM, 354_823_168), (LLAMA_7B, 6_738_415_616), (TINYLLAMA, 1_100_048_384)],
    ids=["gpt2-medium", "llama-7b", "tinyllama-1.1b"],
)
def test_parameter_counts_are_the_published_ones(spec: ModelSpec, parameters: int) -> None:
    """Biases, learned positions, grouped queries and tied embeddings all count as they should."""
    assert spec.parameters == parameters


def test_blocks_stand_in_order() -> None:
    """Embedding, attention and feed-forward half of each layer, head; as many as a run says it has."""
    section = ModelSection(layers=3)
    kinds = [block.kind for block in blocks_of(ModelSpec.of_run(section, vocabulary=259))]
    assert kinds == ["embedding", *(["attention", "feed_forward"] * 3), "head"]


def test_operations_by_hand() -> None:
    """Each product costs twice its weights; attention adds 4 · context · hidden for scores."""
    spec = ModelSpec(layers=1, hidden=4, heads=2, kv_heads=1, feed_forward=5, vocabulary=7, context=3)
    embedding, attention, feed_forward, head = blocks_of(spec)
    assert embedding.forward_flops == 0
    assert attention.parameters == 16 + 8 + 8 + 16 + 4
    assert attention.forward_flops == 2 * 48 + 4 * 3 * 4
    assert feed_forward.parameters == 3 * 20 + 4
    assert feed_forward.forward_flops == 2 * 60
    assert head.forward_flops == 2 * 28
    assert all(block.backward_flops == 2 * block.forward_flops for block in blocks_of(spec))
    assert attention.kept_values == 4 * 4 + 2 * 2 + 2
    assert feed_forward.kept_values == 2 * 4 + 4 * 5


@pytest.mark.parametrize(
    ("change", "key"),
    [({"layers": 0}, "layers"), ({"hidden": 6}, "hidden"), ({"kv_heads": 3}, "kv_heads")],
)
def test_sizes_that_cannot_be_are_refused_by_name(change: dict[str, int], key: str) -> None:
    """The sentence begins with the key."""

    def small(layers: int = 1, hidden: int = 8, kv_heads: int = 2) -> ModelSpec:
        return ModelSpec(
            layers=layers, hidden=hidden, heads=4, kv_heads=kv_heads, feed_forward=5, vocabulary=7, context=3
        )

    assert small().heads == 4
    with pytest.raises(BadInputError, match=f"^{key}: "):
        small(**change)
