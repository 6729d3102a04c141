"""Drives one machine on trio: one inbox, one clock, and one place where its effects happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

from protocol.base.limits import INBOX_MAX
from protocol.base.machine import (
    Compute,
    Count,
    Dial,
    DropTensors,
    Effect,
    Exit,
    HangUp,
    Input,
    Log,
    Machine,
    Persist,
    Prune,
    Send,
    ShareTensor,
    StartPlanning,
)

_TURN_S = 0.005
"""Facts are handled for so long before other tasks of the loop get a turn."""
_SENDS = 8
"""After so many messages, too. Each wakes a link that takes 0.2 ms to write it, all of them before anything else has a
turn again: a coordinator of a thousand members pings four hundred at once, and its API needs ten turns to answer."""


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

    def start_planning(self, effect: StartPlanning) -> None: ...


class Pump:
    """Hands facts to a machine one by one, and its effects to the handlers in their order."""

    def __init__(
        self,
        machine: Machine,
        handlers: Handlers,
        *,
        clock: Callable[[], float] = trio.current_time,
        check: bool = False,
    ) -> None:
        """Made inside trio. `clock` must be trio's own or run at its rate; `check`: call `machine.check()` after
        every input (for tests; it costs time)."""
        self._machine = machine
        self._clock = clock
        self._check = check
        self._inbox: deque[Input] = deque()
        self._filled = trio.Event()
        self._room = trio.Event()
        self._turn = trio.Event()
        self._taken = 0
        """Facts that the machine has had, with their effects performed."""
        self._token = trio.lowlevel.current_trio_token()
        self._exit: str | None = None
        self._perform: dict[type[Effect], Callable[..., None]] = {
            Send: handlers.send,
            Dial: handlers.dial,
            HangUp: handlers.hang_up,
            Compute: handlers.compute,
            Persist: handlers.persist,
            Prune: handlers.prune,
            DropTensors: handlers.drop_tensors,
            ShareTensor: handlers.share_tensor,
            Log: handlers.log,
            Count: handlers.count,
            StartPlanning: handlers.start_planning,
            Exit: self._on_exit,
        }

    def put(self, fact: Input) -> None:
        """Add a fact to the inbox, on trio's thread. Handlers may call it while an effect is performed."""
        self._inbox.append(fact)
        self._filled.set()

    async def room(self) -> None:
        """Wait until the inbox holds fewer than INBOX_MAX facts: the back-pressure for what comes by network."""
        while len(self._inbox) >= INBOX_MAX:
            await self._room.wait()

    async def handled(self) -> None:
        """Wait until the machine has had all that is in the inbox now."""
        last = self._taken + len(self._inbox)
        while self._taken < last:
            await self._turn.wait()

    async def run(self) -> str:
        """Start the machine and feed it until it says `Exit`; returns the reason. What is in the inbox then is left."""
        await self._do(self._machine.start(self._clock()))
        while self._exit is None:
            turn_ends = self._clock() + _TURN_S
            while self._exit is None and await self._step() and self._clock() < turn_ends:
                pass
            if len(self._inbox) < INBOX_MAX:
                self._room.set()
                self._room = trio.Event()
            self._turn.set()
            self._turn = trio.Event()
            await trio.lowlevel.checkpoint()
            if self._exit is None and not self._inbox:
                await self._sleep()
        return self._exit

    async def _step(self) -> bool:
        """One fact, or one wake-up that is due; False when there is neither. Due wake-ups come first."""
        wake_at = self._machine.wake_at()
        now = self._clock()
        if wake_at is not None and wake_at <= now:
            await self._do(self._machine.wake(now))
        elif self._inbox:
            await self._do(self._machine.handle(self._inbox.popleft(), now))
            self._taken += 1
        else:
            return False
        return True

    async def _sleep(self) -> None:
        """Until a fact arrives or the machine wants to wake."""
        wake_at = self._machine.wake_at()
        wait_s = float("inf") if wake_at is None else max(0.0, wake_at - self._clock())
        with trio.move_on_after(wait_s):
            await self._filled.wait()
        self._filled = trio.Event()

    async def _do(self, effects: Sequence[Effect]) -> None:
        sends = 0
        for effect in effects:
            self._perform[type(effect)](effect)
            if isinstance(effect, Send):
                sends += 1
                if sends % _SENDS == 0:
                    await trio.lowlevel.checkpoint()
        if self._check:
            self._machine.check()

    def _on_exit(self, effect: Exit) -> None:
        self._exit = effect.reason
