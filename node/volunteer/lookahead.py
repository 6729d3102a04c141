"""How many forwards a volunteer asks for before it can begin them: as many as its device does until the next lease is
there, and not as many as it has memory for.

What is leased to one member waits for its device, whoever else is idle; who leaves takes it along, and who comes finds
nothing. On lines of 2.5 Gbit/s a stage's first four members were given all 44 forwards of a step that were ready, and
the last one began 29 seconds after it had come. So a slot is asked for no earlier than needed: the next lease should be
here when the device is done with those before it. How long one takes from the asking to its last byte is the least of
the newest ones, since most are not ready yet when they are asked for.

A home line does not feel this: its lease of 1.1 B parameters is 0.4 s on the way and 0.1 s in the device, and what
fills its memory is results that wait for the uplink, which are begun.
"""

from __future__ import annotations

import math
from collections import deque

from node.volunteer.leases import Held, leaves_graph
from protocol.base.ids import NodeId

SPARE = 2
"""More than what a device does meanwhile: one of which it is in the middle, and one because ways differ. What there is
to begin with, too."""
KEPT = 32
"""Of the newest leases, and forwards. A step of 64 microbatches brings a member of a small stage so many."""


class Lookahead:
    """Of one volunteer at one stage. Pure: time is handed in, in seconds."""

    def __init__(self) -> None:
        self._asked_at: dict[NodeId, deque[float]] = {}
        """By server: slots that no lease has come for."""
        self._ways_s: deque[float] = deque(maxlen=KEPT)
        self._forwards_s: deque[float] = deque(maxlen=KEPT)
        self._running: tuple[Held, float] | None = None
        """A forward, and since when."""

    def link_down(self, server: NodeId) -> None:
        """Its slots are void."""
        self._asked_at.pop(server, None)

    def asked(self, server: NodeId, slots: int, now: float) -> None:
        """So many slots for forwards are given to it."""
        self._asked_at.setdefault(server, deque()).extend([now] * slots)

    def came(self, server: NodeId, now: float) -> None:
        """A forward that has used up one of these."""
        asked_at = self._asked_at.get(server)
        if asked_at:
            self._ways_s.append(now - asked_at.popleft())

    def device_is_at(self, running: Held | None, now: float) -> None:
        """Looked at whenever it may have changed. Of a sample in segments each one counts by itself."""
        if self._running is not None and running is not self._running[0]:
            self._forwards_s.append(now - self._running[1])
            self._running = None
        if self._running is None and running is not None and leaves_graph(running.lease):
            self._running = running, now

    @property
    def forwards_max(self) -> int | None:
        """That may be asked for or wait, of each position; None: as many as there is memory for."""
        if not self._ways_s or not self._forwards_s:
            return SPARE
        forward_s = min(self._forwards_s)
        return SPARE + math.ceil(min(self._ways_s) / forward_s) if forward_s > 0 else None
