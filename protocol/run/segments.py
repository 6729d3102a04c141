"""Where to cut a sequence so that its segments take equal time (Seq1F1B, section 3.4, with a causal cost
that adds up), and how a run's sequences are cut: part of the arithmetic, so a function of its configuration alone.

The paper's Eq. 8 does not add up to the whole sequence's cost, so its Eq. 7 has no solution. Here a prefix
of S tokens costs `linear * S + quadratic * S^2`: the linear part is the matrix products' and the quadratic
part causal attention's, of which a segment after a prefix pays the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from protocol.base.errors import BadInputError

if TYPE_CHECKING:
    from protocol.run.run import RunConfig

SEGMENTS_MAX = 64
"""Of a sample: each is a message of its own at every boundary, and at 64 none of a pipeline's idle time is left."""
SEGMENT_RUNS_MAX = 2
"""Samples in segments that are open on a device beside those that slots have counted: ends of routes, recomputations.
`node.compute.memory` keeps their room free."""


def segment_ranges(config: RunConfig) -> tuple[tuple[int, int], ...]:
    """(first, end) tokens of each segment of a sample, the first segment first.

    They cost the same by the multiply-adds of the model's layers: later ones are shorter, since attention sees more.
    """
    model, count = config.model, config.batch.segments
    if count == 1:
        return ((0, model.context),)
    kv_width = model.hidden // model.heads * model.kv_heads
    layer = 2 * model.hidden * (model.hidden + kv_width) + 3 * model.hidden * model.feed_forward
    return _ranges(model.context, count, model.layers * layer, model.layers, model.hidden)


@lru_cache(maxsize=64)
def _ranges(tokens: int, count: int, parameters: int, layers: int, hidden: int) -> tuple[tuple[int, int], ...]:
    lengths = equal_cost_segments(tokens, count, *transformer_costs(parameters, layers, hidden))
    return tuple(pairwise(accumulate(lengths, initial=0)))


def check_segments(config: RunConfig) -> None:
    """Raises `BadInputError` naming the key of a run whose samples cannot be cut as it asks for."""
    count = config.batch.segments
    if count > config.model.context:
        raise BadInputError(f"batch.segments: {count} segments of samples of {config.model.context} tokens")
    if count > 1 and config.audit.rate > 0:
        raise BadInputError(
            "batch.segments: audits compute whole samples again, so segments need audit.rate = 0 (a run among people"
            " who know each other)"
        )


def transformer_costs(parameters: float, layers: int, hidden: int) -> tuple[float, float]:
    """(linear, quadratic) floating-point operations per token and per token squared of a forward."""
    return 2.0 * parameters, 2.0 * layers * hidden


def equal_cost_segments(
    tokens: int, segments: int, linear: float, quadratic: float, multiple: int = 1
) -> tuple[int, ...]:
    """Lengths of segments that cost the same, by the closed form, each a multiple of `multiple`.

    The i-th boundary S solves linear S + quadratic S^2 = i/k of the whole: S = 2g / (a + sqrt(a^2 + 4 c g)).

    Raises:
        BadInputError: when the sequence has fewer multiples than segments.
    """
    whole = linear * tokens + quadratic * tokens * tokens
    if not (whole > 0 and math.isfinite(whole) and min(linear, quadratic) >= 0):
        raise BadInputError(f"segments: costs {linear} and {quadratic} of {tokens} tokens are not positive numbers")

    def boundary(share: float) -> float:
        goal = share * whole
        return 2 * goal / (linear + math.sqrt(linear * linear + 4 * quadratic * goal))

    return _lengths(tokens, segments, multiple, boundary)


def _lengths(tokens: int, segments: int, multiple: int, boundary: Callable[[float], float]) -> tuple[int, ...]:
    """Rounds boundaries to multiples, leaving at least one multiple to every segment."""
    units, rest = divmod(tokens, multiple) if multiple > 0 else (0, 1)
    if rest or segments < 1 or units < segments:
        raise BadInputError(
            f"segments: {tokens} tokens do not make {segments} segments of multiples of {multiple} tokens"
        )
    cuts = [0]
    for number in range(1, segments):
        nearest = round(boundary(number / segments) / multiple)
        cuts.append(min(max(nearest, cuts[-1] + 1), units - (segments - number)))
    cuts.append(units)
    return tuple((b - a) * multiple for a, b in pairwise(cuts))
