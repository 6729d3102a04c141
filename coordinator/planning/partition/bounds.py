"""Lower bounds on the makespan of 1F1B over *all* partitions: what no choice of cuts can beat.

For a stage d that holds a given range of blocks, the rest of the model lies before and after it, wherever its
cuts are. With f and b for the stage's forward and backward, `head` and `tail` for the forwards and backwards
(and links) before it, `ret` for everything after it (forward, backward, links both ways), K = min(M, P - d)
forwards in the warm-up, and M microbatches, five chains of waiting are in every 1F1B run:

* load: head + M (f + b) + tail;
* the first backward returns late: head + f + ret + M b + (M - K) f + tail;
* the last forward leaves late: head + M f + (M - K) b + ret + b + tail;
* both: head + f + ret + (M - K) (f + b) + ret + b + tail, when M > K;
* K in flight: head + (⌊(M - 1)/K⌋ + 1) (f + ret + b) + tail.

The largest is a bound for any partition in which stage d holds that range; a bottleneck recursion like
AutoPipe's Algorithm 1 then takes the least possible maximum over all stages. Blocks before and after run on
unknown stages: they count at the speed of the fastest of those.
"""

from __future__ import annotations

from math import inf

from coordinator.planning.partition.costs import PartitionCosts


class BoundTable:
    """For every range of blocks on every stage, the bound; and the least maximum over the stages from d on.

    Attributes:
        choices: [stage][first], (bound_s, end) of every range first … end - 1 that the stage can hold while each other
            stage gets at least one block; in order of `end`.
        of_rest_s: [stage][first], a bound for the stages from `stage` on holding the blocks from `first` on; inf where
            they cannot.
    """

    def __init__(self, costs: PartitionCosts) -> None:
        stages, blocks = costs.stages, costs.blocks
        self.choices: list[list[list[tuple[float, int]]]] = []
        for d in range(stages):
            by_first: list[list[tuple[float, int]]] = [[] for _ in range(blocks + 1)]
            for first in range(d, blocks - (stages - 1 - d)) if d else (0,):
                by_first[first] = _choices(costs, d, first)
            self.choices.append(by_first)
        self.of_rest_s = [[inf] * (blocks + 1) for _ in range(stages + 1)]
        self.of_rest_s[stages][blocks] = 0.0
        for d in range(stages - 1, -1, -1):
            rest_s, own_s = self.of_rest_s[d + 1], self.of_rest_s[d]
            for first, choices in enumerate(self.choices[d]):
                own_s[first] = min((max(bound_s, rest_s[end]) for bound_s, end in choices), default=inf)

    @property
    def value_s(self) -> float:
        """No partition is faster; inf when none keeps the memory limits."""
        return self.of_rest_s[0][0]


def _choices(costs: PartitionCosts, d: int, first: int) -> list[tuple[float, int]]:
    """(bound_s, end) for the ranges that start at `first` on stage d and fit there."""
    m, k = costs.microbatches, costs.in_flight[d]
    before, after = min(costs.slowness[:d], default=0.0), min(costs.slowness[d + 1 :], default=0.0)
    work_sums_s = [f + b for f, b in zip(costs.forward_sums_s, costs.backward_sums_s, strict=True)]
    around_s = work_sums_s[first] * before + 2 * sum(costs.link_s[:d])
    links_after_s = 2 * sum(costs.link_s[d:])
    turns = (m - 1) // k + 1
    end_max = costs.blocks - (costs.stages - 1 - d)
    found = []
    for end in range(first + 1, end_max + 1) if d + 1 < costs.stages else (costs.blocks,):
        if not costs.fits(d, first, end):
            break  # and no longer range fits either
        f, b = costs.forward_s(d, first, end), costs.backward_s(d, first, end)
        ret = (work_sums_s[-1] - work_sums_s[end]) * after + links_after_s
        chains = (
            m * (f + b),
            f + ret + m * b + (m - k) * f,
            m * f + (m - k) * b + ret + b,
            f + ret + (m - k) * (f + b) + ret + b if m > k else 0.0,
            turns * (f + ret + b),
        )
        found.append((around_s + max(chains), end))
    return found
