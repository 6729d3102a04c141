"""Pieces of a vector, worked on side by side: what a server folds, updates and packs is each element's own affair."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Pieces that wait for each thread: at its end a process works off what has been handed out, and no more."""
THREAD_BYTES = 16 << 20
"""What a thread keeps for itself: pieces of up to a megabyte, several at a time, which the system's allocator holds for
it. (Seven more threads came with 22 to 78 MB.)"""


class SideBySide:
    """Threads that share one job's pieces; with one, or one piece, all is done in the caller's own. A piece must not
    share out pieces of its own: it would wait for a thread that waits for it.

    Args:
        threads: at most as many work at once. They begin with the first job that has several pieces.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def each(self, do: Callable[[T], R], pieces: Iterable[T]) -> Iterator[R]:
        """What `do` makes of each piece, in their order, as soon as it is there. Where one fails its error is raised,
        when nobody works on another any more."""
        found = list(pieces)
        if self._threads == 1 or len(found) < 2:
            yield from map(do, found)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="side-by-side", initializer=_be_one_core)
        pool, rest = self._pool, iter(found)
        begun: deque[Future[R]] = deque(pool.submit(do, piece) for piece in islice(rest, AHEAD * self._threads))
        try:
            while begun:
                done = begun.popleft().result()
                begun.extend(pool.submit(do, piece) for piece in islice(rest, 1))
                yield done
        finally:
            wait([future for future in begun if not future.cancel()])

    def all(self, do: Callable[[T], object], pieces: Iterable[T]) -> None:
        """`do` of every piece."""
        for _ in self.each(do, pieces):
            pass


def _be_one_core() -> None:
    """Torch's operations share themselves out otherwise, each among all cores. (What is set is also what every thread
    has that asks torch for the first time later: all lanes of a server want one.)"""
    import torch  # not above: who only looks at packed integers, a volunteer's daemon, never loads it

    torch.set_num_threads(1)


ALONE = SideBySide()
