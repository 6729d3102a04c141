"""Who reads a text says now and then that it goes on: a read that hangs says nothing, and is noticed.

The reader is told whom to tell by its caller's context, so that nothing between the two has to know of it. What pulls
the pieces may be another thread (a tokenizer's trainer), so whom to tell is asked for once, by the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

TOLD_EVERY_S = 1.0
"""Pieces come by the thousand a second; whoever listens looks every two seconds."""
_T = TypeVar("_T")
Tell = Callable[[float], None]
"""Takes how many seconds what comes next may be silent, beyond the ordinary."""


def _nobody(silent_s: float) -> None:
    pass


_listener: ContextVar[Tell] = ContextVar("listener", default=_nobody)


@contextmanager
def told_to(tell: Tell) -> Iterator[None]:
    """What is read in here is told to `tell`, which any thread may call."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def begins_silence(silent_s: float) -> None:
    """Something begins that may take so long and says nothing."""
    _listener.get()(silent_s)


def watched(items: Iterator[_T]) -> Iterator[_T]:
    """The same items; whoever listens now hears that they come."""
    return _watched(items, _listener.get())


def _watched(items: Iterator[_T], tell: Tell) -> Iterator[_T]:
    told_at = float("-inf")
    for item in items:
        now = time.monotonic()
        if now - told_at >= TOLD_EVERY_S:
            told_at = now
            tell(0.0)
        yield item
