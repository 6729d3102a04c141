"""Relay legs on trio: the server that carries bytes between two members, and the node that asks it to.

Ciphertext goes through: the two nodes run a handshake of their own over what is opened here. Quotas and pairing are
decided by `node.links.relay.relay_desk`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers

import trio

from node.links.relay.relay_desk import WAIT_S, Cut, Refuse, RelayDesk, RelayLimits, RelayOrder, Splice
from protocol.base.errors import DialError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import HANDSHAKE_S, SEND_STALL_S
from protocol.drive import tcp
from protocol.drive.first_words import StreamEndedError, receive
from protocol.drive.limits import QuotaUsedUpError
from protocol.drive.transport import OPERATED, Transport
from protocol.link.networks import network_of
from protocol.link.reach import host_of
from protocol.link.relay import MAGIC, REFUSALS, leg_prologue, preamble, refusal_of, split_preamble
from protocol.trust.handshake import ENTROPY_BYTES, NO_COOKIE, Admit, CookieDemanded, Initiator, Responder
from protocol.trust.identity import Identity

CHUNK_BYTES = 64 << 10
"""Read at once: what a control message may find before itself in here."""
UNSENT_BYTES = 64 << 10
"""What the kernel may hold for a slow leg beyond what is under way: a control message waits for whatever is there."""
SMALL_BYTES = 16 << 10
REST_S = 0.002
"""After a read of less than SMALL_BYTES: else each packet of a slow line wakes us. What comes alone never waits."""
IDLE_S = 60.0
"""A session on which nothing came for so long is cut: an honest link is asked for signs of life every few seconds."""
ANSWER_S = 2.0
"""For the relay's answer, beyond the time that it waits for the other node."""


@dataclass(frozen=True)
class Proof:
    """How this process shows who it is: the same as for a link."""

    identity: Identity
    run_id: bytes
    credential: Callable[[], bytes]
    admit: Admit


class RelayRefusedError(DialError):
    """The relay said no; `reason` is one of protocol.link.relay.REFUSALS."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the relay refuses: {reason}")
        self.reason = reason


async def open_leg(
    addresses: Sequence[str],
    relay: NodeId,
    meeting: bytes,
    proof: Proof,
    transport: Transport,
) -> trio.abc.Stream:
    """A stream that leads to the other node of `meeting`, through the server `relay`. Raises `DialError`.

    `transport`: pays for every byte, and knows where we may connect to.
    """
    cookie = NO_COOKIE
    for _ in range(2):
        async with tcp.racing(addresses, lambda host: transport.may_dial(relay, host)) as race:
            found = await race.next()
        if found is None:
            raise DialError("; ".join(race.failures) or "no address of the relay is known")
        stream = transport.metered(found[0])
        try:
            outcome = await _ask(stream, relay, meeting, proof, cookie)
        except BaseException:
            await _close(stream)
            raise
        if outcome is None:
            return stream
        await _close(stream)
        cookie = outcome
    raise DialError("the relay is too busy")


async def _ask(stream: trio.abc.Stream, relay: NodeId, meeting: bytes, proof: Proof, cookie: bytes) -> bytes | None:
    """None: go. Bytes: the cookie that the relay demands. Raises `DialError`."""
    handshake = Initiator(
        identity=proof.identity,
        credential=proof.credential(),
        run_id=proof.run_id,
        peer=relay,
        entropy=os.urandom(ENTROPY_BYTES),
        admit=proof.admit,
        prologue=leg_prologue(meeting),
        cookie=cookie,
    )
    try:
        with trio.fail_after(HANDSHAKE_S):
            await stream.send_all(preamble(meeting) + handshake.data_to_send())
            session = None
            while session is None:
                session = handshake.receive(await receive(stream))
            if isinstance(session, CookieDemanded):
                return session.cookie
            await stream.send_all(handshake.data_to_send())
        with trio.fail_after(WAIT_S + ANSWER_S):
            # One byte: the next one is already the other node's.
            answer = await stream.receive_some(1)
        if not answer:
            raise DialError("the relay closed the connection")
        reason = refusal_of(answer[0])
    except RemoteProtocolError as error:
        raise DialError(f"the relay is refused by us: {error}") from None
    except trio.TooSlowError:
        raise DialError("the relay gave no answer in time") from None
    except QuotaUsedUpError as error:
        raise DialError(str(error)) from None
    except (trio.BrokenResourceError, trio.ClosedResourceError, StreamEndedError):
        raise DialError("the relay closed the connection (does it know us?)") from None
    if reason:
        raise RelayRefusedError(reason)
    return None


class _Leg:
    """One connection of a member, from its proof to its end."""

    def __init__(self, number: int, stream: trio.abc.Stream, node: NodeId) -> None:
        self.number = number
        self.stream = stream
        self.node = node
        self.answered = trio.Event()
        """It was refused, or belongs to a session that another task carries."""
        self.over = trio.Event()
        self.refusal = ""


class RelayServer:
    """The relay of one server process. `count(metric, value, labels)` feeds the metrics barnraise_server_relay_*."""

    def __init__(
        self,
        proof: Proof,
        limits: RelayLimits,
        *,
        rejected: Callable[[str, str, str], None],
        count: Callable[[str, float, dict[str, str]], None],
    ) -> None:
        """`rejected(address, reason, detail)` is told of callers that break the protocol."""
        self.desk = RelayDesk(limits, trio.current_time())
        self._proof = proof
        self._rejected = rejected
        self._count = count
        self._legs: dict[int, _Leg] = {}
        self._sessions: dict[int, trio.CancelScope] = {}
        self._pairs: dict[int, _Leg] = {}
        """Second leg of a session that is about to begin -> its first one."""
        self._numbers = numbers()

    def expects(self, first: bytes) -> bool:
        """Whether a connection that begins with these bytes is a relay leg."""
        return first[:1] == MAGIC[:1]

    async def prove(
        self, stream: trio.abc.Stream, first: bytes, address: str, cookies: tuple[bytes, ...]
    ) -> Callable[[], Awaitable[None]] | None:
        """What to do with a proven caller until it goes; None when it was turned away.

        The caller gives this the time and the place of a half-open handshake, and closes the stream after None.
        """
        try:
            while (split := split_preamble(first)) is None:
                first += await receive(stream)
            meeting, data = split
            proof = self._proof
            handshake = Responder(
                identity=proof.identity,
                credential=proof.credential(),
                run_id=proof.run_id,
                entropy=os.urandom(ENTROPY_BYTES),
                admit=proof.admit,
                prologue=leg_prologue(meeting),
                cookies=cookies,
            )
            session = handshake.receive(data)
            while session is None:
                answer = handshake.data_to_send()
                if answer:
                    await stream.send_all(answer)
                if handshake.cookie_sent:
                    return None
                session = handshake.receive(await receive(stream))
            if handshake.trailing:
                raise RemoteProtocolError("unexpected", "bytes before the relay said go")
        except RemoteProtocolError as error:
            self._rejected(address, error.reason, error.detail)
            return None
        except (trio.BrokenResourceError, trio.ClosedResourceError, StreamEndedError):
            return None
        # As with links: servers came by an invite that is handed to few, and often share a network.
        network = "" if session.role in OPERATED else network_of(host_of(address))
        return partial(self.carry, stream, session.peer, meeting, network)

    async def carry(self, stream: trio.abc.Stream, node: NodeId, meeting: bytes, network: str) -> None:
        """A proven leg until its end: it waits for its other one, then its bytes are carried. Closes the stream.

        `network`: the one that it is counted for, or nothing.
        """
        leg = _Leg(next(self._numbers), stream, node)
        self._legs[leg.number] = leg
        try:
            self._perform(self.desk.arrive(leg.number, node, meeting, trio.current_time(), network))
            spliced = self._pairs.pop(leg.number, None)
            if spliced is not None:
                await self._session(spliced, leg)
            elif await self._wait(leg):
                await leg.over.wait()
            elif leg.refusal:
                self._count("barnraise_server_relay_refused_total", 1.0, {"reason": leg.refusal})
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(ANSWER_S):
                    await stream.send_all(bytes((REFUSALS.index(leg.refusal),)))
        finally:
            self._legs.pop(leg.number, None)
            self.desk.left(leg.number)
            leg.over.set()
            await _close(stream)

    def end(self) -> None:
        """The server ends: whoever waits is told, whatever runs is cut."""
        self._perform(self.desk.end())

    async def _wait(self, leg: _Leg) -> bool:
        """Until the leg is answered; True when another task carries it. False: it is refused, or gone."""
        gone = False

        async def watch() -> None:
            """It must not say anything before the answer, so whatever comes here is an end."""
            nonlocal gone
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await leg.stream.receive_some(1)
            gone = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            with trio.move_on_after(self.desk.limits.wait_s):
                await leg.answered.wait()
            if not leg.answered.is_set():
                self._perform(self.desk.wake(trio.current_time()))
            nursery.cancel_scope.cancel()
        if not leg.answered.is_set() and not gone:  # the desk's clock is a hair behind ours
            leg.refusal = "alone"
        return leg.answered.is_set() and not leg.refusal

    def _perform(self, orders: Sequence[RelayOrder]) -> None:
        for order in orders:
            match order:
                case Refuse():
                    leg = self._legs[order.leg]
                    leg.refusal = order.reason
                    leg.answered.set()
                case Splice():
                    self._legs[order.legs[0]].answered.set()
                    self._pairs[order.legs[1]] = self._legs[order.legs[0]]
                case Cut():
                    self._sessions[order.session].cancel()

    async def _session(self, first: _Leg, second: _Leg) -> None:
        """Carries bytes both ways until one side ends, nothing comes any more, or a quota is used up."""
        self._show()
        for leg in (first, second):
            keep_unsent = getattr(leg.stream, "keep_unsent", None)
            if keep_unsent is not None:
                keep_unsent(UNSENT_BYTES)
        try:
            with trio.CancelScope() as scope:
                self._sessions[first.number] = scope
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pump, first.number, first.stream, second.stream, scope)
                    nursery.start_soon(self._pump, first.number, second.stream, first.stream, scope)
        finally:
            del self._sessions[first.number]
            self.desk.left(first.number)
            first.over.set()
            self._show()

    async def _pump(
        self, session: int, source: trio.abc.Stream, sink: trio.abc.Stream, scope: trio.CancelScope
    ) -> None:
        data: bytes | bytearray = bytes((0,))
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            with trio.fail_after(SEND_STALL_S):
                await sink.send_all(data)  # go
            while True:
                with trio.fail_after(IDLE_S):
                    data = await source.receive_some(CHUNK_BYTES)
                if not data:
                    break
                wait_s = self.desk.move(session, len(data), trio.current_time())
                self._count("barnraise_server_relay_bytes_total", len(data), {})
                self._perform(self.desk.spent())
                await trio.sleep(wait_s)
                with trio.fail_after(SEND_STALL_S):
                    await sink.send_all(data)
                if len(data) < SMALL_BYTES:
                    await trio.sleep(REST_S)
        scope.cancel()

    def _show(self) -> None:
        self._count("barnraise_server_relay_sessions", self.desk.session_count, {})


async def _close(stream: trio.abc.Stream) -> None:
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
