"""Answers peers that want a link and wrote by way of the coordinator: dials them, punches with them, comes to a relay.

Whatever a note says costs an attempt at most, and few at once; whether there is a link the handshake decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

import structlog
import trio

from node.links.notes import Answer, AnyNote, Knock, KnockAnswer, Meet, No, Offer, fitting
from node.links.post import Post
from node.links.relay.relayed import Proof, open_leg
from protocol.base.errors import DialError, LocalProtocolError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import TEXT_MAX
from protocol.drive.transport import Transport
from protocol.link.reach import same_network, worth_dialling
from protocol.link.relay import link_prologue

ANSWERING_MAX = 64
"""Attempts of peers that are answered at once: a server whose volunteers all lost their way at the same moment."""
ANSWERING_PER_PEER = 6
"""A peer tries punching, dialling and up to four relays side by side."""
ANSWER_S = 10.0
"""Longer than any attempt goes on for."""


class Punched(Protocol):
    """A stream that a puncher made; what it says goes into `Transport.adopt`."""

    @property
    def stream(self) -> trio.abc.Stream: ...
    @property
    def path(self) -> str: ...
    @property
    def prologue(self) -> bytes: ...
    @property
    def initiator(self) -> bool: ...
    @property
    def address(self) -> str: ...


class Punches(Protocol):
    """Who punches: node.links.punch.punched.Puncher. Raises `DialError`; `RemoteProtocolError` if forged."""

    async def start_helper(self) -> None: ...

    async def call(
        self, peer: NodeId, exchange: Callable[[bytes], Awaitable[bytes]], same_site: Callable[[], bool]
    ) -> Punched: ...

    async def answer(
        self, peer: NodeId, offer: bytes, same_site: bool
    ) -> tuple[bytes, Callable[[], Awaitable[Punched]]]: ...


class Surroundings:
    """What this node knows of its place in the network, as the coordinator tells it."""

    def __init__(self, addresses: tuple[str, ...], local_addresses: tuple[str, ...]) -> None:
        self.addresses = addresses
        self.local_addresses = local_addresses
        self.seen_from = ""
        self.stun: tuple[str, ...] = ()
        self.turn: tuple[str, ...] = ()
        self.username = self.password = ""
        self.generation = 0
        """Of the plan."""
        self.relays: dict[NodeId, tuple[str, ...]] = {}
        """Servers that can be dialled, those that are asked to relay first in front."""


async def adopt_punched(transport: Transport, peer: NodeId, punched: Punched, *, switch: bool = False) -> None:
    """A link over what was punched. `switch` counts for the initiator. Raises `DialError`."""
    await transport.adopt(
        punched.stream,
        peer,
        initiator=punched.initiator,
        path=punched.path,
        address=punched.address,
        prologue=punched.prologue,
        switch=switch,
    )


class Callee:
    """Reacts to the notes of peers."""

    def __init__(
        self,
        nursery: trio.Nursery,
        transport: Transport,
        proof: Proof,
        post: Post,
        surroundings: Surroundings,
        puncher: Punches | None,
    ) -> None:
        self._nursery = nursery
        self._transport = transport
        self._proof = proof
        self._post = post
        self._here = surroundings
        self._puncher = puncher
        self._answering: Counter[NodeId] = Counter()
        self._log = structlog.get_logger("links")

    def take(self, peer: NodeId, note: AnyNote, seen_from: str) -> None:
        """A note that is no answer to one of ours. `seen_from`: the host that the coordinator sees its sender at."""
        if self._answering.total() >= ANSWERING_MAX or self._answering[peer] >= ANSWERING_PER_PEER:
            self._refuse(peer, note.number, "too many attempts at once")
            return
        works = {Knock: self._dial_back, Offer: self._punch, Meet: self._meet}
        work = works.get(type(note))
        if work is not None:
            self._answering[peer] += 1  # here, not in the task: many notes come in one breath
            self._nursery.start_soon(self._within_bounds, peer, note, seen_from, work)

    async def _within_bounds(
        self,
        peer: NodeId,
        note: AnyNote,
        seen_from: str,
        work: Callable[[NodeId, AnyNote, str], Awaitable[None]],
    ) -> None:
        try:
            with trio.move_on_after(ANSWER_S):
                await work(peer, note, seen_from)
        except (DialError, RemoteProtocolError, LocalProtocolError) as error:
            self._log.debug("peer not reached", peer=peer, note=type(note).__name__, reason=str(error))
            # What became of a dial would tell the peer which doors of our network are open.
            self._refuse(peer, note.number, "you were not reached" if isinstance(note, Knock) else str(error))
        finally:
            self._answering[peer] -= 1
            if not self._answering[peer]:
                del self._answering[peer]

    def _refuse(self, peer: NodeId, number: int, reason: str) -> None:
        try:
            self._post.tell(peer, No(number, reason[:TEXT_MAX]))
        except DialError:
            return  # the coordinator is away, so nobody can be told

    async def _dial_back(self, peer: NodeId, note: AnyNote, seen_from: str) -> None:
        assert isinstance(note, Knock)
        here = self._here
        self._post.tell(peer, KnockAnswer(note.number, fitting(here.addresses), fitting(here.local_addresses)))
        addresses = worth_dialling(note.addresses, note.local_addresses, here.seen_from, seen_from)
        if addresses:
            # The peer asks for it: what we have to it may be dead at its end, or worse than what it looks for.
            await self._transport.dial(addresses, peer, switch=True)

    async def _punch(self, peer: NodeId, note: AnyNote, seen_from: str) -> None:
        assert isinstance(note, Offer)
        if self._puncher is None:
            raise DialError("punching is switched off here")
        same_site = same_network(self._here.seen_from, seen_from)
        answer, finish = await self._puncher.answer(peer, note.content, same_site)
        self._post.tell(peer, Answer(note.number, answer))
        await adopt_punched(self._transport, peer, await finish())

    async def _meet(self, peer: NodeId, note: AnyNote, _seen_from: str) -> None:
        assert isinstance(note, Meet)
        addresses = self._here.relays.get(note.relay, ())
        if not addresses:
            raise DialError("that relay is not known here")
        stream = await open_leg(addresses, note.relay, note.meeting, self._proof, self._transport)
        await self._transport.adopt(
            stream,
            peer,
            initiator=False,
            path="relay",
            address=f"relay {note.relay[:8]}",
            prologue=link_prologue(note.meeting),
        )
