"""Opens links by dialling, by serving and over streams that other ways made, for one identity in one run.

Every way gives one ordered reliable stream (`trio.abc.Stream`); over it run the handshake, records and frames.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import trio

from protocol.base.errors import DialError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.base.limits import BUDGET_BYTES, CLOSE_S, HANDSHAKE_S, LINKS_PREFIX_MAX
from protocol.drive import tcp
from protocol.drive.descriptors import links_max
from protocol.drive.door import Door
from protocol.drive.first_words import StreamEndedError, closing_unless_kept, first_frame, receive
from protocol.drive.half_open import HalfOpenPlaces, Place
from protocol.drive.limits import Limits, Metered, QuotaUsedUpError
from protocol.drive.link import PATHS, Carrier, Link, LinkEvents, name_link
from protocol.drive.link_options import LinkOptions
from protocol.link.budget import Budget
from protocol.link.codec import PROTOCOL_MINOR, encode
from protocol.link.faults import Faults
from protocol.link.frames import NO_LINK, TOKEN_BYTES, Frame, FramingLimits, Hello, OutFrame
from protocol.link.framing import Framing
from protocol.link.line import Line
from protocol.link.networks import network_of
from protocol.link.paths import Path
from protocol.link.reach import host_of
from protocol.messages import Refused
from protocol.trust.handshake import (
    ENTROPY_BYTES,
    NO_COOKIE,
    TCP_PROLOGUE,
    VERSION,
    CookieDemanded,
    CookieJar,
    Initiator,
    Responder,
    Session,
)
from protocol.trust.identity import Identity, node_id
from protocol.trust.records import STREAM_HEADER_BYTES

__all__ = ["CLOSED_IN_HANDSHAKE", "PATHS", "DialError", "Link", "LinkEvents", "LinkOptions", "Transport"]

CLOSED_IN_HANDSHAKE = "the other side ended the connection in the handshake: it does not let us in"
OPERATED = ("coordinator", "server")
"""Who never waits after a fault: an operator has chosen it, and the run needs it back at once."""
ENDINGS_AT_ONCE = 2
"""Links that were cut by the other side and are taken down in one turn of the loop. Each costs 0.5 to 2 ms: who lost
500 at once answered nobody else for a quarter of a second, and with eight in a turn for 140 ms, since an answer of the
API takes some ten turns."""
Frames = Iterable[tuple[int, bytes]]


@dataclass(frozen=True)
class _Way:
    """A stream before anybody is proven on it."""

    stream: trio.abc.Stream
    path: str
    address: str
    prologue: bytes = TCP_PROLOGUE

    def carrier(self, dialled: bool) -> Carrier:
        return Carrier(self.stream, self.path, self.address, dialled)


class Guests(Protocol):
    """Takes callers who want something else than a link; their first byte tells (a handshake begins with a zero)."""

    def expects(self, first: bytes) -> bool:
        """Whether a connection that begins with these bytes is for it."""

    async def prove(
        self, stream: trio.abc.Stream, first: bytes, address: str, cookies: tuple[bytes, ...]
    ) -> Callable[[], Awaitable[None]] | None:
        """Finds out who calls, in the time and the place of a half-open handshake.

        What it returns is run for as long as the guest stays, and owns the stream; None: the guest was turned away.
        """


class Transport:
    """Opens links by dialling and by serving, for one identity in one run; at most one link to each peer."""

    def __init__(
        self,
        nursery: trio.Nursery,
        *,
        identity: Identity,
        role: str,
        run_id: bytes,
        credential: Callable[[], bytes],
        admit: Callable[[bytes, bytes], str],
        events: LinkEvents,
        options: LinkOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`nursery` runs dialled links; `role` is ours; `credential()` is what we show now; `options` may be replaced
        later; `limits` are the owner's, for every way of the process together.

        `admit(public_key, credential)` gives the peer's role or raises `RemoteProtocolError`
        (`protocol.trust.membership.Trust.admit` with the time filled in).
        """
        self.events = events
        self._options = options or LinkOptions()
        self.limits = limits or Limits()
        self._nursery = nursery
        self._identity = identity
        self._role = role
        self._run_id = run_id
        self._credential = credential
        self._admit = admit
        self.endings = trio.CapacityLimiter(ENDINGS_AT_ONCE)
        self.budget = Budget(BUDGET_BYTES)
        """For what all links receive, together; may be replaced before there is one."""
        self._links: dict[NodeId, Link] = {}
        self._line = Line(self._look_again) if role == "volunteer" else None
        self.on_path_failed: Callable[[Link, str], None] | None = None
        """Told when a link's path carries nothing at present: dial or adopt another one, if you can."""
        self.may_dial: Callable[[NodeId, str], bool] = lambda peer, host: True
        """Whether to connect to an IP address for a peer: others name addresses, the owner of this computer suffers."""
        self.guests: Guests | None = None
        """Who takes the callers that want no link; they are refused while there is nobody."""
        self.on_moved: Callable[[Link], None] | None = None
        """Told when a link has left its path for another one, whichever side brought it."""
        self._half_open = HalfOpenPlaces()
        self._faults = Faults()
        self._door = Door(self._faults)
        self._links_max = links_max()
        self._jar = CookieJar(os.urandom(32))

    @property
    def options(self) -> LinkOptions:
        """Bounds of links. Those that were opened under a smaller one than is set here end, and come again: what the
        peer may have under way was said to it when they began. Links with the coordinator carry no tensors, and stay.
        """
        return self._options

    @options.setter
    def options(self, options: LinkOptions) -> None:
        self._options = options
        for link in self.links:
            self._end_if_narrow(link)

    def _end_if_narrow(self, link: Link) -> None:
        if "coordinator" not in (link.role, self._role) and not link.options.allows(self._options):
            link.close("the run's tensors have grown: the link begins again")

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are up, oldest first."""
        return tuple(self._links.values())

    def link_to(self, peer: NodeId) -> Link | None:
        """The link to `peer`, if there is one that takes messages."""
        link = self._links.get(peer)
        return None if link is None or link.closing else link

    def admit(self, public_key: bytes, credential: bytes) -> str:
        """The role of who owns the key and shows this now; raises `RemoteProtocolError`."""
        return self._admit(public_key, credential)

    def forget(self, link: Link) -> None:
        """For `Link`: it has ended."""
        if link.account is not None:
            link.account.close()
        if self._links.get(link.peer) is link:
            del self._links[link.peer]

    def _look_again(self) -> None:
        for link in self._links.values():
            link.look_again()

    def path_failed(self, link: Link, reason: str) -> None:
        """For `Link`."""
        if self.on_path_failed is not None:
            self.on_path_failed(link, reason)

    def moved(self, link: Link) -> None:
        """For `Link`."""
        if self.on_moved is not None:
            self.on_moved(link)

    def at_fault(self, link: Link, reason: str) -> None:
        """For `Link`."""
        self._blame(link.peer, link.role, reason)
        if link.path == "tcp" and not link.dialled and link.role not in OPERATED:
            self._faults.from_host(host_of(link.address), reason, trio.current_time())

    def _blame(self, peer: NodeId, role: str, reason: str) -> None:
        if role not in OPERATED:
            self._faults.of_member(peer, reason, trio.current_time())

    def _refuse_waiting(self, peer: NodeId) -> None:
        try:
            self._faults.check(peer, trio.current_time())
        except RemoteProtocolError as error:
            raise DialError(f"the peer {error.detail}") from None

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept links until cancelled; each lives in a task of its own below this call."""
        await trio.serve_listeners(self._accept, list(listeners))

    async def dial(self, addresses: Sequence[str], peer: NodeId, *, switch: bool = False) -> Link:
        """Open a link to `peer` at the first address that answers and proves to be it; or the one that is open.

        All addresses are tried side by side, the earlier ones with a start. A link whose path carries nothing, or any
        link with `switch`, moves to the new path and stays the same link. Raises `DialError`.
        """
        if self.limits.used_up.is_set():
            raise DialError("this month's transfer quota is used up")
        self._refuse_waiting(peer)
        async with tcp.racing(addresses, lambda host: self.may_dial(peer, host)) as race:
            link = await self._first(race, peer, switch)
        if link is None:
            raise DialError("; ".join(race.failures) or "no address is known")
        return link

    async def adopt(
        self,
        stream: trio.abc.Stream,
        peer: NodeId,
        *,
        initiator: bool,
        path: str,
        address: str,
        prologue: bytes,
        switch: bool = False,
    ) -> Link:
        """Prove `peer` over a stream that another way made, and open a link on it; or the one that stays instead.

        `initiator`: we speak first (one side must), and we say with `switch` that a link which works shall move here;
        one whose path carries nothing moves anyway. `path`: one of PATHS. `address` is for the log; `prologue` is what
        both sides must agree on, such as the fingerprints of a data channel. The stream is consumed whatever happens.
        Raises `DialError`.
        """
        assert path in PATHS, path
        try:
            self._refuse_waiting(peer)
        except DialError:
            await trio.aclose_forcefully(stream)
            raise
        way = _Way(stream, path, address, prologue)
        if initiator:
            outcome = await self._call(way, peer, switch)
            if isinstance(outcome, bytes):
                raise DialError("the peer is too busy")
            return outcome
        async with closing_unless_kept(stream) as kept:
            with self._named_failures(address):
                session, trailing = await self._greet(way, peer=peer)
                link = await self._open_as_responder(way, session, trailing)
                if link is None:
                    raise DialError("the link has moved elsewhere meanwhile")
                if link.runs_on(stream):
                    kept.append(stream)
                return link
        raise AssertionError("unreachable")

    async def _first(self, race: tcp.Race, peer: NodeId, switch: bool) -> Link | None:
        """A link over the first connection that leads to `peer`, or None; the race keeps what the others said."""
        while True:
            link = self.link_to(peer)
            if link is not None and not switch and not link.ailing:
                return link
            found = await race.next()
            if found is None:
                return None
            stream, candidate = found
            try:
                return await self._dial_one(stream, candidate, peer, switch)
            except DialError as error:
                race.failures.append(f"{candidate.address}: {error}")

    async def _dial_one(self, raw: trio.SocketStream, candidate: tcp.Candidate, peer: NodeId, switch: bool) -> Link:
        """A link over a fresh connection, dialled a second time when the peer wants a cookie. Raises `DialError`."""
        outcome = await self._call(_Way(self.metered(raw), "tcp", candidate.address), peer, switch)
        if isinstance(outcome, bytes):
            try:
                raw = await tcp.connect(candidate)
            except OSError as error:
                raise DialError(f"no connection: {tcp.said(error)}") from None
            outcome = await self._call(_Way(self.metered(raw), "tcp", candidate.address), peer, switch, outcome)
        if isinstance(outcome, bytes):
            raise DialError("the peer is too busy")
        return outcome

    # ---- as the initiator ------------------------------------------------------------------------------------------

    async def _call(self, way: _Way, peer: NodeId, switch: bool, cookie: bytes = NO_COOKIE) -> Link | bytes:
        """The link to `peer` that there is after this, or the cookie that the peer demands. Raises `DialError`."""
        handshake = Initiator(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            peer=peer,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            prologue=way.prologue,
            cookie=cookie,
        )
        async with closing_unless_kept(way.stream) as kept:
            with self._named_failures(way.address), trio.fail_after(HANDSHAKE_S):
                await way.stream.send_all(handshake.data_to_send())
                session = None
                while session is None:
                    session = handshake.receive(await receive(way.stream))
                if isinstance(session, CookieDemanded):
                    return session.cookie
                link = await self._open_as_initiator(way, session, handshake.data_to_send(), switch)
                if link.runs_on(way.stream):
                    kept.append(way.stream)
                return link
        raise AssertionError("unreachable")

    async def _open_as_initiator(self, way: _Way, session: Session, m3: bytes, switch: bool) -> Link:
        """Say HELLO with M3, and go by the answer: the link that we had goes on here, or there is a new one."""
        records = Path(session, os.urandom(STREAM_HEADER_BYTES))
        token = os.urandom(TOKEN_BYTES)
        old = self.link_to(session.peer)
        if old is not None and old.resumable:
            async with old.attempts:
                if old.resumable and not switch and not old.ailing:
                    return old  # another attempt has mended it, or it was never ill
                if old.resumable:
                    return await self._offer(way, session, records, m3, old, token)
        ours = self._hello(token)
        await way.stream.send_all(m3 + records.hello(ours))
        theirs, rest = await first_frame(way.stream, records, b"")
        if theirs.resume != NO_LINK:
            raise RemoteProtocolError("unexpected", "the peer resumes a link that was not named")
        if theirs.minor < PROTOCOL_MINOR:  # a newer one says itself what to do
            raise RemoteProtocolError("version", other_version(theirs.minor, PROTOCOL_MINOR))
        return await self._open(way, session, records, ours, theirs, rest, dialled=True)

    async def _offer(self, way: _Way, session: Session, records: Path, m3: bytes, old: Link, token: bytes) -> Link:
        """Offer to move the link that we have; the peer may not know it any more."""
        try:
            offer = old.offer(token)
            await way.stream.send_all(m3 + records.hello(offer))
            theirs, rest = await first_frame(way.stream, records, b"")
            if theirs.resume == NO_LINK:
                return await self._open(way, session, records, offer, theirs, rest, dialled=True)
            if theirs.resume != old.link_id:
                raise RemoteProtocolError("unexpected", "the peer resumes a link that was not named")
            if not old.answered(way.carrier(dialled=True), records, offer, theirs, rest):
                raise DialError("the link has ended or moved elsewhere meanwhile")
            return old
        finally:
            old.attempt_over()

    @contextmanager
    def _named_failures(self, address: str) -> Iterator[None]:
        """What can go wrong before there is a link, as `DialError`; a peer's offence is reported."""
        try:
            yield
        except RemoteProtocolError as error:
            self.events.on_rejected(address, error.reason, error.detail)
            plain = error.reason == "version" or error.detail.startswith("an HTTP server")  # says what to do
            raise DialError(error.detail if plain else f"refused by us: {error}") from None
        except trio.TooSlowError:
            raise DialError("no answer in time") from None
        except QuotaUsedUpError as error:
            raise DialError(str(error)) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, StreamEndedError):
            raise DialError(CLOSED_IN_HANDSHAKE) from None

    # ---- as the responder ------------------------------------------------------------------------------------------

    def metered(self, stream: trio.SocketStream) -> Metered:
        """The stream, with every byte paid for out of the owner's limits; for ways that connect by themselves."""
        if self.limits.receive_buffer_bytes is not None:
            tcp.take_in_at_most(stream.socket, self.limits.receive_buffer_bytes)
        return Metered(stream, self.limits)

    async def _accept(self, raw: trio.SocketStream) -> None:
        """One caller: handshake in a half-open place, then the stream as long as a link uses it."""
        try:
            host, address = tcp.caller_of(raw)
        except OSError:
            return
        now = trio.current_time()
        refusal = self._door.refusal(host, now)
        if refusal:
            # Nothing is said and little is done: this is what a flood costs.
            count = self._door.to_tell(now)
            if count:
                self.events.on_rejected(address, "busy", refusal, count)
            await trio.aclose_forcefully(raw)
            return
        tcp.tune(raw.socket)
        way = _Way(self.metered(raw), "tcp", address)
        link: Link | None = None
        guest: Callable[[], Awaitable[None]] | None = None
        reason, detail = "busy", "gave way to a newer caller before its handshake was over"
        with self._half_open.place(host) as place:
            now = trio.current_time()
            cookies = self._jar.cookies(host, now) if self._half_open.crowded else ()
            try:
                with trio.fail_after(HANDSHAKE_S):
                    first = await receive(way.stream)
                    if self.guests is not None and self.guests.expects(first):
                        guest = await self.guests.prove(way.stream, first, address, cookies)
                    else:
                        with self._faults.handshake(host, trio.current_time()):
                            session, trailing = await self._greet(way, first=first, cookies=cookies, place=place)
                            link = await self._open_as_responder(way, session, trailing)
                    reason = ""
            except RemoteProtocolError as error:
                reason, detail = error.reason, error.detail
            except trio.TooSlowError:
                reason, detail = "timeout", "the handshake was not over in time"
            except (trio.BrokenResourceError, trio.ClosedResourceError, StreamEndedError, _CookieSentError):
                reason = ""
        if reason:
            self.events.on_rejected(address, reason, detail)
        if guest is not None:
            await guest()
        elif link is not None:
            await link.leaves(way.stream)

    async def _greet(
        self,
        way: _Way,
        *,
        first: bytes = b"",
        cookies: tuple[bytes, ...] = (),
        peer: NodeId | None = None,
        place: Place | None = None,
    ) -> tuple[Session, bytes]:
        """The responder's part of the handshake, and what came behind it.

        `first`: bytes that were read already; `peer`: who it must be, if known; `place`: the caller's, which a good
        cookie makes safe.

        Raises `RemoteProtocolError`, `_CookieSentError`, `trio.TooSlowError` and what a stream raises that ends.
        """
        handshake = Responder(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            prologue=way.prologue,
            cookies=cookies,
            may_come=lambda public_key: self._faults.check(node_id(public_key), trio.current_time()),
        )
        session = None
        with trio.fail_after(HANDSHAKE_S):
            while session is None:
                session, first = handshake.receive(first or await receive(way.stream)), b""
                answer = handshake.data_to_send()
                if answer:
                    await way.stream.send_all(answer)
                if handshake.cookie_sent:
                    raise _CookieSentError
                if place is not None and handshake.cookie_shown and not place.proven:
                    place.prove()
        if peer is not None and session.peer != peer:
            raise RemoteProtocolError("identity", f"expected {peer}, came {session.peer}")
        return session, handshake.trailing

    async def _open_as_responder(self, way: _Way, session: Session, trailing: bytes) -> Link | None:
        """Read the caller's HELLO, and answer: its link goes on here, or there is a new one. None: neither."""
        records = Path(session, os.urandom(STREAM_HEADER_BYTES))
        with trio.fail_after(HANDSHAKE_S):
            theirs, rest = await first_frame(way.stream, records, trailing)
            if theirs.minor != PROTOCOL_MINOR:
                if self._role == "coordinator":
                    await self._refuse_version(way, records, theirs)
                raise RemoteProtocolError("version", other_version(theirs.minor, PROTOCOL_MINOR))
            old = self._links.get(session.peer)
            if theirs.resume != NO_LINK and old is not None and old.link_id == theirs.resume:
                if not old.agrees(theirs, we_come_first=self._identity.node < session.peer):
                    return None
                old.answer(way.carrier(dialled=False), records, theirs, rest)
                return old
            ours = self._hello(os.urandom(TOKEN_BYTES))
            await way.stream.send_all(records.hello(ours))
            return await self._open(way, session, records, ours, theirs, rest, dialled=False)

    async def _refuse_version(self, way: _Way, records: Path, theirs: Hello) -> None:
        """Answers a caller of another minor version as CHANGES.md promises: with a HELLO of the length that it said,
        and with `Refused`, whose form all versions share, so that its own build tells its owner what to do. Whatever
        it says is not read."""
        ours = self._hello(os.urandom(TOKEN_BYTES) if theirs.token else b"")
        refusal = Refused(reason=other_version(PROTOCOL_MINOR, theirs.minor))
        await way.stream.send_all(
            records.hello(ours)
            + records.seal(OutFrame(Frame.MESSAGE, encode(refusal)))
            + records.seal(OutFrame(Frame.END, b""), final=True)
        )
        with trio.move_on_after(CLOSE_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while await way.stream.receive_some(4096):  # what is unread at a close would take our words with it
                pass

    # ---- both ------------------------------------------------------------------------------------------------------

    def _hello(self, token: bytes) -> Hello:
        return Hello(PROTOCOL_MINOR, self.options.window_bytes, token)

    async def _open(
        self, way: _Way, session: Session, records: Path, ours: Hello, theirs: Hello, rest: Frames, *, dialled: bool
    ) -> Link:
        """The link that there is now to this peer: a new one, running here, unless an older one stays.

        Raises `RemoteProtocolError` ("busy") when the peer's network, or all callers together, have enough links.
        """
        if not dialled:
            self._check_room(way, session)
        account = self.budget.open(stranger=session.role in ("volunteer", "auditor"))
        options = replace(self._options, window_bytes=ours.window_bytes)
        framing = Framing(
            session,
            role=self._role,
            path=records,
            token=ours.token,
            limits=FramingLimits(options.tensor_bytes_max, options.window_bytes, options.elements_max),
            count=self.events.on_bytes,
            account=account,
            line=self._line,
        )
        try:
            framing.greet(theirs)
            first = framing.take(rest)
        except RemoteProtocolError as error:
            account.close()
            self._blame(session.peer, session.role, error.reason)
            raise
        tokens = (ours.token, theirs.token) if dialled else (theirs.token, ours.token)
        link = Link(self, session, framing, way.carrier(dialled), name_link(*tokens))
        link.options = options
        link.account, account.give_way = account, link.give_way
        if self._register(link):
            self._nursery.start_soon(link.run, first)
            self._end_if_narrow(link)  # they may have grown since our HELLO
            return link
        account.close()
        survivor = self.link_to(link.peer)
        assert survivor is not None, "a link that was preferred is there"
        return survivor

    def _check_room(self, way: _Way, session: Session) -> None:
        """Volunteers are strangers; servers came by an invite that is handed to few, and often share a network."""
        if session.role != "volunteer" or session.peer in self._links:
            return
        if len(self._links) >= self._links_max:
            raise RemoteProtocolError("busy", f"{self._links_max} links are open, as many as there are descriptors for")
        network = network_of(host_of(way.address)) if way.path != "relay" else ""  # the relay's, not the caller's
        same = [link for link in self._links.values() if link.role == "volunteer" and link.path != "relay"]
        if network and sum(network_of(host_of(link.address)) == network for link in same) >= LINKS_PREFIX_MAX:
            raise RemoteProtocolError("busy", f"{LINKS_PREFIX_MAX} links from {network} are open already")

    def _register(self, link: Link) -> bool:
        """Make `link` the one to its peer and report it; False when an older one stays.

        When both sides dial at once, both keep the link that the smaller id dialled. Otherwise the newer one wins:
        the peer would not have opened it if the older one still worked.
        """
        old = self.link_to(link.peer)
        if old is not None and old.dialled != link.dialled and trio.current_time() - old.opened_at < HANDSHAKE_S:
            ours_stays = self._identity.node < link.peer
            if link.dialled != ours_stays:
                return False
        previous = self._links.pop(link.peer, None)
        if previous is not None:
            previous.report_down("replaced by a new link")
            previous.abort("replaced by a new link")
        self._links[link.peer] = link
        self.events.on_up(link)
        return True


class _CookieSentError(Exception):
    """The caller has to come again with a cookie."""


def other_version(theirs: int, ours: int) -> str:
    """A sentence for people. `theirs`, `ours`: minor versions, as the reader sees them."""
    update = "this computer" if theirs > ours else "the other side"
    return (
        f"the other side speaks version {VERSION}.{theirs} of the protocol and this computer {VERSION}.{ours}: install"
        f" the newest Barnraise on {update}"
    )
