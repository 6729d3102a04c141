"""Links through NATs: both sides send to each other at once until their gateways let it through (ICE, RFC 8445).

The letters that arrange it are signed here and travel by whatever the caller has (the coordinator); sockets and
checks live in the helper process; what comes out is a byte stream for `Transport.adopt`, with the prologue that binds
both certificates to the handshake in it. Nothing a peer or the coordinator says is trusted beyond that.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import trio

from node.links.channel.channel_stream import ChannelStream
from node.links.punch.helper import Connection, Helper, HelperGoneError
from node.links.punch.helper_frames import Census, Connect, Gather, Gathered, SocketReady, StunServer, TurnServer
from node.links.quic.certificate import Certificate, new_certificate
from node.links.quic.datagrams import ByteLimits
from node.links.quic.quic import QuicError, open_quic
from protocol.base.errors import DialError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.drive.addresses import host_port
from protocol.link.candidates import Candidate, Reach, acceptable_address, acceptable_candidates
from protocol.link.signal import (
    FINGERPRINT_BYTES,
    LIFETIME_MAX_S,
    NONCE_BYTES,
    Answer,
    Correspondent,
    Offer,
    SeenOffers,
    Way,
    common_ways,
    letter_hash,
    open_answer,
    open_offer,
    prologue,
    sign_letter,
)
from protocol.trust.identity import Identity

PUNCH_S = 6.0
"""From the wish for a link to the stream: what has not opened by then will not (RFC 8445 would go on for 40 s)."""
GATHER_S = 1.5
"""For STUN and TURN servers to answer, their slowest round trip tripled."""
ANSWERS_MAX = 16
"""Offers of peers that are being answered at once; each holds a few sockets for up to PUNCH_S."""
ANSWERS_PER_PEER = 2
"""A peer whose first offer got lost may try again at once."""
CLAIM_S = 5.0
"""A stream that came about for an answer, and that nobody asks for, is closed after this."""

PunchedPath = Literal["quic", "channel", "relay"]


class PunchError(DialError):
    """No link came about; the text says how far it got."""


@dataclass(frozen=True, slots=True)
class IceServers:
    """Whom to ask what our addresses look like from outside, and who relays when nothing else works."""

    stun: tuple[StunServer, ...] = ()
    turn: tuple[TurnServer, ...] = ()


@dataclass(frozen=True, slots=True)
class PunchOptions:
    """What the owner decides.

    Args:
        lan: send packets to private addresses that a peer names; without it only to those in our own subnets, and
            only for a peer behind our own public address.
        loopback: reach peers on this computer; for trials on one machine.
        ways: what to run on a punched path.
    """

    lan: bool = False
    loopback: bool = False
    ways: tuple[Way, ...] = ("quic", "channel")


@dataclass(frozen=True, slots=True)
class Punched:
    """A stream to somebody who has yet to prove who it is: `Transport.adopt` takes it from here."""

    stream: trio.abc.Stream
    path: PunchedPath
    prologue: bytes = field(repr=False)
    initiator: bool
    address: str


@dataclass(slots=True)
class _Answering:
    """An answer that was given; the peer is expected to come."""

    scope: trio.CancelScope
    done: trio.Event
    claimed: trio.Event
    same_site: bool
    result: Punched | None = None
    error: PunchError | None = None


class Puncher:
    """Makes links for one identity in one run.

    Args:
        nursery: lives as long as the daemon; the helper process and QUIC connections run below it.
        generation: gives the generation of the plan that we work by.
        servers: gives the servers to ask; called for each link, since credentials of relays are short-lived.
        limits: the owner's, which every datagram of every link passes.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        identity: Identity,
        run_id: bytes,
        generation: Callable[[], int],
        servers: Callable[[], IceServers],
        options: PunchOptions | None = None,
        limits: ByteLimits | None = None,
    ) -> None:
        self._nursery = nursery
        self._identity = identity
        self._run_id = run_id
        self._generation = generation
        self._servers = servers
        self._options = options or PunchOptions()
        self._limits = limits
        self._helper = Helper(nursery, limits)
        self._certificate: Certificate = new_certificate()
        self._seen = SeenOffers()
        self._answering: dict[NodeId, int] = {}

    @property
    def helper_pid(self) -> int | None:
        """The helper process, while one runs."""
        return self._helper.pid

    async def helper_census(self) -> Census | None:
        """What the helper process holds; None when none runs."""
        return await self._helper.ask_census()

    async def start_helper(self) -> None:
        """Have the helper process running: it takes a second, which the first link would wait for.

        Raises `PunchError`.
        """
        try:
            await self._helper.start()
        except (OSError, HelperGoneError) as error:
            raise PunchError(f"the punching helper cannot be started: {error}") from None

    # ---- offering ----------------------------------------------------------------------------------------------------

    async def call(
        self,
        peer: NodeId,
        exchange: Callable[[bytes], Awaitable[bytes]],
        same_site: Callable[[], bool] = lambda: False,
    ) -> Punched:
        """A stream to `peer`; `exchange` carries our signed offer to it and returns its signed answer.

        `same_site`, asked after that: whether the coordinator sees both of us at one address.
        Takes at most PUNCH_S, once the helper runs. Raises `PunchError` when no way leads there,
        `RemoteProtocolError` when the answer is not the peer's answer to our offer, and whatever `exchange` raises.
        """
        try:
            await self.start_helper()
            with trio.fail_after(PUNCH_S):
                connection = self._open(controlling=True)
                try:
                    return await self._call(peer, connection, exchange, same_site)
                except BaseException:
                    connection.close()
                    raise
        except trio.TooSlowError:
            raise PunchError(f"no link within {PUNCH_S:.0f} s") from None
        except HelperGoneError as error:
            raise PunchError(str(error)) from None

    async def _call(
        self,
        peer: NodeId,
        connection: Connection,
        exchange: Callable[[bytes], Awaitable[bytes]],
        same_site: Callable[[], bool],
    ) -> Punched:
        gathered = await connection.wait_gathered()
        self._check_udp(gathered)
        offer = Offer(
            run_id=self._run_id,
            generation=self._generation(),
            sender=self._identity.public_key,
            receiver=peer,
            nonce=os.urandom(NONCE_BYTES),
            dtls_fingerprint=gathered.dtls_fingerprint,
            quic_fingerprint=self._quic_fingerprint(),
            ufrag=gathered.ufrag,
            password=gathered.password,
            candidates=gathered.candidates,
            ways=self._options.ways,
            lifetime_s=LIFETIME_MAX_S,
        )
        signed = sign_letter(offer, self._identity)
        answer = open_answer(await exchange(signed), self._expected(peer), signed)
        return await self._connect(connection, gathered, offer, answer, initiator=True, same_site=same_site())

    # ---- answering ---------------------------------------------------------------------------------------------------

    async def answer(
        self, peer: NodeId, offer: bytes, same_site: bool = False
    ) -> tuple[bytes, Callable[[], Awaitable[Punched]]]:
        """The signed answer to send back to `peer`, and a function that gives the stream once the peer has come.

        `same_site`: whether the coordinator sees both of us at one address.
        That function takes at most PUNCH_S and raises `PunchError`. Raises `RemoteProtocolError` for an offer that
        is not the peer's, was here before or comes too often, and `PunchError` when there is nothing to answer.
        """
        opened = open_offer(offer, self._expected(peer))
        self._seen.note(offer, peer, trio.current_time())
        ways = tuple(way for way in self._options.ways if way in opened.ways)
        if not ways:
            raise PunchError("no way that both can go")
        if sum(self._answering.values()) >= ANSWERS_MAX or self._answering.get(peer, 0) >= ANSWERS_PER_PEER:
            raise RemoteProtocolError("busy", "too many offers at once")
        self._answering[peer] = self._answering.get(peer, 0) + 1
        handed_on = False
        try:
            await self.start_helper()
            deadline = trio.current_time() + min(PUNCH_S, opened.lifetime_s)
            with trio.fail_at(deadline):
                connection = self._open(controlling=False)
                try:
                    signed, answer, gathered = await self._answer(peer, connection, offer, ways)
                except BaseException:
                    connection.close()
                    raise
            state = _Answering(trio.CancelScope(deadline=deadline), trio.Event(), trio.Event(), same_site)
            self._nursery.start_soon(self._expect, peer, state, connection, gathered, opened, answer)
            handed_on = True
        except trio.TooSlowError:
            raise PunchError(f"no answer within {PUNCH_S:.0f} s") from None
        except HelperGoneError as error:
            raise PunchError(str(error)) from None
        finally:
            if not handed_on:
                self._answered(peer)

        async def finish() -> Punched:
            state.claimed.set()
            try:
                await state.done.wait()
            except trio.Cancelled:
                state.scope.cancel()
                if state.result is not None:
                    await trio.aclose_forcefully(state.result.stream)
                raise
            if state.result is None:
                raise state.error or PunchError("this process is ending")
            return state.result

        return signed, finish

    async def _answer(
        self, peer: NodeId, connection: Connection, offer: bytes, ways: tuple[Way, ...]
    ) -> tuple[bytes, Answer, Gathered]:
        gathered = await connection.wait_gathered()
        self._check_udp(gathered)
        answer = Answer(
            run_id=self._run_id,
            generation=self._generation(),
            sender=self._identity.public_key,
            receiver=peer,
            nonce=os.urandom(NONCE_BYTES),
            dtls_fingerprint=gathered.dtls_fingerprint,
            quic_fingerprint=self._quic_fingerprint(),
            ufrag=gathered.ufrag,
            password=gathered.password,
            candidates=gathered.candidates,
            ways=ways,
            lifetime_s=LIFETIME_MAX_S,
            offer_hash=letter_hash(offer),
        )
        return sign_letter(answer, self._identity), answer, gathered

    async def _expect(
        self,
        peer: NodeId,
        state: _Answering,
        connection: Connection,
        gathered: Gathered,
        offer: Offer,
        answer: Answer,
    ) -> None:
        """Runs until the peer came, or will not, and until somebody took the stream."""
        try:
            with state.scope:
                try:
                    state.result = await self._connect(
                        connection, gathered, offer, answer, initiator=False, same_site=state.same_site
                    )
                except (PunchError, HelperGoneError) as error:
                    state.error = PunchError(str(error))
            if state.result is None and state.error is None:
                state.error = PunchError(f"the peer did not come within {PUNCH_S:.0f} s")
        finally:
            self._answered(peer)
            if state.result is None:
                connection.close()
            state.done.set()
        with trio.move_on_after(CLAIM_S):
            await state.claimed.wait()
        if not state.claimed.is_set() and state.result is not None:
            await trio.aclose_forcefully(state.result.stream)

    def _answered(self, peer: NodeId) -> None:
        left = self._answering[peer] - 1
        if left:
            self._answering[peer] = left
        else:
            del self._answering[peer]

    # ---- both --------------------------------------------------------------------------------------------------------

    def _expected(self, peer: NodeId) -> Correspondent:
        return Correspondent(self._run_id, self._generation(), self._identity.node, peer)

    def _quic_fingerprint(self) -> bytes:
        return self._certificate.fingerprint if "quic" in self._options.ways else bytes(FINGERPRINT_BYTES)

    def _open(self, *, controlling: bool) -> Connection:
        servers = self._servers()
        options = self._options
        return self._helper.open(
            Gather(controlling, servers.stun, servers.turn, options.lan, options.loopback, GATHER_S)
        )

    def _check_udp(self, gathered: Gathered) -> None:
        """Give up at once where UDP leads nowhere, so that the caller can go on to a relay."""
        if not gathered.candidates:
            raise PunchError("this computer has no network address that a peer could reach")
        if not self._servers().stun or self._options.lan or self._options.loopback:
            return
        if lets_no_udp_through(gathered.candidates):
            raise PunchError("no STUN server answered: the network here lets no UDP through")

    async def _connect(
        self,
        connection: Connection,
        gathered: Gathered,
        offer: Offer,
        answer: Answer,
        *,
        initiator: bool,
        same_site: bool,
    ) -> Punched:
        """Send the helper to the peer's addresses and make a stream of what it brings back. Within our deadline."""
        theirs = answer if initiator else offer
        ways = common_ways(offer, answer)
        if not ways:
            raise PunchError("no way that both can go")
        reach = Reach(self._options.lan, self._options.loopback, gathered.candidates, same_site)
        candidates = acceptable_candidates(theirs.candidates, reach)
        if not candidates:
            raise PunchError("the peer named no address that we may send to")
        connection.tell(
            Connect(
                theirs.ufrag,
                theirs.password,
                theirs.dtls_fingerprint,
                candidates,
                ways,
                same_site,
                PUNCH_S,
            )
        )
        outcome = await connection.wait_outcome()
        address = host_port(outcome.host, outcome.port)
        if isinstance(outcome, SocketReady):

            def may_reach(host: str, port: int) -> bool:
                return acceptable_address(ipaddress.ip_address(host), port, reach)

            stream = await self._open_quic(connection, outcome, theirs, may_reach, initiator=initiator)
            return Punched(stream, "quic", prologue("quic", offer, answer), initiator, address)
        if outcome.dtls_fingerprint != theirs.dtls_fingerprint:
            raise PunchError("the peer showed another certificate than it signed")
        path: PunchedPath = "relay" if outcome.relayed else "channel"
        stream = ChannelStream(connection)
        return Punched(stream, path, prologue("channel", offer, answer), initiator, address)

    async def _open_quic(
        self,
        connection: Connection,
        outcome: SocketReady,
        theirs: Offer | Answer,
        may_reach: Callable[[str, int], bool],
        *,
        initiator: bool,
    ) -> trio.abc.Stream:
        handle = connection.handle
        assert handle is not None, "a socket that is ready is there"
        connection.handle = None
        connection.close()
        six = ":" in outcome.host
        sock = trio.socket.from_stdlib_socket(handle)
        try:
            return await open_quic(
                self._nursery,
                sock,
                (outcome.host, outcome.port, 0, 0) if six else (outcome.host, outcome.port),
                client=initiator,
                certificate=None if initiator else self._certificate,
                peer_fingerprint=theirs.quic_fingerprint if initiator else None,
                limits=self._limits,
                may_reach=may_reach,
            )
        except QuicError as error:
            raise PunchError(f"punched, but no QUIC: {error}") from None


def lets_no_udp_through(ours: Sequence[Candidate]) -> bool:
    """Whether servers were asked in vain: no address from outside, no relay, and none that is public anyway."""
    return not any(one.kind != "host" or acceptable_address(one.ip, one.port, Reach()) for one in ours)
