"""How many of the first microbatches to halve, so that a deep pipeline fills in half the time.

AutoPipe, section III-C. A halved microbatch runs its forward in two pieces that travel on their own; its
backward stays whole and needs both. The first half reaches the last stage after half the warm-up, so the
first backward comes earlier; halving more microbatches than needed gains nothing and costs transfers. The
count is chosen by simulation; the paper's Algorithm 2, repaired, is the guess around which very large
pipelines are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Simulated operations for which every count is tried; beyond, only the guess and its neighbours are.
OPERATIONS_MAX = 1_000_000
#: A larger count must be faster by this share to be preferred.
PRECISION = 1e-12


@dataclass(frozen=True, slots=True)
class Slices:
    """How many of the first microbatches are halved (0: none), and the makespan with it."""

    count: int
    makespan_s: float


def sliced_makespan_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_s: Sequence[float],
    microbatches: int,
    count: int,
    half_link_s: Sequence[float] | None = None,
) -> float:
    """The makespan of 1F1B when the first `count` microbatches run their forward in two halves.

    Args:
        forward_s, backward_s: per stage, of a whole microbatch.
        link_s: per hop, of a whole microbatch; sends overlap compute.
        microbatches: of the step.
        count: microbatches that are halved, from 0 to `microbatches`.
        half_link_s: per hop, of half a microbatch; None takes `link_s`, as if latency were all of it, so that the
            answer holds whatever the split between latency and bandwidth.
    """
    stages = len(forward_s)
    halves_link_s = link_s if half_link_s is None else half_link_s
    # Per stage and microbatch: the end of the first half (of all, where it is not halved), and of all.
    first_end = [[0.0] * microbatches for _ in range(stages)]
    forward_end = [[0.0] * microbatches for _ in range(stages)]
    backward_end = [0.0] * stages
    for wave in range(1 - stages, microbatches):
        for d in range(stages):
            i = wave + stages - 1 - d
            if not 0 <= i < microbatches:
                continue
            now = backward_end[d] if wave > 0 else forward_end[d][i - 1] if i else 0.0
            if i < count:
                half_s = forward_s[d] / 2
                hop_s = halves_link_s[d - 1] if d else 0.0
                first_end[d][i] = max(now, first_end[d - 1][i] + hop_s if d else 0.0) + half_s
                came = forward_end[d - 1][i] + hop_s if d else 0.0
                forward_end[d][i] = max(first_end[d][i], came) + half_s
            else:
                came = forward_end[d - 1][i] + link_s[d - 1] if d else 0.0
                forward_end[d][i] = first_end[d][i] = max(now, came) + forward_s[d]
        if wave >= 0:
            came = 0.0
            for d in range(stages - 1, -1, -1):
                newest = min(wave + stages - 1 - d, microbatches - 1)
                backward_end[d] = max(came, backward_end[d], forward_end[d][newest]) + backward_s[d]
                came = backward_end[d] + link_s[d - 1] if d else 0.0
    return backward_end[0]


def choose_slices(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    link_s: Sequence[float],
    microbatches: int,
    half_link_s: Sequence[float] | None = None,
) -> Slices:
    """The smallest count with the least makespan; arguments as for `sliced_makespan_s`.

    More than one microbatch per stage is never halved: by then the last stage has its first backward.
    """
    stages = len(forward_s)
    most = min(stages, microbatches)
    counts: Sequence[int] = range(most + 1)
    if 2 * stages * microbatches * len(counts) > OPERATIONS_MAX:
        guess = guess_slices(forward_s, backward_s, link_s, microbatches)
        counts = sorted({0, *range(max(1, guess - 2), min(most, guess + 2) + 1)})
    best = Slices(0, float("inf"))
    for count in counts:
        value_s = sliced_makespan_s(forward_s, backward_s, link_s, microbatches, count, half_link_s)
        if value_s < best.makespan_s * (1 - PRECISION):
            best = Slices(count, value_s)
    return best


def guess_slices(
    forward_s: Sequence[float], backward_s: Sequence[float], link_s: Sequence[float], microbatches: int
) -> int:
    """AutoPipe's Algorithm 2 with its listing repaired: about how many microbatches to halve.

    The microbatch after n halved ones is the first that stage P - n runs after a backward. If it can start
    whole on stage 0 once the halves are done there, and still come in time, n is enough. Repaired: the last
    stage needs both halves before its first backward (line 9); the test is "at least", as the text has it
    (line 34; as printed it never ends for two stages). With sends that overlap compute, stage 0 never waits
    (lines 17 to 28), so its halves end after n whole forwards. For equal stages without links: the least n
    with n ≥ (P - 1) f / (2 b).
    """
    stages = len(forward_s)
    most = min(stages, microbatches)
    backward_end_s = sum(forward_s[:-1]) / 2 + sum(link_s) + forward_s[-1]
    for count in range(1, most):
        arrives_at = stages - count
        backward_end_s += backward_s[arrives_at]
        way_s = sum(forward_s[:arrives_at]) + sum(link_s[:arrives_at])
        if backward_end_s - way_s >= count * forward_s[0] * (1 - PRECISION):
            return count
        backward_end_s += link_s[arrives_at - 1]
    return most
