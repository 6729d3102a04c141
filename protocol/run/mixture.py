"""`data.mixture`: how often a run draws from each part of a prepared folder."""

from __future__ import annotations

import math

from protocol.base.errors import BadInputError

PARTS_MAX = 64
"""Parts of a prepared folder; a mixture has a word for each at most."""
MIXTURE_TURN = 4096
"""Samples in which each part has exactly its share, in an order of the turn's own."""
NAME_MAX = 63
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789-_"


def is_part_name(name: str) -> bool:
    """1 to 63 lower-case letters, digits, dashes and underscores."""
    return 0 < len(name) <= NAME_MAX and not name.strip(_LETTERS)


def parse_mixture(text: str) -> dict[str, float]:
    """The weights in `books=0.7 code=0.3`, in that order; any positive scale. Raises `BadInputError`."""
    weights: dict[str, float] = {}
    for word in text.split():
        name, equals, number = word.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or not is_part_name(name) or not 0 <= weight <= 1e9:
            raise BadInputError(f'data.mixture: {word!r} is not NAME=WEIGHT, as in "books=0.7 code=0.3"')
        if name in weights:
            raise BadInputError(f"data.mixture: {name} stands there twice")
        weights[name] = weight
    if len(weights) > PARTS_MAX:
        raise BadInputError(f"data.mixture: more than {PARTS_MAX} parts")
    if weights and not any(weights.values()):
        raise BadInputError("data.mixture: the weights sum to zero, so there is nothing to train on")
    return weights
