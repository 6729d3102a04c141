"""What sub-layer blocks cost and what stages can bear: the input of a partition, and sums over block
ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf, isfinite

from protocol.base.errors import BadInputError

#: More are refused: layers of the deepest models, and stages that anybody could fill.
BLOCKS_MAX = 2050
STAGES_MAX = 256
#: Ranges of blocks over all stages: the search keeps a bound for each (about 100 bytes, a microsecond).
RANGES_MAX = 2_000_000
#: Stages times microbatches: one evaluation of that many takes a sixth of a second.
STEPS_MAX = 500_000


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One sub-layer block on a node of speed 1, for one microbatch; measured, or from `model_costs`.

    Attributes:
        forward_s, backward_s: durations; a recomputed forward counts as backward.
        parameter_bytes: held once: weights, and whatever the node keeps beside them (gradients, optimizer).
        activation_bytes: held from forward to backward, once for every microbatch in flight.
    """

    forward_s: float
    backward_s: float
    parameter_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StagePower:
    """What one stage's node can do.

    Attributes:
        speed: its operations last 1/speed of the blocks' durations.
        memory_bytes: for parameters and the activations of the microbatches in flight.
    """

    speed: float = 1.0
    memory_bytes: float = inf


class PartitionCosts:
    """Costs of every range of blocks on every stage, in constant time each.

    Args:
        blocks: in model order.
        stages: in pipeline order; at most one per block.
        link_s: seconds from stage d to d + 1 and the same back, one less than stages.
        microbatches: of one step.

    Raises:
        BadInputError: a length or value is wrong; names the key as coordinator/README.md does.
    """

    def __init__(
        self,
        blocks: Sequence[BlockCost],
        stages: Sequence[StagePower],
        link_s: Sequence[float],
        microbatches: int,
    ) -> None:
        _check(blocks, stages, link_s, microbatches)
        self.blocks, self.stages, self.microbatches = len(blocks), len(stages), microbatches
        self.link_s = list(link_s)
        self.forward_sums_s = [0.0, *accumulate(block.forward_s for block in blocks)]
        self.backward_sums_s = [0.0, *accumulate(block.backward_s for block in blocks)]
        self._parameter_sums = [0.0, *accumulate(block.parameter_bytes for block in blocks)]
        self._activation_sums = [0.0, *accumulate(block.activation_bytes for block in blocks)]
        self._memory_bytes = [stage.memory_bytes for stage in stages]
        self.slowness = [1.0 / stage.speed for stage in stages]
        self.in_flight = [min(microbatches, self.stages - d) for d in range(self.stages)]

    def forward_s(self, stage: int, first: int, end: int) -> float:
        """Forward of blocks first … end - 1 on a stage."""
        return (self.forward_sums_s[end] - self.forward_sums_s[first]) * self.slowness[stage]

    def backward_s(self, stage: int, first: int, end: int) -> float:
        """Backward of blocks first … end - 1 on a stage."""
        return (self.backward_sums_s[end] - self.backward_sums_s[first]) * self.slowness[stage]

    def work_s(self, stage: int, first: int, end: int) -> float:
        """Forward and backward of blocks first … end - 1 on a stage."""
        return self.forward_s(stage, first, end) + self.backward_s(stage, first, end)

    def memory_bytes(self, stage: int, first: int, end: int) -> float:
        """Peak of parameters and activations in flight for blocks first … end - 1 on a stage under 1F1B."""
        parameters = self._parameter_sums[end] - self._parameter_sums[first]
        return parameters + self.in_flight[stage] * (self._activation_sums[end] - self._activation_sums[first])

    def fits(self, stage: int, first: int, end: int) -> bool:
        """Whether the stage's node can hold blocks first … end - 1."""
        return self.memory_bytes(stage, first, end) <= self._memory_bytes[stage] * (1 + 1e-12)

    def stage_times(self, edges: Sequence[int]) -> tuple[list[float], list[float]]:
        """Forward and backward per stage when stage d holds blocks edges[d] … edges[d + 1] - 1."""
        forward_at = [self.forward_sums_s[edge] for edge in edges]
        backward_at = [self.backward_sums_s[edge] for edge in edges]
        forward = [(b - a) * slow for (a, b), slow in zip(pairwise(forward_at), self.slowness, strict=True)]
        backward = [(b - a) * slow for (a, b), slow in zip(pairwise(backward_at), self.slowness, strict=True)]
        return forward, backward


def _check(
    blocks: Sequence[BlockCost], stages: Sequence[StagePower], link_s: Sequence[float], microbatches: int
) -> None:
    if not 1 <= len(blocks) <= BLOCKS_MAX:
        raise BadInputError(f"forward_s: {len(blocks)} blocks are not between 1 and {BLOCKS_MAX}")
    if not 1 <= len(stages) <= STAGES_MAX:
        raise BadInputError(f"stages: {len(stages)} is not between 1 and {STAGES_MAX}")
    if len(stages) > len(blocks):
        raise BadInputError(f"stages: {len(stages)} stages cannot share {len(blocks)} blocks")
    if len(link_s) != len(stages) - 1:
        raise BadInputError(f"link_s: {len(stages) - 1} values wanted, got {len(link_s)}")
    if len(stages) * (len(blocks) - len(stages) + 1) ** 2 // 2 > RANGES_MAX:
        raise BadInputError(f"stages: {len(stages)} stages of {len(blocks)} blocks are too many to search")
    if not 1 <= microbatches <= STEPS_MAX // len(stages):
        raise BadInputError(f"microbatches: {microbatches} is not between 1 and {STEPS_MAX // len(stages)}")
    for index, block in enumerate(blocks):
        for key in ("forward_s", "backward_s", "parameter_bytes", "activation_bytes"):
            _check_number(f"{key}[{index}]", getattr(block, key))
    for index, seconds in enumerate(link_s):
        _check_number(f"link_s[{index}]", seconds)
    for index, stage in enumerate(stages):
        if not (isfinite(stage.speed) and stage.speed > 0.0):
            raise BadInputError(f"speed[{index}]: {stage.speed} is not a finite number above 0")
        if not stage.memory_bytes > 0.0:
            raise BadInputError(f"memory_bytes[{index}]: {stage.memory_bytes} is not above 0")


def _check_number(key: str, value: float) -> None:
    if not (isfinite(value) and value >= 0.0):
        raise BadInputError(f"{key}: {value} is not a finite number of at least 0")
