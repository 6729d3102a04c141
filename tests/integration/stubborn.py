"""`python -m tests.integration.stubborn join …`: a volunteer that is told to go, and does not."""

from __future__ import annotations

from typing import Any

from node.core import NodeMachine
from protocol.cli import main
from protocol.messages import Refused, Revoked

_received = NodeMachine._received


def _deaf(self: NodeMachine, peer: Any, message: Any, *more: Any) -> None:
    """It hears no refusal and no list of bans; everything else is the ordinary volunteer, membership included."""
    if not isinstance(message, Refused | Revoked):
        _received(self, peer, message, *more)


if __name__ == "__main__":
    NodeMachine._received = _deaf  # type: ignore[method-assign]
    main()
