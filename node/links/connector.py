"""Gets this node its links: performs what the ladder orders, and hands signals, plans and addresses to those concerned.

Dial ─▶ Connector ─▶ Ladder ─▶ TCP, knocks, puncher, relays ─▶ Transport.adopt ─▶ the driver's on_up
             ▲
Signal, Reach, PlanChanged from the coordinator
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import structlog
import trio

from node.links.callee import Callee, Punches, Surroundings, adopt_punched
from node.links.ladder import PUNCH, REVERSE, Figures, GiveUp, Ladder, LadderOrder, Stop, Try, Way
from node.links.notes import Answer, AnyNote, Knock, KnockAnswer, Meet, No, Offer, fitting, read_note
from node.links.post import Post
from node.links.relay.relayed import Proof, open_leg
from protocol.base.errors import BadInputError, DialError, LocalProtocolError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.drive.transport import Link, Transport
from protocol.link.reach import host_of, same_network, worth_dialling
from protocol.link.relay import MEETING_BYTES, link_prologue
from protocol.messages import Message, PlanChanged, Reach, Relays, Signal
from protocol.run.plan import Plan
from protocol.trust.membership import check_address

DIAL_BACK_S = 6.0
"""For a peer that was asked to dial us: it has to connect and to prove itself."""
FIGURES_S = 1.0
"""Between two looks at live links."""
REST_S = 0.01
"""Between two looks at what is due, however much happens."""
BUSY_BYTES = 256 << 10
"""A link that has so much waiting at both looks was limited by its line in between, so what it sent is its rate."""
REPLACED = "replaced by a new link"
"""Why the transport says that a link is down whose successor comes with the same breath."""
_NOBODY = NodeId("")
"""For addresses that are no member's: STUN and TURN servers."""
_PATHS_OF = {"direct": ("tcp",), "reverse": ("tcp",), "punch": ("quic", "channel", "relay"), "relay": ("relay",)}
"""What a way may become. One that came to nothing is counted under the first."""


class Connector:
    """Made inside trio; `run` must be running while links are wanted.

    Args:
        give_up: told of a peer to whom no way led, with a sentence.
        record: feeds metrics (`NodeMetrics.record`).
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        transport: Transport,
        proof: Proof,
        coordinator: NodeId,
        surroundings: Surroundings,
        puncher: Punches | None,
        give_up: Callable[[NodeId, str], None],
        record: Callable[..., None],
    ) -> None:
        self.ladder = Ladder()
        self.here = surroundings
        self._nursery = nursery
        self._transport = transport
        self._proof = proof
        self._coordinator = coordinator
        self._coordinator_addresses: tuple[str, ...] = ()
        self._puncher = puncher
        self._give_up = give_up
        self._record = record
        self._post = Post(self._send)
        self._callee = Callee(nursery, transport, proof, self._post, surroundings, puncher)
        self._scopes: dict[tuple[NodeId, Way], trio.CancelScope] = {}
        self._proving: dict[NodeId, trio.Lock] = {}
        self._linked: dict[NodeId, trio.Event] = {}
        """Fired when a link to the peer comes up, whoever opened it."""
        self._changed = trio.Event()
        self._warm = False
        self._told: dict[NodeId, str] = {}
        self._servers: dict[NodeId, tuple[str, ...]] = {}
        """Of the plan, with their addresses."""
        self._spares: dict[NodeId, tuple[str, ...]] = {}
        """Servers without a place in it."""
        self._rates: dict[NodeId, float] = {}
        self._log = structlog.get_logger("links")
        transport.on_path_failed = self.on_path_failed
        self.set_addresses(surroundings.addresses, surroundings.local_addresses)

    # ---- doors for the driver ------------------------------------------------------------------------------------

    def dial(self, peer: NodeId, addresses: tuple[str, ...]) -> None:
        """Open a link, by whatever way leads to the peer; the outcome is `on_up` or `give_up`."""
        if peer == self._coordinator:
            self._coordinator_addresses = addresses
            self._nursery.start_soon(self._dial_coordinator, addresses)
        else:
            self._perform(self.ladder.want(peer, addresses, trio.current_time()))

    def set_addresses(self, addresses: tuple[str, ...], local_addresses: tuple[str, ...]) -> None:
        """From now on anybody can dial us here, our own network there, and nowhere else: peers hear of it in notes."""
        self.here.addresses, self.here.local_addresses = addresses, local_addresses
        self.ladder.set_abilities(can_punch=self._puncher is not None, reachable=bool(addresses))
        self._changed.set()

    def on_up(self, link: Link) -> None:
        """A link is up: the driver passes on what the transport told it."""
        if link.peer == self._coordinator and self._spares:
            # It will name those that are still there; one that has started again does not know what we were told.
            self._spares = {}
            self._set_relays()
        self._came_up(link)

    def _came_up(self, link: Link) -> None:
        self._linked.pop(link.peer, trio.Event()).set()
        self._told.pop(link.peer, None)
        self._rates.pop(link.peer, None)
        if not link.dialled and self.ladder.knows(link.peer):
            # The peer opened it: because we asked it to, or by its own wish.
            way = {"tcp": REVERSE, "relay": Way("relay")}.get(link.path, PUNCH)
            self._perform(self.ladder.opened(link.peer, way, trio.current_time()))

    def on_moved(self, link: Link) -> None:
        """A link goes another way now: to whoever looked for one that is as if it had come up."""
        self._log.info("moved", peer=link.peer, path=link.path)
        self._came_up(link)

    def on_down(self, link: Link, reason: str) -> None:
        """A link is gone."""
        if reason != REPLACED:
            self._perform(self.ladder.fell(link.peer, trio.current_time()))

    def on_path_failed(self, link: Link, reason: str) -> None:
        """For the transport: the link's path carries nothing, and another one is wanted within seconds.

        Whoever wanted the link looks for it; the other side is asked to by what the first one does.
        """
        self._log.info("path failed", peer=link.peer, path=link.path, reason=reason)
        if link.peer == self._coordinator:
            # Our address may have changed: a new connection takes the link over before the machine gives it up, and
            # signals and relays need it.
            self._nursery.start_soon(self._mend_coordinator)
            return
        self._perform(self.ladder.ails(link.peer, trio.current_time()))

    def on_message(self, message: Message) -> bool:
        """Something from the coordinator; True when it was for us alone."""
        match message:
            case Signal():
                self._signal(message)
            case Reach():
                here = self.here
                here.seen_from = message.seen_from
                here.stun, here.turn = self._checked(message.stun), self._checked(message.turn)
                here.username, here.password = message.username, message.password
                self._log.info("seen from outside", host=message.seen_from, stun=len(message.stun))
            case Relays():
                self._spares = {relay.node: relay.addresses for relay in message.relays}
                self._set_relays()
            case PlanChanged():
                self.set_plan(message.plan)
                return False
            case _:
                return False
        return True

    def _checked(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Those that are addresses: what an operator mistyped must cost no node its life."""
        good = []
        for address in addresses:
            try:
                check_address(address)
                if not self._transport.may_dial(_NOBODY, host_of(address)):
                    raise BadInputError(f"{address} lies in a private network, or on this computer")
                good.append(address)
            except BadInputError as error:
                self._log.warning("helper left out", reason=str(error))
        return tuple(good)

    def set_plan(self, plan: Plan) -> None:
        """Servers of the plan that can be dialled may relay."""
        self.here.generation = plan.generation
        self._servers = {server.node: server.addresses for stage in plan.stages for server in stage.servers}
        self._set_relays()
        hidden = not all(self._servers.values())
        if hidden and not self.here.addresses and self._puncher is not None and not self._warm:
            self._warm = True
            self._nursery.start_soon(self._warm_up, self._puncher)

    def _set_relays(self) -> None:
        """Spares first: whose relay dies has lost a path, whose relay holds a shard waits for that too.

        Among equals every node prefers others, so that the load is spread.
        """
        own = self._proof.identity.node
        known = {**self._servers, **self._spares}
        order = sorted(known, key=lambda node: (node not in self._spares, blake2b((own + node).encode()).digest()))
        self.here.relays = {node: known[node] for node in order if known[node] and node != own}
        self.ladder.set_relays(self.here.relays)

    async def _warm_up(self, puncher: Punches) -> None:
        """A server of the plan cannot be dialled, and nor can we: a punch is near, and its helper takes a second."""
        try:
            await puncher.start_helper()
        except DialError as error:
            self._log.warning("punching is not possible", reason=str(error))

    async def run(self) -> None:
        """Wakes the ladder, and shows it what live links give. Never returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_figures)
            while True:
                wake_at = self.ladder.wake_at()
                with trio.move_on_at(trio.current_time() + 3600.0 if wake_at is None else wake_at):
                    await self._changed.wait()
                self._perform(self.ladder.wake(trio.current_time()))
                # Only now: what was just performed is no news, and a loop that woke itself would never rest.
                self._changed = trio.Event()
                await trio.sleep(REST_S)

    # ---- signals -------------------------------------------------------------------------------------------------

    def _send(self, peer: NodeId, content: bytes) -> bool:
        link = self._transport.link_to(self._coordinator)
        if link is None:
            return False
        link.send(Signal(peer=peer, content=content))
        return True

    def _signal(self, signal: Signal) -> None:
        if not signal.content:
            self._post.returned(signal.peer)
            return
        try:
            note = read_note(signal.content)
        except RemoteProtocolError as error:
            self._log.warning("note refused", peer=signal.peer, reason=error.reason, detail=error.detail)
            self._record("barnraise_transport_rejected_messages_total", reason=error.reason)
            return
        if isinstance(note, KnockAnswer | Answer | No):
            self._post.answered(signal.peer, note, signal.seen_from)
        else:
            self._callee.take(signal.peer, note, signal.seen_from)

    # ---- orders --------------------------------------------------------------------------------------------------

    def _perform(self, orders: list[LadderOrder]) -> None:
        for order in orders:
            match order:
                case Try():
                    self._nursery.start_soon(self._try, order)
                case Stop():
                    scope = self._scopes.pop((order.peer, order.way), None)
                    if scope is not None:
                        scope.cancel()
                case GiveUp():
                    if self._told.get(order.peer) != order.sentence:
                        self._told[order.peer] = order.sentence
                        self._log.info("no way to a peer", peer=order.peer, reason=order.brief, ways=order.sentence)
                    self._give_up(order.peer, order.sentence)
        self._changed.set()

    async def _try(self, order: Try) -> None:
        """One way to one peer, until it is proven, has failed, or is not wanted any more."""
        peer, way = order.peer, order.way
        if not self.ladder.is_running(peer, way):
            return  # stopped before it began
        began = trio.current_time()
        link: Link | None = None
        reason = ""
        with trio.CancelScope() as scope:
            self._scopes[peer, way] = scope
            try:
                link = await self._open(order)
            except (DialError, RemoteProtocolError, LocalProtocolError) as error:
                reason = str(error)
        if self._scopes.get((peer, way)) is scope:
            del self._scopes[peer, way]
        if scope.cancelled_caught:
            return
        now = trio.current_time()
        if link is None:
            self._record("barnraise_transport_connects_total", path=_PATHS_OF[way.kind][0], outcome="failed")
            self._perform(self.ladder.failed(peer, way, reason, now))
            return
        self._record("barnraise_transport_connects_total", path=link.path, outcome="ok")
        self._record("barnraise_transport_connect_duration_seconds", now - began, path=link.path)
        self._log.info("linked", peer=peer, path=link.path, way=str(way), seconds=round(now - began, 3))
        self._perform(self.ladder.opened(peer, way, now))

    async def _open(self, order: Try) -> Link:
        match order.way.kind:
            case "direct":
                await self._dial(order)
            case "reverse":
                await self._knock(order)
            case "punch":
                await self._punch(order)
            case "relay":
                await self._relay(order)
        link = self._transport.link_to(order.peer)
        if link is None:
            raise DialError("the link broke as soon as it was there")
        if link.path not in _PATHS_OF[order.way.kind]:
            raise DialError(f"the link came up by another way ({link.path})")
        return link

    async def _dial(self, order: Try) -> None:
        await self._transport.dial(order.addresses, order.peer, switch=order.switch)

    async def _knock(self, order: Try) -> None:
        """Asks the peer to dial us, and dials what it says of itself."""
        peer, here = order.peer, self.here
        linked = self._linked.setdefault(peer, trio.Event())
        number_of: Callable[[int], AnyNote] = lambda number: Knock(  # noqa: E731
            number, fitting(here.addresses), fitting(here.local_addresses)
        )
        answer, seen_from = await self._post.ask(peer, number_of)
        if not isinstance(answer, KnockAnswer):
            raise DialError("the peer answered something else")
        addresses = worth_dialling(answer.addresses, answer.local_addresses, here.seen_from, seen_from)
        neighbours = bool(here.local_addresses) and same_network(here.seen_from, seen_from)
        may_come = bool(here.addresses) or neighbours
        if not addresses and not may_come:
            raise DialError("neither of us can be dialled")
        reason = "the peer did not dial us"
        wait_until = trio.current_time() + DIAL_BACK_S
        came = dialled = False
        async with trio.open_nursery() as both:

            async def hear() -> None:
                nonlocal came
                await linked.wait()
                link = self._transport.link_to(peer)
                if link is None or not link.dialled:
                    came = True
                    both.cancel_scope.cancel()

            if may_come:  # it dials us meanwhile, and may come through where we do not: firewalls differ
                both.start_soon(hear)
            if addresses:
                try:
                    await self._transport.dial(addresses, peer, switch=order.switch)
                    dialled = True
                except (DialError, RemoteProtocolError, LocalProtocolError) as error:
                    reason = str(error)
            both.cancel_scope.deadline = wait_until if may_come and not dialled else trio.current_time()
        if not dialled and not came:
            raise DialError(reason)

    async def _punch(self, order: Try) -> None:
        assert self._puncher is not None, "the ladder knows that we cannot"
        peer = order.peer
        seen_from = ""

        async def exchange(offer: bytes) -> bytes:
            nonlocal seen_from
            answer, seen_from = await self._post.ask(peer, lambda number: Offer(number, offer))
            if not isinstance(answer, Answer):
                raise DialError("the peer answered something else")
            return answer.content

        punched = await self._puncher.call(peer, exchange, lambda: same_network(self.here.seen_from, seen_from))
        await self._prove(
            order, punched.stream, lambda switch: adopt_punched(self._transport, peer, punched, switch=switch)
        )

    async def _relay(self, order: Try) -> None:
        peer, relay = order.peer, order.way.via
        meeting = os.urandom(MEETING_BYTES)
        self._post.tell(peer, Meet(0, relay, meeting))
        stream = await open_leg(order.addresses, relay, meeting, self._proof, self._transport)
        await self._prove(
            order,
            stream,
            lambda switch: self._transport.adopt(
                stream,
                peer,
                initiator=True,
                path="relay",
                address=f"relay {relay[:8]}",
                prologue=link_prologue(meeting),
                switch=switch,
            ),
        )

    async def _prove(self, order: Try, stream: trio.abc.Stream, adopt: Callable[[bool], Awaitable[object]]) -> None:
        """One proof at a time for each peer; `adopt(switch)`, since a link may have come up since the way was begun."""
        lock = self._proving.setdefault(order.peer, trio.Lock())
        try:
            await lock.acquire()
        except BaseException:  # another way was quicker, so nobody wants this stream any more
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)
            raise
        try:
            await adopt(self.ladder.takes_over(order.peer, order.way))
        finally:
            lock.release()

    async def _dial_coordinator(self, addresses: tuple[str, ...]) -> None:
        """The coordinator is there for everybody, so TCP leads to it or nothing does."""
        began = trio.current_time()
        try:
            await self._transport.dial(addresses, self._coordinator)
        except DialError as error:
            self._record("barnraise_transport_connects_total", path="tcp", outcome="failed")
            # Once for each reason, in whatever order the addresses have failed.
            reason = "; ".join(sorted(str(error).split("; ")))
            if self._told.get(self._coordinator) != reason:
                self._told[self._coordinator] = reason
                self._log.warning("cannot reach the coordinator, trying again", reason=reason)
            self._give_up(self._coordinator, str(error))
        else:
            self._record("barnraise_transport_connects_total", path="tcp", outcome="ok")
            took_s = trio.current_time() - began
            self._record("barnraise_transport_connect_duration_seconds", took_s, path="tcp")

    async def _mend_coordinator(self) -> None:
        """A new path for the link; when there is none, the machine finds the silence and dials again."""
        try:
            await self._transport.dial(self._coordinator_addresses, self._coordinator, switch=True)
        except DialError as error:
            self._log.info("coordinator out of reach", reason=str(error))

    # ---- figures -------------------------------------------------------------------------------------------------

    async def _watch_figures(self) -> None:
        """Shows the ladder what its links give."""
        before: dict[Link, tuple[int, int]] = {}
        while True:
            await trio.sleep(FIGURES_S)
            looked: dict[Link, tuple[int, int]] = {}
            for link in self._transport.links:
                looked[link] = link.sent_bytes, link.queued_bytes
                sent, queued = before.get(link, (0, 0))
                if queued >= BUSY_BYTES and link.queued_bytes >= BUSY_BYTES:
                    self._rates[link.peer] = (link.sent_bytes - sent) / FIGURES_S
                if link.round_trip_s is not None and self.ladder.way_of(link.peer) is not None:
                    figures = Figures(link.round_trip_s, self._rates.get(link.peer))
                    self._perform(self.ladder.measured(link.peer, figures, trio.current_time()))
            before = looked
