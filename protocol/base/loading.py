"""Modules are loaded once and never die: Python's garbage collector need not look at them, then or later.

A collection walks through everything that could belong to a cycle. While torch's 1,400 modules load it walks again and
again through what is there already: a sixth of the time (`import node.compute.device_process` with the collector on and
off: 1.88 and 1.60 s of a processor, the best of six).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Around imports: nothing is collected meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def keep_what_is_loaded(collect_after: int = 700) -> None:
    """Takes all modules and what they made out of the garbage collector's sight; before the loop of a daemon begins.

    With torch loaded a full collection looks at 200,000 objects that never die, and holds the loop for 70 ms.

    Args:
        collect_after: objects that come between two collections, which who answers with more should raise. What is
            still being made when one comes counts as what stays: with 700 a coordinator of a thousand members looked
            through all its links every three seconds while it was asked for them, for 100 ms each time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(collect_after, *gc.get_threshold()[1:])
