"""Where each weight lies: a stage is one flat fp32 vector, cut into named slices.

A run's model is a row of *sub-layer blocks*: embedding, then for each layer its attention half and its feed-forward
half, then the head (final norm and output matrix). A stage holds one or more ranges of blocks (chunks), one after the
other. Shards cut the stage's vector into ranges of about equal size without regard to slices, because the optimizer
works element by element; but 256 elements of a sub-layer block that share a step of the gradient's grid
(`node.compute.stage_grid`) stay together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from protocol.base.forms import GRID_BLOCK
from protocol.run.run import ModelSection, RunConfig

if TYPE_CHECKING:  # sizes are asked for where nobody computes, and torch takes seconds to load
    import torch

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


class StageLayout:
    """The slices of blocks `first_block` to `end_block` (exclusive) of a run's model, and of `further` such chunks."""

    def __init__(
        self,
        config: RunConfig,
        vocabulary: int,
        first_block: int,
        end_block: int,
        further: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.chunks = ((first_block, end_block), *further)
        for first, end in self.chunks:
            if not 0 <= first < end <= config.block_count:
                raise ValueError(f"blocks {first} to {end} of {config.block_count}")
        if vocabulary < 1:
            raise ValueError(f"vocabulary of {vocabulary}")
        self.config = config
        self.vocabulary = vocabulary
        if config.model.tied_embeddings and self.has_embedding != self.has_head:
            raise ValueError("tied embeddings: embedding and head belong on one stage")
        self.blocks: dict[int, tuple[Slice, ...]] = dict(self._place_blocks())
        """By number of the block, in the order of the vector."""
        self.slices: tuple[Slice, ...] = tuple(part for parts in self.blocks.values() for part in parts)
        self.parameter_count = self.slices[-1].end if self.slices else 0

    @classmethod
    def whole(cls, config: RunConfig, vocabulary: int) -> StageLayout:
        """The layout of the whole model as one stage."""
        return cls(config, vocabulary, 0, config.block_count)

    @property
    def has_embedding(self) -> bool:
        """Whether the stage takes tokens."""
        return any(first == 0 for first, _ in self.chunks)

    @property
    def has_head(self) -> bool:
        """Whether the loss is computed in the stage."""
        return any(end == self.config.block_count for _, end in self.chunks)

    def shard_range(self, shard_index: int, shard_count: int) -> tuple[int, int]:
        """The half-open range of the stage's vector that a shard holds: equal ones but for a grid block.

        Raises:
            ValueError: there is no such shard, or nothing is left for it.
        """
        if not 0 <= shard_index < shard_count:
            raise ValueError(f"shard {shard_index} of {shard_count}")
        begin, end = self._grid_edge(shard_index, shard_count), self._grid_edge(shard_index + 1, shard_count)
        if begin == end:
            raise ValueError(f"a stage of {self.parameter_count} weights is too small for {shard_count} shards")
        return begin, end

    def _grid_edge(self, shard_index: int, shard_count: int) -> int:
        wanted = self.parameter_count * shard_index // shard_count
        for _, begin, end in self.block_ranges():
            if wanted < end:
                return begin + (wanted - begin) // GRID_BLOCK * GRID_BLOCK
        return self.parameter_count

    def block_ranges(self) -> Iterator[tuple[int, int, int]]:
        """(number, begin, end) of each sub-layer block, as they lie in the vector."""
        for number, parts in self.blocks.items():
            if parts:
                yield number, parts[0].offset, parts[-1].end

    @cached_property
    def decay_mask(self) -> torch.Tensor:
        """[parameter_count] bool: true where weight decay acts."""
        import torch

        mask = torch.zeros(self.parameter_count, dtype=torch.bool)
        for part in self.slices:
            mask[part.offset : part.end] = part.decays
        return mask

    def initial(self, seed: int) -> torch.Tensor:
        """[parameter_count] fp32: the weights of version 0.

        A block's values depend on the seed and the block alone, so every partition of the model starts alike. They come
        from NumPy's frozen legacy stream, which gives the same numbers in every NumPy version and on every machine.
        """
        import torch

        flat = torch.empty(self.parameter_count)
        for block, parts in self.blocks.items():
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

    def _place_blocks(self) -> Iterator[tuple[int, tuple[Slice, ...]]]:
        offset = 0
        for block in (block for first, end in self.chunks for block in range(first, end)):
            parts = []
            for name, shape, deviation in block_weights(self.config.model, self.vocabulary, block):
                parts.append(Slice(name, shape, offset, deviation))
                offset = parts[-1].end
            yield block, tuple(parts)


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
