"""The `schedule` problem: equal microbatches through a line of stages, one node per stage (coordinator/README.md)."""

from __future__ import annotations

import math

from coordinator.planning.problems import Problem
from protocol.base.errors import BadInputError

#: More operations than this are refused: a planning file is a question, not a way to fill memory.
OPERATIONS_MAX = 2_000_000
#: The simulator's table of delays has a row and a column per stage.
STAGES_MAX = 1_000


class PipelineProblem(Problem, frozen=True, kw_only=True):
    """In what order should every stage run its forwards and backwards?

    F of stage s needs F of s-1 and the link between them; B (or I, when split) of s needs its own F, and B
    (or I) of s+1 and the link; W needs its own I. B lasts `backward_input_s + backward_weight_s`. A stage
    does one thing at a time, sends overlap compute.

    Attributes:
        forward_s, backward_input_s, backward_weight_s: durations, one per stage.
        link_s: seconds from stage s to s+1 and the same back, `stages - 1` of them.
        split_backward: whether I and W are two operations.
        activations_max: per stage, how many microbatches may be alive from the start of their F to the end of
            their B (of their W when split); None when memory is no object.
    """

    stages: int
    microbatches: int
    forward_s: list[float]
    backward_input_s: list[float]
    backward_weight_s: list[float]
    link_s: list[float]
    split_backward: bool
    activations_max: list[int] | None

    def validate(self) -> None:
        """Raises `BadInputError` naming the key whose length or value cannot be."""
        for key, value in (("stages", self.stages), ("microbatches", self.microbatches)):
            if value < 1:
                raise BadInputError(f"{key}: {value} is not at least 1")
        if self.stages > STAGES_MAX:
            raise BadInputError(f"stages: {self.stages} is more than {STAGES_MAX}")
        if 3 * self.stages * self.microbatches > OPERATIONS_MAX:
            raise BadInputError(f"microbatches: more than {OPERATIONS_MAX} operations in one problem")
        per_stage = ("forward_s", "backward_input_s", "backward_weight_s", "activations_max")
        lengths = {**dict.fromkeys(per_stage, self.stages), "link_s": self.stages - 1}
        for key, wanted in lengths.items():
            values = getattr(self, key)
            if values is not None and len(values) != wanted:
                raise BadInputError(f"{key}: {wanted} values wanted, got {len(values)}")
        times = (*self.forward_s, *self.backward_input_s, *self.backward_weight_s, *self.link_s, *self.link_s)
        if not math.isfinite(1000 * self.microbatches * sum(times)):
            raise BadInputError("forward_s: with the other times and all microbatches more seconds than a number holds")
        for stage, cap in enumerate(self.activations_max or ()):
            if cap < 1:
                raise BadInputError(f"activations_max[{stage}]: a cap of {cap} lets no microbatch start")
