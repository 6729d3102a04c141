"""Deadlines by key, of which the first one is asked for after every input and the others change now and then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")


class Clocks(Generic[K]):
    """Times by key. The first one is looked up anew only when the one that was first has changed."""

    def __init__(self) -> None:
        self._times: dict[K, float] = {}
        self._first: float | None = None
        self._known = True

    def __contains__(self, key: K) -> bool:
        return key in self._times

    def items(self) -> Iterator[tuple[K, float]]:
        """In the order in which the keys came; may be changed meanwhile."""
        return iter(list(self._times.items()))

    def set(self, key: K, at: float) -> None:
        if self._times.get(key) == self._first:
            self._known = False
        elif self._known and self._first is not None and at < self._first:
            self._first = at
        self._times[key] = at

    def pop(self, key: K) -> None:
        """Nothing is due for the key any more; it may be unknown."""
        if self._times.pop(key, None) == self._first:
            self._known = False

    def first(self) -> float | None:
        """The earliest; None where there is none."""
        if not self._known:
            self._first, self._known = min(self._times.values(), default=None), True
        return self._first
