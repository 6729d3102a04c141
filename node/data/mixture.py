"""Samples from several rows by weights: which row a sample's number falls on needs no look at those before it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from node.data.permutation import Permutation
from protocol.base.errors import BadInputError
from protocol.run.mixture import MIXTURE_TURN


def shares(weights: Mapping[str, float], names: Sequence[str]) -> list[int]:
    """Samples of each part in a turn; of a part that is not named none. They sum to `MIXTURE_TURN`.

    Largest remainders (Hamilton): no share is off by a whole sample. Raises `BadInputError`.
    """
    for name in weights:
        if name not in names:
            raise BadInputError(f"data.mixture: there is no part {name}; the folder has {', '.join(names)}")
    total = sum(weights.values())
    exact = [MIXTURE_TURN * weights.get(name, 0.0) / total for name in names]
    found = [int(share) for share in exact]
    by_remainder = sorted(range(len(names)), key=lambda place: (found[place] - exact[place], place))
    for place in by_remainder[: MIXTURE_TURN - sum(found)]:
        found[place] += 1
    for name, share in zip(names, found, strict=True):
        if share == 0 and weights.get(name, 0.0) > 0:
            raise BadInputError(f"data.mixture: {name} would get less than one of {MIXTURE_TURN} samples")
    return found


class Turns:
    """Sample number -> (part, number within the part): a bijection, and each part's numbers come in their order.

    Args:
        first: the number of the first sample of these turns.
        used: samples of each part that others have drawn before it; each part goes on where it was.
    """

    def __init__(
        self, shares: Sequence[int], seed: int, purpose: str, first: int = 0, used: Sequence[int] = ()
    ) -> None:
        assert sum(shares) == MIXTURE_TURN
        self._shares = shares
        self._seed = seed
        self._purpose = purpose
        self._first = first
        self._used = tuple(used) or (0,) * len(shares)
        self._order = functools.lru_cache(maxsize=4)(self._make_order)

    def find(self, number: int) -> tuple[int, int]:
        """The part, and which of its samples, counted from 0 through the whole run."""
        turn, place = divmod(number - self._first, MIXTURE_TURN)
        part, before = self._order(turn)[place]
        return part, self._used[part] + turn * self._shares[part] + before

    def drawn(self, number: int) -> tuple[int, ...]:
        """Samples of each part among those before `number`, what others drew included."""
        turn, place = divmod(number - self._first, MIXTURE_TURN)
        counts = [used + turn * share for used, share in zip(self._used, self._shares, strict=True)]
        for part, _ in self._order(turn)[:place]:
            counts[part] += 1
        return tuple(counts)

    def _make_order(self, turn: int) -> list[tuple[int, int]]:
        """Of each place of a turn its part, and how many of the part come before it in the turn; some milliseconds."""
        permutation = Permutation(MIXTURE_TURN, self._seed, f"mixture {self._purpose} {turn}")
        owners = [part for part, share in enumerate(self._shares) for _ in range(share)]
        seen = [0] * len(self._shares)
        order = []
        for place in range(MIXTURE_TURN):
            part = owners[permutation[place]]
            order.append((part, seen[part]))
            seen[part] += 1
        return order
