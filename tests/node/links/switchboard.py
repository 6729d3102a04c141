"""Nodes with connectors around a coordinator that only carries signals: everything on loopback, in one process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
import trio.testing

from node.links.callee import Surroundings
from node.links.connector import Connector
from node.links.relay.relay_desk import RelayLimits
from node.links.relay.relayed import Proof, RelayServer
from protocol.base.errors import DialError
from protocol.base.ids import NodeId
from protocol.drive.transport import Link
from protocol.messages import Message, Signal
from protocol.run.course import line
from protocol.run.plan import Plan, ServerPlan, StagePlan
from tests.protocol.drive.harness import PATIENCE_S, Recorder, Station, admit_all, stations
from tests.protocol.samples import RUN_ID


@dataclass
class FakePunched:
    """A stream that somebody made out of nothing."""

    stream: trio.abc.Stream
    prologue: bytes
    initiator: bool
    path: str = "quic"
    address: str = "192.0.2.1:9"


class FakePuncher:
    """Punches through an in-memory wire that both sides know by the offer; `works` may change at any time."""

    wires: dict[bytes, tuple[trio.abc.Stream, trio.abc.Stream]]

    def __init__(self, wires: dict[bytes, tuple[trio.abc.Stream, trio.abc.Stream]]) -> None:
        self._wires = wires
        self.works = True
        self.delay_s = 0.0
        self.calls = 0
        self.warm = False

    async def start_helper(self) -> None:
        self.warm = True
        await trio.lowlevel.checkpoint()

    async def call(
        self, peer: NodeId, exchange: Callable[[bytes], Awaitable[bytes]], same_site: Callable[[], bool]
    ) -> FakePunched:
        self.calls += 1
        offer = os.urandom(16)
        self._wires[offer] = trio.testing.memory_stream_pair()
        answer = await exchange(offer)
        await trio.sleep(self.delay_s)
        if not self.works:
            raise DialError("no packet came through")
        return FakePunched(self._wires[offer][0], b"punched" + offer + answer, initiator=True)

    async def answer(
        self, peer: NodeId, offer: bytes, same_site: bool
    ) -> tuple[bytes, Callable[[], Awaitable[FakePunched]]]:
        if not self.works:
            raise DialError("no UDP here")
        answer = os.urandom(16)

        async def finish() -> FakePunched:
            if offer not in self._wires:
                raise DialError("the peer did not come")
            return FakePunched(self._wires[offer][1], b"punched" + offer + answer, initiator=False)

        await trio.lowlevel.checkpoint()
        return answer, finish


@dataclass
class Node(Recorder):
    """One node: the driver's part of its events, and what was given up."""

    station: Station = field(init=False)
    connector: Connector = field(init=False)
    puncher: FakePuncher | None = None
    relay: RelayServer | None = None
    given_up: list[str] = field(default_factory=list)
    counted: list[tuple[str, float, dict[str, str]]] = field(default_factory=list)

    @property
    def node(self) -> NodeId:
        return self.station.identity.node

    def link_to(self, other: Node) -> Link | None:
        return self.station.transport.link_to(other.node)

    def on_up(self, link: Link) -> None:
        self.connector.on_up(link)
        super().on_up(link)

    def on_moved(self, link: Link) -> None:
        self.connector.on_moved(link)
        self._notify()

    def on_down(self, link: Link, reason: str) -> None:
        self.connector.on_down(link, reason)
        super().on_down(link, reason)

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if link.role != "coordinator" or not self.connector.on_message(message):
            await super().on_message(link, message, buffers)

    def give_up(self, peer: NodeId, sentence: str) -> None:
        self.given_up.append(sentence)
        self._notify()

    def record(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self.counted.append((metric, value, labels))

    async def linked(self, other: Node, path: str) -> Link:
        """Waits for a link to `other` by this way; one that moves is no event."""
        with trio.fail_after(PATIENCE_S):
            while True:
                link = self.link_to(other)
                if link is not None and link.path == path:
                    return link
                await trio.sleep(0.005)


class Switchboard(Recorder):
    """The coordinator's part: hands signals on, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.carries = True
        self.seen_from: dict[NodeId, str] = {}
        """Where the coordinator sees a node; those that are not in here at loopback, where they are."""
        self.signals: list[tuple[NodeId, Signal]] = []

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if not isinstance(message, Signal):
            return
        self.signals.append((link.peer, message))
        other = next((other for other in self.up if other.peer == message.peer and not other.closing), None)
        if other is None:
            link.send(Signal(peer=message.peer, content=b""))
        elif self.carries:
            seen_from = self.seen_from.get(link.peer, "127.0.0.1")
            other.send(Signal(peer=link.peer, content=message.content, seen_from=seen_from))


@asynccontextmanager
async def switchboard(
    *roles: str, relays: int = 0, punchers: bool = True, addresses: bool = False, limits: RelayLimits | None = None
) -> AsyncIterator[tuple[Switchboard, list[Node]]]:
    """Nodes of these roles, linked to the coordinator; the first `relays` of them relay and can be dialled.

    `addresses`: the others say where they can be dialled, too.
    """
    wires: dict[bytes, tuple[trio.abc.Stream, trio.abc.Stream]] = {}
    async with stations("coordinator", *roles) as (hub, *made), trio.open_nursery() as nursery:
        board = Switchboard()
        hub.transport.events = board
        nodes = []
        for number, (role, station) in enumerate(zip(roles, made, strict=True)):
            node = Node()
            node.station = station
            node.puncher = FakePuncher(wires) if punchers else None
            proof = Proof(station.identity, RUN_ID, role.encode, admit_all)
            known = (station.address,) if number < relays or addresses else ()
            node.connector = Connector(
                nursery,
                transport=station.transport,
                proof=proof,
                coordinator=hub.identity.node,
                surroundings=Surroundings((), known),
                puncher=node.puncher,
                give_up=node.give_up,
                record=node.record,
            )
            node.connector.here.seen_from = "127.0.0.1"
            station.transport.on_moved = node.on_moved
            station.transport.events = node
            if number < relays:
                node.relay = RelayServer(
                    proof, limits or RelayLimits(), rejected=node.on_rejected, count=lambda *_: None
                )
                station.transport.guests = node.relay
            nursery.start_soon(node.connector.run)
            nodes.append(node)
        plan = plan_of(nodes[:relays])
        for node in nodes:
            node.connector.set_plan(plan)
            await node.station.transport.dial((hub.address,), hub.identity.node)
        with trio.fail_after(PATIENCE_S):
            while len(board.up) < len(nodes):
                await trio.sleep(0.01)
        yield board, nodes
        nursery.cancel_scope.cancel()
        for pair in wires.values():
            for stream in pair:
                await trio.aclose_forcefully(stream)


def plan_of(servers: list[Node]) -> Plan:
    """A plan with these servers, as far as a connector looks at one."""
    placed = tuple(
        ServerPlan(node=server.node, role="front", addresses=(server.station.address,) if server.relay else ())
        for server in servers
    )
    stage = StagePlan(servers=placed)
    return Plan(generation=1, ledger_generation=1, restore_step=-1, stages=(stage,), course=line(1, 1))
