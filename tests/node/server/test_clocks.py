"""The first of many deadlines is the first, whatever was set, moved and taken away."""

from __future__ import annotations

import random

from node.server.clocks import Clocks


def test_the_first_is_the_least_of_all() -> None:
    """Against a plain dict, in a thousand random changes."""
    rng = random.Random(1)
    clocks: Clocks[int] = Clocks()
    plain: dict[int, float] = {}
    for _ in range(1000):
        key = rng.randrange(12)
        if rng.random() < 0.6:
            plain[key] = float(rng.randrange(8))
            clocks.set(key, plain[key])
        else:
            plain.pop(key, None)
            clocks.pop(key)
        if rng.random() < 0.7:
            assert clocks.first() == min(plain.values(), default=None)
        assert dict(clocks.items()) == plain and (key in clocks) == (key in plain)
