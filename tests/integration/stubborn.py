"""`python -m tests.integration.stubborn join …`: a volunteer that is told to go, and does not."""

from __future__ import annotations

from node.core import NodeMachine
from protocol.base.ids import NodeId
from protocol.cli import main
from protocol.messages import Message, Refused, Revoked

_received = NodeMachine._received


def _deaf(self: NodeMachine, peer: NodeId, message: Message, now: float, size: float = 0.0) -> None:
    """It hears no refusal and no list of bans; everything else is the ordinary volunteer, membership included."""
    if not isinstance(message, Refused | Revoked):
        _received(self, peer, message, now, size)


if __name__ == "__main__":
    NodeMachine._received = _deaf  # type: ignore[method-assign]
    main()
