"""A look at a run before taking part: what it is, and how this computer's line reaches each of its servers.

Visits the coordinator (`Join.visit`: no place, no work), links to the servers by whatever way leads there, measures
each link for a moment, and leaves. Bounded in time and, by the meter, in bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
import trio

from node.links.assemble import WayOptions, assemble
from node.links.callee import Surroundings
from node.links.connector import Connector
from node.links.relay.relayed import Proof
from node.measure.measuring import Measuring
from node.measure.meter import Figures
from node.process.daemon import BUILD
from node.process.state import NodeState
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import MEASURE_S
from protocol.drive.limits import Limits, LineLimits
from protocol.drive.transport import CLOSED_IN_HANDSHAKE, DialError, Link, Transport
from protocol.messages import Join, Leave, Message, Ping, PlanChanged, Pong, Reach, Refused, RunFinished, Welcome
from protocol.run.plan import Plan
from protocol.trust.membership import JoinLink, Trust

ANSWER_S = 20.0
"""How long the coordinator may take to accept the link."""
PATIENCE_S = 3.0
"""After so long without a welcome the person is told what is waited for: a run begins when its servers are there."""
PLAN_S = 2.0
"""The plan follows the welcome at once; a coordinator that begins anew may have none."""
CONNECT_S = 7.0
"""All servers together, side by side: the slowest way is given up after 6 s."""
SETTLE_S = 2.0
"""A relay is often there first; so long a better way may take its place before links are measured."""
MEASURE_ALL_S = 6.0
"""All servers together, one after the other, of which each takes MEASURE_S at most."""
SERVERS_MAX = 24
"""Of a larger run the first of every stage, then the others: a sample is enough to choose by."""
CLOSE_S = 1.0


@dataclass(slots=True)
class Reached:
    """One server as seen from here."""

    node: NodeId
    stage: int
    role: str
    """front or back"""
    path: str = ""
    """Empty: no way led there."""
    address: str = ""
    connect_s: float = 0.0
    figures: Figures | None = None
    loss: float | None = None
    """Share of packets that were lost or sent again, where the way counts them."""
    problem: str = ""
    """Why no way led there."""


@dataclass(slots=True)
class Survey:
    """What a visit found."""

    welcome: Welcome
    connect_s: float
    """To reach the coordinator and prove who is who."""
    plan: Plan | None = None
    reach: Reach | None = None
    servers: list[Reached] = field(default_factory=list)
    asked: int = 0
    """Servers that were tried; more may be in the plan."""
    finished: bool = False
    """The run is over: nobody is needed any more."""

    @property
    def measured(self) -> tuple[tuple[NodeId, str, Figures], ...]:
        """(server, path, figures) of each link that was measured."""
        return tuple((found.node, found.path, found.figures) for found in self.servers if found.figures is not None)


def best_stage(servers: list[Reached]) -> int:
    """The stage to whose servers this computer's mean bandwidth is highest (the hybrid paper's choice), or -1.

    -1 also when no stage is clearly better than another: the coordinator knows better where power is missing.
    """
    means: dict[int, float] = {}
    for stage in sorted({found.stage for found in servers}):
        rates = []
        for found in servers:
            if found.stage == stage:
                figures = found.figures
                rates.append(0.0 if figures is None else (figures.sent_bytes_per_s + figures.received_bytes_per_s) / 2)
        means[stage] = sum(rates) / len(rates)
    if len(means) < 2:
        return -1
    first, second = sorted(means, key=lambda stage: -means[stage])[:2]
    return first if means[first] > CLEARLY * means[second] else -1


CLEARLY = 1.25
"""Two measurements of one line lie closer together than this."""


def answer_ping(link: Link, message: Message) -> bool:
    """Whether the message was a ping; it is answered: who waits for a run to begin may have to wait for long."""
    if not isinstance(message, Ping):
        return False
    link.send(Pong(number=message.number))
    return True


async def survey(
    link: JoinLink,
    state: NodeState,
    line: LineLimits,
    ways: WayOptions,
    *,
    tell: Callable[[str], None] = lambda sentence: None,
    measure: bool = True,
    wait_for_run: bool = True,
) -> Survey:
    """Visits the run. Raises `BadInputError` when its coordinator cannot be asked.

    `tell` says what is waited for; without `wait_for_run` a run that has not begun is a `BadInputError`.
    """
    # What links say in the log is for daemons; here the caller says what matters.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    limits = line.open(state.folder)
    try:
        async with trio.open_nursery() as nursery:
            visit = _Visit(nursery, link, state, limits, ways)
            found = await visit.ask(tell, wait_for_run)
            if measure and found.plan is not None and not found.finished:
                await visit.look_at_servers(found)
            await visit.leave()
            nursery.cancel_scope.cancel()
        return found
    except BaseExceptionGroup as group:
        # The nursery wraps what `ask` raises.
        named = group.subgroup(BadInputError)
        while isinstance(named, BaseExceptionGroup):
            named = named.exceptions[0]  # type: ignore[assignment]
        if named is None:
            raise
        raise named from None
    finally:
        limits.close()


def what_to_do(failure: str, wall_s: float) -> str:
    """What went wrong on the way to the coordinator, and what the owner of this computer can do about it."""
    if not failure:
        return "it closed the link; try again in a minute"
    if CLOSED_IN_HANDSHAKE in failure:
        clock = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(wall_s))
        return (
            f"{failure}. Its link may have been closed, used up or too old: ask for a new one. Or this computer's clock"
            f" is wrong: it says {clock}. Or this computer was banned"
        )
    if "HTTP server or proxy" in failure or "newest Barnraise" in failure:
        return failure
    return (
        f"{failure}. Look whether this computer is online and the link is the newest; a firewall must let outgoing TCP"
        " pass to its address; or the coordinator is down, so try again later"
    )


class NobodyAnswersError(BadInputError):
    """The coordinator cannot be asked just now; it may be there in a minute."""


class _Visit:
    """The events of the links of one visit."""

    def __init__(
        self, nursery: trio.Nursery, link: JoinLink, state: NodeState, limits: Limits, ways: WayOptions
    ) -> None:
        self._link = link
        self._state = state
        self._answer: Welcome | Refused | None = None
        self._answered = trio.Event()
        self._plan: Plan | None = None
        self._planned = trio.Event()
        self._finished = False
        self._reach: Reach | None = None
        self._reached: dict[NodeId, trio.Event] = {}
        self._problems: dict[NodeId, str] = {}
        trust = Trust(link.run_id, link.coordinator_key)

        def admit(key: bytes, credential: bytes) -> str:
            return trust.admit(key, credential, time.time())

        self._transport = Transport(
            nursery,
            identity=state.identity,
            role="volunteer",
            run_id=link.run_id,
            credential=state.credential,
            admit=admit,
            events=self,
            limits=limits,
        )
        self._connector: Connector = assemble(
            nursery,
            transport=self._transport,
            proof=Proof(state.identity, link.run_id, state.credential, admit),
            link=link,
            role="volunteer",
            options=ways,
            surroundings=Surroundings((), ()),
            give_up=self._give_up,
            record=lambda *values, **labels: None,
            rejected=self.on_rejected,
            count_relayed=lambda metric, value, labels: None,
        )
        self._measuring = Measuring(self)
        nursery.start_soon(self._measuring.run)

    # ---- the visit -----------------------------------------------------------------------------------------------

    async def ask(self, tell: Callable[[str], None], wait_for_run: bool) -> Survey:
        """Run and plan. Raises `BadInputError`."""
        failure = ""
        began = trio.current_time()
        connect_s = 0.0
        try:
            with trio.fail_after(ANSWER_S):
                await self._transport.dial(self._link.addresses, self._link.coordinator)
                connect_s = trio.current_time() - began
            with trio.move_on_after(PATIENCE_S):
                await self._answered.wait()
            if not self._answered.is_set():
                waiting = "The run has not begun: its servers are not all there."
                if not wait_for_run:
                    raise BadInputError(waiting)
                tell(f"{waiting} Waiting (Ctrl-C leaves) …")
                await self._answered.wait()
        except DialError as error:
            failure = str(error)
        except trio.TooSlowError:
            failure = "no answer in time"
        if isinstance(self._answer, Refused):
            raise BadInputError(f"the coordinator refuses this computer: {self._answer.reason}")
        if self._answer is None:
            raise NobodyAnswersError(f"the run's coordinator cannot be asked: {what_to_do(failure, time.time())}")
        with trio.move_on_after(PLAN_S):
            await self._planned.wait()
        return Survey(self._answer, connect_s, self._plan, self._reach, finished=self._finished)

    async def look_at_servers(self, found: Survey) -> None:
        """Links to the servers side by side, then measures one after the other."""
        assert found.plan is not None
        ranked = sorted(
            (rank, stage, server)
            for stage, placed in enumerate(found.plan.stages)
            for rank, server in enumerate(placed.servers)
        )
        chosen = [(stage, server) for _, stage, server in ranked[:SERVERS_MAX]]
        found.asked = len(chosen)
        found.servers = [Reached(server.node, stage, server.role) for stage, server in chosen]
        addresses = {server.node: server.addresses for _, server in chosen}
        began = trio.current_time()
        with trio.move_on_after(CONNECT_S):
            async with trio.open_nursery() as nursery:
                for server in found.servers:
                    nursery.start_soon(self._connect, server, addresses[server.node], began)
        linked = [server for server in found.servers if server.path]
        with trio.move_on_after(SETTLE_S):
            while any(self._path_to(server.node) == "relay" for server in linked):
                await trio.sleep(0.1)
        share_s = min(MEASURE_S, MEASURE_ALL_S / max(1, len(linked)))
        for server in linked:
            for _ in range(2):  # again when a better way took the link's place meanwhile
                link = self._transport.link_to(server.node)
                if link is None:
                    break
                with trio.move_on_after(MEASURE_S + 1.0):
                    server.figures = await self._measuring.measure(link, share_s)
                if server.figures is not None:
                    break
            link = self._transport.link_to(server.node)
            if link is not None:
                server.path, server.address, server.loss = link.path, link.address, link.loss

    def _path_to(self, peer: NodeId) -> str:
        link = self._transport.link_to(peer)
        return "" if link is None else link.path

    async def _connect(self, server: Reached, addresses: tuple[str, ...], began: float) -> None:
        """Until the link is there; a way that fails is tried again while there is time."""
        server.problem = f"no way led there within {CONNECT_S:.0f} s"
        while True:
            reached = self._reached[server.node] = trio.Event()
            self._problems.pop(server.node, None)
            self._connector.dial(server.node, addresses)
            await reached.wait()
            link = self._transport.link_to(server.node)
            if link is not None:
                server.path, server.address, server.problem = link.path, link.address, ""
                server.connect_s = trio.current_time() - began
                return
            server.problem = self._problems.get(server.node, server.problem)
            await trio.sleep(0.5)

    async def leave(self) -> None:
        """Says goodbye to everybody."""
        for link in self._transport.links:
            if link.role == "coordinator":
                link.send(Leave(reason="only looked"))
            link.close("only looked")
        with trio.move_on_after(CLOSE_S):
            while self._transport.links:
                await trio.sleep(0.02)

    # ---- what links tell -----------------------------------------------------------------------------------------

    def _give_up(self, peer: NodeId, reason: str) -> None:
        self._problems[peer] = reason
        self._reached.get(peer, trio.Event()).set()

    def on_up(self, link: Link) -> None:
        self._connector.on_up(link)
        self._measuring.up(link)
        self._reached.get(link.peer, trio.Event()).set()
        if link.role == "coordinator":
            link.send(
                Join(
                    role="volunteer",
                    addresses=(),
                    local_addresses=(),
                    build=BUILD,
                    tokens_per_s=0.0,
                    memory_bytes=0,
                    stage=-1,
                    shard=-1,
                    version=-1,
                    held_generation=-1,
                    checkpoints=(),
                    visit=True,
                )
            )

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if (
            answer_ping(link, message)
            or self._measuring.take(link, message)
            or link.role != "coordinator"
            or self._connector.on_message(message)
        ):
            return
        if isinstance(message, Welcome | Refused) and self._answer is None:
            if isinstance(message, Welcome):
                self._state.keep(message)  # servers want to see the membership
            self._answer = message
            self._answered.set()
        elif isinstance(message, PlanChanged):
            self._plan = message.plan
            self._planned.set()
        elif isinstance(message, Reach):
            self._reach = message
        elif isinstance(message, RunFinished):
            self._finished = True
            self._planned.set()  # there may never be one

    def on_down(self, link: Link, reason: str) -> None:
        with suppress(KeyError):
            self._problems.setdefault(link.peer, reason)
        self._connector.on_down(link, reason)
        self._measuring.down(link)
        if link.role == "coordinator":
            self._answered.set()

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        """The dial says it too."""

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """No metrics here; the owner's limits count beneath."""

    def refuse(self, link: Link, detail: str) -> None:
        link.close("unexpected")

    def round_trip(self, path: str, seconds: float) -> None:
        """No metrics here."""
