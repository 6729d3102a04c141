"""Random small planning problems, whole-numbered so that a solver can prove their optima."""

from __future__ import annotations

import random

from coordinator.planning.order.pipeline_problem import PipelineProblem


def random_pipeline(rng: random.Random, stages_max: int = 4, microbatches_max: int = 8) -> PipelineProblem:
    """Equal and unequal stages, short and long links, fused and split, free, textbook and tight caps."""
    stages, microbatches = rng.randint(1, stages_max), rng.randint(1, microbatches_max)
    longest, longest_link = rng.choice([3, 10, 30]), rng.choice([0, 1, 5, 20])
    caps = rng.choice(
        [
            None,
            [min(microbatches, stages - stage) for stage in range(stages)],
            [rng.randint(1, microbatches) for _ in range(stages)],
            [rng.randint(1, min(3, microbatches)) for _ in range(stages)],
        ]
    )
    equal = rng.random() < 0.2

    def durations() -> list[float]:
        if equal:
            return [float(rng.randint(1, longest))] * stages
        return [float(rng.randint(1, longest)) for _ in range(stages)]

    return PipelineProblem(
        kind="schedule",
        stages=stages,
        microbatches=microbatches,
        forward_s=durations(),
        backward_input_s=durations(),
        backward_weight_s=durations(),
        link_s=[float(rng.randint(0, longest_link)) for _ in range(stages - 1)],
        split_backward=rng.random() < 0.5,
        activations_max=caps,
    )
