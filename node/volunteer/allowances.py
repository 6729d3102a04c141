"""What servers give this volunteer less of, and why: for its owner's screen and for the run's status."""

from __future__ import annotations

from node.machine.outbox import Outbox
from protocol.base.ids import NodeId
from protocol.messages import Allowance


class Allowances:
    """The last word of each server that did not let us have as many leases as we ask for."""

    def __init__(self, out: Outbox) -> None:
        self._out = out
        self._words: dict[NodeId, Allowance] = {}

    def told(self, server: NodeId, word: Allowance) -> None:
        self._out.log(
            "warning" if word.leases_max == 0 else "info", "a server gives less work, or more again",
            server=server, leases_max=word.leases_max, seconds=word.seconds, reason=word.reason,
        )  # fmt: skip
        if word.leases_max < 0:
            self._words.pop(server, None)
        else:
            self._words[server] = word

    def forget(self, server: NodeId) -> None:
        self._words.pop(server, None)

    def sentence(self) -> str:
        """What the owner should know, or nothing; it reads after "waits for"."""
        out = {server: word for server, word in self._words.items() if word.leases_max == 0}
        if not out:
            return ""
        server, word = next(iter(out.items()))
        return f"server {server[:8]}, which gives no work for {word.seconds / 60:.0f} minutes, because {word.reason}"
