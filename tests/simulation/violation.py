"""What every checker raises."""

from __future__ import annotations


class ViolationError(AssertionError):
    """An invariant is broken; the text names it."""


def expect(holds: bool, invariant: str, text: str) -> None:
    """Raises `ViolationError` unless the invariant holds."""
    if not holds:
        raise ViolationError(f"{invariant}: {text}")
