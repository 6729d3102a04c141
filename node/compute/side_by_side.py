"""Pieces of a vector, worked on side by side: what a server folds, updates and packs is each element's own affair."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class SideBySide:
    """Threads that share one job's pieces; with one, or one piece, all is done in the caller's own.

    Args:
        threads: at most as many work at once. They begin with the first job that has several pieces.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def each(self, do: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """What `do` makes of each piece, in their order, as soon as it is there; its error where it fails."""
        found = list(pieces)
        if self._threads == 1 or len(found) < 2:
            return map(do, found)
        if self._pool is None:
            # Torch's operations share themselves out otherwise, each among all cores.
            alone = partial(torch.set_num_threads, 1)
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="side-by-side", initializer=alone)
        return self._pool.map(do, found)

    def all(self, do: Callable[[T], object], pieces: Iterable[T]) -> None:
        """`do` of every piece."""
        for _ in self.each(do, pieces):
            pass


ALONE = SideBySide()
