"""From a model's arithmetic to the costs that a partition wants: seconds and bytes per sub-layer block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.planning.partition.costs import BlockCost
from protocol.base.errors import BadInputError
from protocol.run.model_spec import BlockSpec, ModelSpec, blocks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRules:
    """How a run computes and holds its blocks.

    Attributes:
        flops_per_s: of a node of speed 1, as reached on this model; measured.
        tokens: of one microbatch, all samples together.
        recompute: blocks keep their input only and run their forward again before the backward. The head is never
            recomputed: its backward follows at once.
        value_bytes: of one activation value.
        parameter_bytes: held per parameter: 4 for fp32 weights, 8 with gradients, 16 with AdamW's two moments.
    """

    flops_per_s: float
    tokens: int
    recompute: bool = False
    value_bytes: int = 4
    parameter_bytes: int = 8

    def __post_init__(self) -> None:
        for key in ("flops_per_s", "tokens", "value_bytes", "parameter_bytes"):
            if not 0 < getattr(self, key) < float("inf"):
                raise BadInputError(f"{key}: {getattr(self, key)} is not a finite number above 0")


def block_costs(spec: ModelSpec, rules: CostRules) -> list[BlockCost]:
    """The costs of every block of `spec`, in order, for one microbatch on a node of speed 1."""
    return [_block_cost(block, spec, rules) for block in blocks_of(spec)]


def _block_cost(block: BlockSpec, spec: ModelSpec, rules: CostRules) -> BlockCost:
    recomputed = rules.recompute and block.kind != "head"
    backward_flops = block.backward_flops + (block.forward_flops if recomputed else 0)
    kept_values = min(block.kept_values, spec.boundary_values) if recomputed else block.kept_values
    return BlockCost(
        forward_s=block.forward_flops * rules.tokens / rules.flops_per_s,
        backward_s=backward_flops * rules.tokens / rules.flops_per_s,
        parameter_bytes=float(block.parameters * rules.parameter_bytes),
        activation_bytes=float(kept_values * rules.tokens * rules.value_bytes),
    )


def measured_costs(
    forward_s: Sequence[float], backward_s: Sequence[float], arithmetic: Sequence[BlockCost]
) -> list[BlockCost]:
    """The arithmetic's bytes with measured durations; every list has one entry per block.

    Raises `BadInputError` naming the list whose length is wrong.
    """
    for key, values in (("forward_s", forward_s), ("backward_s", backward_s)):
        if len(values) != len(arithmetic):
            raise BadInputError(f"{key}: {len(arithmetic)} values wanted, got {len(values)}")
    return [
        BlockCost(f, b, block.parameter_bytes, block.activation_bytes)
        for f, b, block in zip(forward_s, backward_s, arithmetic, strict=True)
    ]
