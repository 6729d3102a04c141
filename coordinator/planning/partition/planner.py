"""Which blocks does each stage hold? The public face of AutoPipe's planner (papers: AutoPipe, section III).

`partition` is a pure function, which `barnraise plan partition` and the benchmarks call. The planner of a run cuts by
its own cost, of seats and lines too (`coordinator.planning.placement.seat_search`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.planning.partition.costs import STAGES_MAX, BlockCost, PartitionCosts, StagePower
from coordinator.planning.partition.one_f_one_b import Timeline, timeline
from coordinator.planning.partition.search import WORK_MAX, PartitionSearch
from coordinator.planning.partition.slicer import Slices, choose_slices
from coordinator.planning.problems import Problem
from protocol.base.errors import BadInputError


@dataclass(frozen=True, slots=True)
class Partition:
    """A model cut into stages.

    Attributes:
        edges: stage d holds blocks edges[d] … edges[d + 1] - 1; one more than stages.
        makespan_s: of one step in 1F1B order.
        lower_bound_s: no partition is faster in 1F1B order; equal to `makespan_s` when this one is proven best.
        forward_s, backward_s, memory_bytes: per stage; memory as `PartitionCosts.memory_bytes`.
        stopped: why the search ended.
        timeline: all times, the critical path and the master stage.
    """

    edges: tuple[int, ...]
    makespan_s: float
    lower_bound_s: float
    forward_s: list[float]
    backward_s: list[float]
    memory_bytes: list[float]
    stopped: str
    timeline: Timeline

    @property
    def cuts(self) -> list[int]:
        """The first block of stages 1, 2, …"""
        return list(self.edges[1:-1])

    @property
    def master_stage(self) -> int:
        """The stage that sets the pace of the steady phase."""
        return self.timeline.master_stage


def partition(
    blocks: Sequence[BlockCost],
    stages: Sequence[StagePower],
    microbatches: int,
    link_s: Sequence[float] | None = None,
    *,
    seed: int = 0,
    work_max: int = WORK_MAX,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Partition:
    """Cuts `blocks` into as many runs as there are `stages`, for the shortest step in 1F1B order.

    Args:
        blocks: the model's sub-layer blocks in order, embedding and head included, for one microbatch on a node of
            speed 1; from `coordinator.planning.partition.model_costs`, from measurements, or all alike before anything
            is known.
        stages: power and memory of each stage's node, in pipeline order; every stage gets at least one block.
        microbatches: of one step.
        link_s: seconds from stage d to d + 1 and the same back, `len(stages) - 1` of them; None for no links.
        seed: for the kicks of the local search.
        work_max: how much each search may try, in stage-steps (`partition_search.WORK_MAX` is under half a
            second); the same arguments give the same answer.
        out_of_time: ends the search early when true; the answer may then depend on the machine.

    Raises:
        BadInputError: a value or length is wrong, there are more stages than blocks, or no partition keeps the
            memory limits; the sentence names the key.
    """
    if link_s is None:
        link_s = [0.0] * (len(stages) - 1)
    costs = PartitionCosts(blocks, stages, link_s, microbatches)
    search = PartitionSearch(costs, random.Random(seed), work_max, out_of_time)
    search.run()
    if not search.best:
        raise BadInputError(f"memory_bytes: {_too_small(costs)}")
    forward_s, backward_s = costs.stage_times(search.best)
    return Partition(
        edges=search.best,
        makespan_s=search.best_s,
        lower_bound_s=search.lower_bound_s,
        forward_s=forward_s,
        backward_s=backward_s,
        memory_bytes=[costs.memory_bytes(d, *search.best[d : d + 2]) for d in range(costs.stages)],
        stopped=search.stopped,
        timeline=timeline(forward_s, backward_s, link_s, microbatches),
    )


def _too_small(costs: PartitionCosts) -> str:
    """Says which stage cannot hold even its share, or that all together cannot."""
    for d in range(costs.stages):
        firsts = range(d, costs.blocks - (costs.stages - 1 - d))
        if not any(costs.fits(d, first, first + 1) for first in firsts):
            return f"stage {d} can hold none of the blocks that could stand there"
    return "no partition keeps every stage within its memory"


class PartitionProblem(Problem, frozen=True, kw_only=True):
    """Where to cut a model for equal stages (kind `partition` of coordinator/README.md).

    Attributes:
        forward_s, backward_s: per sub-layer block, in order.
        link_s: seconds between any two neighbouring stages, each way.
        stages, microbatches: counts.
    """

    forward_s: list[float]
    backward_s: list[float]
    link_s: float
    stages: int
    microbatches: int

    def validate(self) -> None:
        """Raises `BadInputError` naming the key whose length or value cannot be."""
        if len(self.backward_s) != len(self.forward_s):
            raise BadInputError(
                f"backward_s: {len(self.forward_s)} values wanted as in forward_s, got {len(self.backward_s)}"
            )
        if self.stages > STAGES_MAX:  # before a list of so many is made
            raise BadInputError(f"stages: {self.stages} is not between 1 and {STAGES_MAX}")
        PartitionCosts(self.blocks(), [StagePower()] * self.stages, self.links(), self.microbatches)

    def blocks(self) -> list[BlockCost]:
        """The blocks' costs; memory is no object in this kind of problem."""
        return [BlockCost(f, b) for f, b in zip(self.forward_s, self.backward_s, strict=True)]

    def links(self) -> list[float]:
        """`link_s` once per hop."""
        return [self.link_s] * max(0, self.stages - 1)


def solve(
    problem: PartitionProblem, seed: int, work_max: int, out_of_time: Callable[[], bool]
) -> tuple[Partition, Slices]:
    """The partition of a problem file, and how many of its first microbatches to halve."""
    found = partition(
        problem.blocks(),
        [StagePower()] * problem.stages,
        problem.microbatches,
        problem.links(),
        seed=seed,
        work_max=work_max,
        out_of_time=out_of_time,
    )
    slices = choose_slices(found.forward_s, found.backward_s, problem.links(), problem.microbatches)
    return found, slices
