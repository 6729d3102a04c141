"""Where to cut a sequence so that its segments take equal time (Seq1F1B, section 3.4, with a causal cost
that adds up).

The paper's Eq. 8 does not add up to the whole sequence's cost, so its Eq. 7 has no solution. Here a prefix
of S tokens costs `linear * S + quadratic * S^2`: the linear part is the matrix products' and the quadratic
part causal attention's, of which a segment after a prefix pays the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from protocol.base.errors import BadInputError


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


def equal_time_segments(
    tokens: int, segments: int, prefix_s: Callable[[int], float], multiple: int = 1
) -> tuple[int, ...]:
    """The same from measured times: `prefix_s(n)` seconds for the first n tokens, growing with n."""
    whole_s = prefix_s(tokens)

    def boundary(share: float) -> float:
        low, high = 0, tokens
        while high - low > 1:
            middle = (low + high) // 2
            if prefix_s(middle) < share * whole_s:
                low = middle
            else:
                high = middle
        below, above = prefix_s(low), prefix_s(high)
        part = (share * whole_s - below) / (above - below) if above > below else 0.0
        return low + part

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
