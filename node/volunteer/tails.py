"""Whether a step has more work for this volunteer: what its servers have given, and what they say is left."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.base.ids import NodeId

OPEN_STEPS_MAX = 8
"""Steps after the newest closed one that can be open (three, with a delayed update), and some for words on the way: no
server makes us remember without end."""


class Tails:
    """Counts leases by step and server, on each server's present link."""

    def __init__(self) -> None:
        self._received: dict[int, dict[NodeId, int]] = {}
        self._told: dict[int, dict[NodeId, int]] = {}
        """Step -> servers that have no more work of it for us, and how many leases they had given by then."""
        self._closed = -1

    def leased(self, step: int, server: NodeId) -> None:
        if self._may_be_open(step):
            received = self._received.setdefault(step, {})
            received[server] = received.get(server, 0) + 1

    def told(self, step: int, server: NodeId, leases: int) -> None:
        """The server has nothing more of the step, after so many leases: the word may overtake the last of them."""
        if self._may_be_open(step):
            self._told.setdefault(step, {})[server] = leases

    def has_come(self, step: int, servers: Iterable[NodeId]) -> bool:
        """Whether none of the servers has more work of the step, and all that they gave has come. A lease that was
        given after the word makes it void: of what comes back of a step there may be more than fits into the slots."""
        told, received = self._told.get(step, {}), self._received.get(step, {})
        return all(server in told and told[server] == received.get(server, 0) for server in servers)

    def link_down(self, server: NodeId) -> None:
        for table in (*self._received.values(), *self._told.values()):
            table.pop(server, None)

    def forget(self, step: int | None) -> None:
        """Steps up to `step` are closed; None: other ledgers begin."""
        self._closed = -1 if step is None else max(step, self._closed)
        for table in (self._received, self._told):
            for number in [number for number in table if step is None or number <= step]:
                del table[number]

    def _may_be_open(self, step: int) -> bool:
        return self._closed < step <= self._closed + OPEN_STEPS_MAX
