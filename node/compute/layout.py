"""Where each weight lies: a stage is one flat fp32 vector, cut into named slices.

A run's model is a row of *sub-layer blocks*: embedding, then for each layer its attention half and its feed-forward
half, then the head (final norm and output matrix). A stage holds a range of blocks. Shards cut the stage's vector into
equal ranges without regard to slices, because the optimizer works element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from protocol.run import ModelSection, RunConfig

INITIAL_DEVIATION = 0.02
"""Standard deviation of the first weights (GPT-2, LLaMA); outputs into the residual stream start smaller."""


@dataclass(frozen=True)
class Slice:
    """One weight: its name in Hugging Face's terms, its shape, and where it begins in the stage's vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    deviation: float
    """Standard deviation of its first values; 0 means that they are all one (a norm's gain)."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.count

    @property
    def decays(self) -> bool:
        """Weight decay acts on matrices, not on the gains of norms."""
        return len(self.shape) > 1


def shard_range(parameter_count: int, shard_index: int, shard_count: int) -> tuple[int, int]:
    """The half-open range of a stage's vector that a shard holds; ranges differ by at most one element."""
    if not 0 <= shard_index < shard_count:
        raise ValueError(f"shard {shard_index} of {shard_count}")
    return parameter_count * shard_index // shard_count, parameter_count * (shard_index + 1) // shard_count


class StageLayout:
    """The slices of blocks `first_block` to `end_block` (exclusive) of a run's model."""

    def __init__(self, config: RunConfig, vocabulary: int, first_block: int, end_block: int) -> None:
        if not 0 <= first_block < end_block <= config.block_count:
            raise ValueError(f"blocks {first_block} to {end_block} of {config.block_count}")
        if vocabulary < 1:
            raise ValueError(f"vocabulary of {vocabulary}")
        self.config = config
        self.vocabulary = vocabulary
        self.first_block = first_block
        self.end_block = end_block
        if config.model.tied_embeddings and self.has_embedding != self.has_head:
            raise ValueError("tied embeddings: embedding and head belong on one stage")
        self.blocks: tuple[tuple[Slice, ...], ...] = tuple(self._place_blocks())
        self.slices: tuple[Slice, ...] = tuple(part for block in self.blocks for part in block)
        self.parameter_count = self.slices[-1].end if self.slices else 0

    @classmethod
    def whole(cls, config: RunConfig, vocabulary: int) -> StageLayout:
        """The layout of the whole model as one stage."""
        return cls(config, vocabulary, 0, config.block_count)

    @property
    def has_embedding(self) -> bool:
        """Whether the stage takes tokens instead of hidden states."""
        return self.first_block == 0

    @property
    def has_head(self) -> bool:
        """Whether the stage ends in the loss instead of hidden states."""
        return self.end_block == self.config.block_count

    @cached_property
    def decay_mask(self) -> torch.Tensor:
        """[parameter_count] bool: true where weight decay acts."""
        mask = torch.zeros(self.parameter_count, dtype=torch.bool)
        for part in self.slices:
            mask[part.offset : part.end] = part.decays
        return mask

    def initial(self, seed: int) -> torch.Tensor:
        """[parameter_count] fp32: the weights of version 0.

        A block's values depend on the seed and the block alone, so every partition of the model starts alike. They come
        from NumPy's frozen legacy stream, which gives the same numbers in every NumPy version and on every machine.
        """
        flat = torch.empty(self.parameter_count)
        for block, parts in enumerate(self.blocks, start=self.first_block):
            stream = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, block])))
            for part in parts:
                if part.deviation == 0.0:
                    flat[part.offset : part.end] = 1.0
                else:
                    values = stream.standard_normal(part.count) * part.deviation
                    flat[part.offset : part.end] = torch.from_numpy(values.astype(np.float32))
        return flat

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Each slice of `flat` by name, in its shape; no copies."""
        return {part.name: flat[part.offset : part.end].view(part.shape) for part in self.slices}

    def _place_blocks(self) -> Iterator[tuple[Slice, ...]]:
        offset = 0
        for block in range(self.first_block, self.end_block):
            parts = []
            for name, shape, deviation in block_weights(self.config.model, self.vocabulary, block):
                parts.append(Slice(name, shape, offset, deviation))
                offset = parts[-1].end
            yield tuple(parts)


def block_weights(model: ModelSection, vocabulary: int, block: int) -> list[tuple[str, tuple[int, ...], float]]:
    """(name, shape, first deviation) of a block's weights, in the order in which they lie in the vector.

    Query, key and value lie side by side, and so do gate and up: the model multiplies by each group at once.
    """
    hidden, deviation = model.hidden, INITIAL_DEVIATION
    into_residual = deviation / math.sqrt(2 * model.layers)
    if block == 0:
        return [("model.embed_tokens.weight", (vocabulary, hidden), deviation)]
    if block == 2 * model.layers + 1:
        norm = ("model.norm.weight", (hidden,), 0.0)
        return [norm] if model.tied_embeddings else [norm, ("lm_head.weight", (vocabulary, hidden), deviation)]
    prefix = f"model.layers.{(block - 1) // 2}"
    if block % 2 == 1:
        kv_width = hidden // model.heads * model.kv_heads
        return [
            (f"{prefix}.input_layernorm.weight", (hidden,), 0.0),
            (f"{prefix}.self_attn.q_proj.weight", (hidden, hidden), deviation),
            (f"{prefix}.self_attn.k_proj.weight", (kv_width, hidden), deviation),
            (f"{prefix}.self_attn.v_proj.weight", (kv_width, hidden), deviation),
            (f"{prefix}.self_attn.o_proj.weight", (hidden, hidden), into_residual),
        ]
    return [
        (f"{prefix}.post_attention_layernorm.weight", (hidden,), 0.0),
        (f"{prefix}.mlp.gate_proj.weight", (model.feed_forward, hidden), deviation),
        (f"{prefix}.mlp.up_proj.weight", (model.feed_forward, hidden), deviation),
        (f"{prefix}.mlp.down_proj.weight", (hidden, model.feed_forward), into_residual),
    ]
