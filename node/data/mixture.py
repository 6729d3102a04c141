"""Samples from several rows by weights: which row a sample's number falls on needs no look at those before it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from node.data.permutation import Permutation
from protocol.base.errors import BadInputError

TURN = 4096
"""Samples in which each part has exactly its share, in an order of the turn's own."""


def shares(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """Samples of each part in a turn; of a part that is not named none. They sum to `TURN`.

    Largest remainders (Hamilton): no share is off by a whole sample. Raises `BadInputError`.
    """
    for name in weights:
        if name not in names:
            raise BadInputError(f"data.mixture: there is no part {name}; the folder has {', '.join(names)}")
    total = sum(weights.values())
    exact = [TURN * weights.get(name, 0.0) / total for name in names]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(names)), key=lambda place: (found[place] - exact[place], place))
    for place in by_remainder[: TURN - sum(found)]:
        found[place] += 1
    for name, share in zip(names, found, strict=True):
        if share == 0 and weights.get(name, 0.0) > 0:
            raise BadInputError(f"data.mixture: {name} would get less than one of {TURN} samples")
    return found


class Turns:
    """Sample number -> (part, number within the part): a bijection, and each part's numbers come in their order."""

    def __init__(self, shares: Sequence[int], seed: int, purpose: str) -> None:
        assert sum(shares) == TURN
        self._shares = shares
        self._seed = seed
        self._purpose = purpose
        self._order = functools.lru_cache(maxsize=4)(self._make_order)

    def find(self, number: int) -> tuple[int, int]:
        """The part, and which of its samples, counted from 0 through the whole run."""
        turn, place = divmod(number, TURN)
        part, before = self._order(turn)[place]
        return part, turn * self._shares[part] + before

    def _make_order(self, turn: int) -> list[tuple[int, int]]:
        """Of each place of a turn its part, and how many of the part come before it in the turn; some milliseconds."""
        permutation = Permutation(TURN, self._seed, f"mixture {self._purpose} {turn}")
        owners = [part for part, share in enumerate(self._shares) for _ in range(share)]
        seen = [0] * len(self._shares)
        order = []
        for place in range(TURN):
            part = owners[permutation[place]]
            order.append((part, seen[part]))
            seen[part] += 1
        return order
