"""A peer that obeys no rule: a real identity with real papers, real keys after the handshake, and then anything at all.

It is made of the protocol's own pieces, but sends what `protocol.link.framing` would never let an honest node send.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import trio

from protocol.base.forms import FORM_ITEM_BYTES
from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import RECORD_BYTES_MAX, WINDOW_BYTES
from protocol.link.codec import PROTOCOL_MINOR
from protocol.link.framing import Frame, Framing, MessageArrived
from protocol.messages import Join, Message, PlanChanged, Welcome
from protocol.run.plan import Plan
from protocol.trust.handshake import ENTROPY_BYTES, NO_COOKIE, CookieDemanded, Initiator, Session
from protocol.trust.identity import Identity
from protocol.trust.membership import JoinLink
from protocol.trust.records import STREAM_HEADER_BYTES, RecordWriter

T = TypeVar("T")
PATIENCE_S = 60.0
_streams: list[trio.SocketStream] = []
"""Every connection that was opened; `attack` closes what is left."""


def attack(strike: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Runs an attack to its end under trio, and leaves no connection open whatever becomes of it."""

    async def run() -> T:
        try:
            return await strike(*arguments)
        finally:
            while _streams:
                _streams.pop().socket.close()

    return trio.run(run)


@dataclass(frozen=True)
class Papers:
    """What a node needs to be heard: who it is, what it may show, and what it was told."""

    identity: Identity
    run_id: bytes
    role: str
    credential: bytes = b""
    plan: Plan | None = None
    welcome: Welcome | None = None

    @property
    def generation(self) -> int:
        assert self.plan is not None
        return self.plan.ledger_generation

    def but(self, **changes: Any) -> Papers:
        return replace(self, **changes)


class RawLink:
    """A TCP connection on which anything can be sent; with `session`, also whole records under the right keys."""

    def __init__(self, stream: trio.SocketStream, session: Session | None = None, role: str = "") -> None:
        self.stream = stream
        self.session = session
        self._numbers = 0
        if session is not None:
            header = os.urandom(STREAM_HEADER_BYTES)
            self.writer = RecordWriter(session.send_key, header)
            self._header = header
            # Only for reading: it knows how to take the peer's frames apart.
            self._reader = Framing(session, role=role, header=os.urandom(STREAM_HEADER_BYTES))

    @classmethod
    async def connect(cls, address: str) -> RawLink:
        """Only TCP: no handshake yet."""
        host, _, port = address.rpartition(":")
        with trio.fail_after(PATIENCE_S):
            stream = await trio.open_tcp_stream(host, int(port))
        _streams.append(stream)
        return cls(stream)

    @classmethod
    async def open(cls, address: str, peer: NodeId, papers: Papers, *, hello: bool = True) -> RawLink:
        """After a right handshake with `papers`, and the first frame unless `hello` is False."""
        cookie = NO_COOKIE
        while True:
            raw = await cls.connect(address)
            handshake = Initiator(
                identity=papers.identity,
                credential=papers.credential,
                run_id=papers.run_id,
                peer=peer,
                entropy=os.urandom(ENTROPY_BYTES),
                admit=lambda key, credential: "server" if credential else "coordinator",
                cookie=cookie,
            )
            try:
                with trio.fail_after(PATIENCE_S):
                    await raw.stream.send_all(handshake.data_to_send())
                    session = None
                    while session is None:
                        data = await raw.stream.receive_some(4096)
                        assert data, "the peer closed the connection in the handshake"
                        session = handshake.receive(bytes(data))
            except BaseException:
                raw.stream.socket.close()  # an attack that calls thousands of times would run out of descriptors
                raise
            if isinstance(session, CookieDemanded):
                cookie = session.cookie
                await raw.stream.aclose()
                continue
            await raw.stream.send_all(handshake.data_to_send())
            link = cls(raw.stream, session, papers.role)
            if hello:
                await link.hello()
            return link

    async def hello(self, window_bytes: int = WINDOW_BYTES) -> None:
        first = PROTOCOL_MINOR.to_bytes(2, "big") + window_bytes.to_bytes(8, "big")
        await self.raw(self._header + self.writer.seal(Frame.HELLO, first))

    async def raw(self, data: bytes) -> None:
        """Bytes as they are. That the peer has hung up by now is not our worry."""
        with suppress(trio.BrokenResourceError), trio.fail_after(PATIENCE_S):
            await self.stream.send_all(data)

    async def frame(self, kind: int, plain: bytes) -> None:
        await self.raw(self.writer.seal(kind, plain))

    async def say(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        """A message with its tensors as an honest sender cuts them, but whatever it says and whoever may say it."""
        encoded = msgspec.msgpack.encode(message)
        if not buffers:
            await self.frame(Frame.MESSAGE, encoded)
            return
        number = self._numbers.to_bytes(4, "big")
        self._numbers += 1
        await self.frame(Frame.BULK, number + encoded)
        for buffer in buffers:
            for start in range(0, len(buffer), RECORD_BYTES_MAX - 4):
                await self.frame(Frame.CHUNK, number + buffer[start : start + RECORD_BYTES_MAX - 4])

    async def hear(self, *kinds: type[Message]) -> dict[type[Message], Message]:
        """The first message of each of these kinds."""
        heard: dict[type[Message], Message] = {}
        with trio.fail_after(PATIENCE_S):
            while not all(kind in heard for kind in kinds):
                data = await self.stream.receive_some(1 << 16)
                assert data, f"closed before {[kind.__name__ for kind in kinds]}; heard {list(heard)}"
                for event in self._reader.receive(data):
                    if isinstance(event, MessageArrived):
                        heard.setdefault(type(event.message), event.message)
        return heard

    async def is_closed(self) -> None:
        """Waits until the peer has ended the connection, whatever it says before."""
        with trio.fail_after(PATIENCE_S), suppress(trio.BrokenResourceError):
            while await self.stream.receive_some(1 << 16):
                pass
        await trio.aclose_forcefully(self.stream)


async def join(link: JoinLink, seed: int, identity: Identity | None = None) -> Papers:
    """Papers as everybody gets them: by the link that the coordinator printed."""
    papers = Papers(identity or Identity(bytes([seed]) * 32), link.run_id, link.role, link.invite)
    raw = await RawLink.open(link.addresses[0], link.coordinator, papers)
    await raw.say(join_message(link.role))
    heard = await raw.hear(Welcome, PlanChanged)
    await trio.aclose_forcefully(raw.stream)
    welcome, changed = heard[Welcome], heard[PlanChanged]
    assert isinstance(welcome, Welcome) and isinstance(changed, PlanChanged)
    return papers.but(credential=welcome.membership, plan=changed.plan, welcome=welcome)


def join_message(role: str, **facts: Any) -> Join:
    """What a node with nothing on its disk says."""
    fields: dict[str, Any] = {
        "role": role, "addresses": ("127.0.0.1:1",) if role == "server" else (), "build": "test", "tokens_per_s": 0.0,
        "memory_bytes": 1 << 30, "stage": -1, "shard": -1, "version": -1, "held_generation": -1, "checkpoints": (),
    }  # fmt: skip
    return Join(**{**fields, **facts})


def tensor(shape: Iterable[int], form: str = "fp32", **changes: Any) -> TensorRef:
    """A reference to the first tensor of a message."""
    shape = tuple(shape)
    count = 1
    for size in shape:
        count *= size
    ref = TensorRef(0, shape, form, count * FORM_ITEM_BYTES[form])  # type: ignore[arg-type]
    return msgspec.structs.replace(ref, **changes)
