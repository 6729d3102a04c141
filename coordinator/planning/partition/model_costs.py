"""From a model's arithmetic to the costs that a partition wants: seconds and bytes per sub-layer block."""

from __future__ import annotations

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
