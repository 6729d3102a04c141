"""TCP links on trio (interface; the code follows in the next commits)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from protocol.framing import Buffer
from protocol.identity import Identity
from protocol.ids import NodeId
from protocol.messages import Message


class Link:
    """An open link to a proven peer. All methods are synchronous and never block; call them on trio's thread."""

    peer: NodeId
    role: str
    public_key: bytes
    credential: bytes
    address: str
    dialled: bool

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message; `buffers[i]` is the wire form of `message.tensors[i]` (whose keys must be 0, 1, …).

        Does nothing when the link is closing. Closes the link when more than `send_queue_bytes` wait.
        """

    def close(self, reason: str) -> None:
        """Send what is queued without tensors, then a clean end; `on_down` follows with this reason."""


class LinkEvents(Protocol):
    """What the owner of links is told, on trio's thread."""

    def on_up(self, link: Link) -> None:
        """A link is proven. Called before any of its messages."""

    async def on_message(self, link: Link, message: Message, buffers: tuple[bytearray, ...]) -> None:
        """A message with its tensors. While this awaits, the link reads no further: that is the back-pressure."""

    def on_down(self, link: Link, reason: str) -> None:
        """The link is gone, for a reason of ours or the peer's. Called once for each `on_up`."""

    def on_rejected(self, address: str, reason: str, detail: str) -> None:
        """A peer broke the protocol (`reason` is one of REJECT_REASONS): its link is or will be closed."""

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Payload moved: direction rx or tx, kind as in the metric barnraise_transport_bytes_total."""


@dataclass(frozen=True)
class LinkOptions:
    """Bounds of links; see `protocol.limits` for the reasons."""

    tensor_bytes_max: int = 64 << 20
    send_queue_bytes: int = 1 << 30


class Transport:
    """Opens links by dialling and by serving, for one identity in one run."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        identity: Identity,
        run_id: bytes,
        credential: Callable[[], bytes],
        admit: Callable[[bytes, bytes], str],
        events: LinkEvents,
        options: LinkOptions | None = None,
    ) -> None:
        """`credential()` is what we show now; `admit(public_key, credential)` gives the peer's role or raises."""

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept links for ever; cancel to stop."""

    async def dial(self, addresses: Sequence[str], peer: NodeId) -> Link:
        """Open a link to `peer` at the first address that answers and proves to be it. Raises `DialError`."""
        raise NotImplementedError


class DialError(Exception):
    """No address led to the peer; says why for each."""


async def open_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listening sockets; port 0 lets the system choose."""
    raise NotImplementedError


_ = (Awaitable, field)
