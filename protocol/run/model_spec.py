"""A model's arithmetic: what each sub-layer block has to compute, to hold and to send. No tensors, no torch.

The unit of partition is the sub-layer block (AutoPipe, Fig. 3): embedding, attention half, feed-forward
half, head. Two families are known: LLaMA (RMSNorm, rotary positions, grouped-query attention, SwiGLU, no
biases; Touvron et al. 2023) and GPT-2 (LayerNorm, learned positions, GELU, biases, tied embeddings; Radford
et al. 2019).

Operations are counted as multiply and add apart, matrix products only: a product of [m, k] and [k, n] costs
2 m k n (Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", appendix).
Norms, activations and the embedding's look-up are two orders smaller and count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.base.errors import BadInputError
from protocol.run.run import ModelSection

BlockKind = Literal["embedding", "attention", "feed_forward", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a decoder-only transformer.

    Attributes:
        family: `llama` or `gpt2`; decides norms, biases, positions and the kind of feed-forward.
        layers: transformer layers, two sub-layer blocks each.
        hidden: width of the residual stream.
        heads, kv_heads: query heads, and key and value heads (grouped queries); `kv_heads` divides `heads`, which
            divides `hidden`.
        feed_forward: inner width of the feed-forward half.
        vocabulary: rows of the embedding.
        context: tokens of one sample.
        tied_embeddings: the head uses the embedding's matrix and has none of its own.
    """

    family: Literal["llama", "gpt2"] = "llama"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "kv_heads", "feed_forward", "vocabulary", "context"):
            if getattr(self, key) < 1:
                raise BadInputError(f"{key}: {getattr(self, key)} is not at least 1")
        if self.hidden % self.heads:
            raise BadInputError("hidden: must be a multiple of heads")
        if self.heads % self.kv_heads:
            raise BadInputError("kv_heads: must divide heads")

    @classmethod
    def of_run(cls, model: ModelSection, vocabulary: int) -> ModelSpec:
        """The model of a run; the vocabulary comes from its tokenizer."""
        return cls(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            feed_forward=model.feed_forward,
            vocabulary=vocabulary,
            context=model.context,
            tied_embeddings=model.tied_embeddings,
        )

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of all heads together."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def boundary_values(self) -> int:
        """Values per token that travel between two stages, wherever the cut is: the residual stream."""
        return self.hidden

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        return sum(block.parameters for block in blocks_of(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """One sub-layer block.

    Attributes:
        kind: what it is.
        parameters: weights that only this block holds.
        forward_flops: per token, at the model's context length.
        backward_flops: per token: gradients of inputs and of weights, each a product as large as the
        forward's.
        kept_values: values per token that stand from forward to backward when nothing is recomputed; attention is
            computed in tiles (FlashAttention), so its scores are not among them.
    """

    kind: BlockKind
    parameters: int
    forward_flops: int
    backward_flops: int
    kept_values: int


def blocks_of(spec: ModelSpec) -> list[BlockSpec]:
    """The model's sub-layer blocks in order: embedding, two per layer, head; 2 · layers + 2 of them."""
    layer = [_attention(spec), _feed_forward(spec)]
    return [_embedding(spec), *(layer * spec.layers), _head(spec)]


def _norm(spec: ModelSpec) -> int:
    """Parameters of one norm: a gain, and a shift in LayerNorm."""
    return spec.hidden * (2 if spec.family == "gpt2" else 1)


def _embedding(spec: ModelSpec) -> BlockSpec:
    positions = spec.context * spec.hidden if spec.family == "gpt2" else 0
    return BlockSpec(
        kind="embedding",
        parameters=spec.vocabulary * spec.hidden + positions,
        forward_flops=0,
        backward_flops=0,
        kept_values=1,  # the token
    )


def _attention(spec: ModelSpec) -> BlockSpec:
    h, kv = spec.hidden, spec.kv_width
    matrices = 2 * h * h + 2 * h * kv  # queries and output; keys and values
    biases = 2 * h + 2 * kv if spec.family == "gpt2" else 0
    # Scores and their product with the values, over the whole context: 2 · 2 · context · hidden. A causal
    # kernel may skip half; the convention of the literature counts all.
    forward = 2 * matrices + 4 * spec.context * h
    # Input of the norm, its output, queries, keys, values, the heads' output, and a log-sum per head.
    kept = 4 * h + 2 * kv + spec.heads
    return BlockSpec(
        kind="attention",
        parameters=matrices + biases + _norm(spec),
        forward_flops=forward,
        backward_flops=2 * forward,
        kept_values=kept,
    )


def _feed_forward(spec: ModelSpec) -> BlockSpec:
    h, inner = spec.hidden, spec.feed_forward
    if spec.family == "gpt2":
        matrices, biases = 2 * h * inner, inner + h
        kept = 2 * h + 2 * inner  # norm in and out, before and after GELU
    else:
        matrices, biases = 3 * h * inner, 0
        kept = 2 * h + 4 * inner  # norm in and out, gate, its SiLU, up, their product
    return BlockSpec(
        kind="feed_forward",
        parameters=matrices + biases + _norm(spec),
        forward_flops=2 * matrices,
        backward_flops=4 * matrices,
        kept_values=kept,
    )


def _head(spec: ModelSpec) -> BlockSpec:
    matrix = spec.hidden * spec.vocabulary
    return BlockSpec(
        kind="head",
        parameters=_norm(spec) + (0 if spec.tied_embeddings else matrix),
        forward_flops=2 * matrix,
        backward_flops=4 * matrix,
        kept_values=2 * spec.hidden + spec.vocabulary,  # norm in and out, the probabilities
    )
