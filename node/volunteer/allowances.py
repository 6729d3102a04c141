"""What servers give this volunteer less of, and why: for its owner's screen and for the run's status."""

from __future__ import annotations

import math

from node.machine.outbox import Outbox
from protocol.base.ids import NodeId
from protocol.messages import Allowance

NO_WORK = "a server gives no work for a while"
LITTLE_WORK = "a server gives one task at a time"
AS_BEFORE = "a server gives work as before"
COUNT_S = 60.0
"""The owner's screen counts minutes."""


class Allowances:
    """The servers that give us nothing at present: until when, and why."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._rests: dict[NodeId, tuple[float, str]] = {}
        self._now = float("-inf")

    def told(self, server: NodeId, word: Allowance, now: float) -> None:
        why = {"reason": word.reason} if word.reason else {}
        if word.leases_max == 0:
            self._out.log("warning", NO_WORK, server=server, seconds=round(word.seconds), **why)
        else:
            self._out.log("info", AS_BEFORE if word.leases_max < 0 else LITTLE_WORK, server=server, **why)
        self._now = now
        self.forget(server)
        if word.leases_max == 0:
            self._rests[server] = (now + word.seconds, word.reason)

    def forget(self, server: NodeId) -> None:
        self._rests.pop(server, None)

    def forget_all(self) -> None:
        """Other servers, or other ledgers: who rules there says so itself."""
        self._rests.clear()

    def wake_at(self) -> float | None:
        """When what is said of a rest is no longer true."""
        if not self._rests:  # asked after every input
            return None
        return min((min(until, self._now + COUNT_S) for until, _ in self._rests.values()), default=None)

    def wake(self, now: float) -> None:
        self._now = now
        for server in [server for server, (until, _) in self._rests.items() if until <= now]:
            self.forget(server)

    def sentence(self) -> str:
        """What the owner should know, or nothing; it reads after "waits for"."""
        if not self._rests:
            return ""
        server, (until, reason) = next(iter(self._rests.items()))
        minutes = math.ceil(max(1.0, until - self._now) / 60.0)
        return f"server {server[:8]}, which gives it no work for {minutes} more min: {reason}"
