"""Drives one machine on trio (interface; the code follows in the next commits)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio

from protocol.machine import (
    Compute,
    Count,
    Dial,
    DropTensors,
    HangUp,
    Input,
    Log,
    Machine,
    Persist,
    Prune,
    Send,
    ShareTensor,
)


class Handlers(Protocol):
    """Performs effects. Each is called on trio's thread, in order, and must not block; answers come back by `put`."""

    def send(self, effect: Send) -> None: ...

    def dial(self, effect: Dial) -> None: ...

    def hang_up(self, effect: HangUp) -> None: ...

    def compute(self, effect: Compute) -> None: ...

    def persist(self, effect: Persist) -> None: ...

    def prune(self, effect: Prune) -> None: ...

    def drop_tensors(self, effect: DropTensors) -> None: ...

    def share_tensor(self, effect: ShareTensor) -> None: ...

    def log(self, effect: Log) -> None: ...

    def count(self, effect: Count) -> None: ...


class Pump:
    """One inbox, one machine, one place where effects happen."""

    def __init__(
        self,
        machine: Machine,
        handlers: Handlers,
        *,
        clock: Callable[[], float] = trio.current_time,
        check: bool = False,
    ) -> None:
        """`check`: call the machine's `check()` after every input (tests; costs time)."""

    def put(self, fact: Input) -> None:
        """Add a fact to the inbox; on trio's thread."""

    def put_from_thread(self, fact: Input) -> None:
        """Add a fact to the inbox from any thread."""

    async def room(self) -> None:
        """Wait until the inbox is short enough to take more from the network."""

    async def run(self) -> str:
        """Start the machine and feed it until it says `Exit`; returns the reason."""
        raise NotImplementedError
