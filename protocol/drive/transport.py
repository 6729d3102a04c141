"""Opens links by dialling, by serving and over streams that other ways made, for one identity in one run.

Every way gives one ordered reliable stream (`trio.abc.Stream`); over it run the handshake, records and frames.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import trio

from protocol.drive import tcp
from protocol.drive.half_open import HalfOpenPlaces
from protocol.drive.limits import Limits, Metered, QuotaUsedUpError
from protocol.drive.link import PATHS, Link, LinkEvents, LinkOptions
from protocol.errors import DialError, RemoteProtocolError
from protocol.framing import Event, Framing, FramingLimits, PeerReady
from protocol.handshake import (
    ENTROPY_BYTES,
    NO_COOKIE,
    TCP_PROLOGUE,
    CookieDemanded,
    CookieJar,
    Initiator,
    Responder,
    Session,
)
from protocol.identity import Identity
from protocol.ids import NodeId
from protocol.limits import HANDSHAKE_S, WRITE_BYTES
from protocol.records import STREAM_HEADER_BYTES

__all__ = ["PATHS", "DialError", "Link", "LinkEvents", "LinkOptions", "Transport"]


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
        later and then hold for new links; `limits` are the owner's, for every way of the process together.

        `admit(public_key, credential)` gives the peer's role or raises `RemoteProtocolError`
        (`protocol.membership.Trust.admit` with the time filled in).
        """
        self.events = events
        self.options = options or LinkOptions()
        self.guests: Guests | None = None
        """Who takes the callers that want no link; they are refused while there is nobody."""
        self.limits = limits or Limits()
        self._nursery = nursery
        self._identity = identity
        self._role = role
        self._run_id = run_id
        self._credential = credential
        self._admit = admit
        self._links: dict[NodeId, Link] = {}
        self._half_open = HalfOpenPlaces()
        self._jar = CookieJar(os.urandom(32))

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that are up, oldest first."""
        return tuple(self._links.values())

    def link_to(self, peer: NodeId) -> Link | None:
        """The link to `peer`, if there is one that takes messages."""
        link = self._links.get(peer)
        return None if link is None or link.closing else link

    def forget(self, link: Link) -> None:
        """For `Link`: it has ended."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Accept links until cancelled; each lives in a task of its own below this call."""
        await trio.serve_listeners(self._accept, list(listeners))

    async def dial(self, addresses: Sequence[str], peer: NodeId) -> Link:
        """Open a link to `peer` at the first address that answers and proves to be it; or the one that is open.

        All addresses are tried side by side, the earlier ones with a start. Raises `DialError`.
        """
        if self.limits.used_up.is_set():
            raise DialError("this month's transfer quota is used up")
        async with tcp.racing(addresses) as race:
            link = await self._first(race, peer)
        if link is None:
            raise DialError("; ".join(race.failures) or "no address is known")
        return link

    async def _first(self, race: tcp.Race, peer: NodeId) -> Link | None:
        """A link over the first connection that leads to `peer`, or None; the race keeps what the others said."""
        while True:
            link = self.link_to(peer)
            if link is not None:
                return link
            found = await race.next()
            if found is None:
                return None
            stream, candidate = found
            try:
                return await self._try(self.metered(stream), candidate, peer)
            except DialError as error:
                race.failures.append(f"{candidate.address}: {error}")

    async def adopt(
        self, stream: trio.abc.Stream, peer: NodeId, *, initiator: bool, path: str, address: str, prologue: bytes
    ) -> Link:
        """Prove `peer` over a stream that another way made, and open a link on it; or the one that stays instead.

        `initiator`: we speak first (one side must). `path`: one of PATHS. `address` is for the log; `prologue` is
        what both sides must agree on, such as the fingerprints of a data channel. The stream is consumed whatever
        happens. Raises `DialError`.
        """
        assert path in PATHS, path
        try:
            if initiator:
                outcome = await self._greet_as_initiator(stream, path, address, peer, prologue=prologue)
                if isinstance(outcome, bytes):
                    raise DialError("the peer is too busy")
            else:
                outcome = await self._meet(stream, path, address, peer, prologue)
        except BaseException:
            await _close(stream)
            raise
        return await self._keep(*outcome)

    async def _try(self, stream: trio.abc.Stream, candidate: tcp.Candidate, peer: NodeId) -> Link:
        """A link over a fresh connection, dialled a second time when the peer wants a cookie. Raises `DialError`."""
        try:
            outcome = await self._greet_as_initiator(stream, "tcp", candidate.address, peer)
            if isinstance(outcome, bytes):
                cookie = outcome
                await _close(stream)
                try:
                    stream = self.metered(await tcp.connect(candidate))
                except OSError as error:
                    raise DialError(f"no connection: {tcp.said(error)}") from None
                outcome = await self._greet_as_initiator(stream, "tcp", candidate.address, peer, cookie=cookie)
                if isinstance(outcome, bytes):
                    raise DialError("the peer is too busy")
        except BaseException:
            await _close(stream)
            raise
        return await self._keep(*outcome)

    async def _keep(self, link: Link, first: list[Event]) -> Link:
        """The link that there is now to this peer: `link`, running, unless an older one stays."""
        if self._register(link):
            self._nursery.start_soon(link.run, first)
            return link
        await link.discard()
        survivor = self.link_to(link.peer)
        assert survivor is not None, "a link that was preferred is there"
        return survivor

    async def _greet_as_initiator(
        self,
        stream: trio.abc.Stream,
        path: str,
        address: str,
        peer: NodeId,
        *,
        prologue: bytes = TCP_PROLOGUE,
        cookie: bytes = NO_COOKIE,
    ) -> tuple[Link, list[Event]] | bytes:
        """A proven link and what came with it, or the cookie that the peer demands. Raises `DialError`."""
        handshake = Initiator(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            peer=peer,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            prologue=prologue,
            cookie=cookie,
        )
        try:
            with trio.fail_after(HANDSHAKE_S):
                await stream.send_all(handshake.data_to_send())
                session = None
                while session is None:
                    session = handshake.receive(await _receive(stream))
                if isinstance(session, CookieDemanded):
                    return session.cookie
                await stream.send_all(handshake.data_to_send())
                return await self._open(stream, session, b"", path, address, dialled=True)
        except RemoteProtocolError as error:
            self.events.on_rejected(address, error.reason, error.detail)
            raise DialError(f"refused by us: {error}") from None
        except trio.TooSlowError:
            raise DialError("no answer in time") from None
        except QuotaUsedUpError as error:
            raise DialError(str(error)) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, _StreamEndedError):
            raise DialError("the peer closed the connection in the handshake (does it know us?)") from None

    def metered(self, stream: trio.SocketStream) -> Metered:
        """The stream, with every byte paid for out of the owner's limits; for ways that connect by themselves."""
        if self.limits.receive_buffer_bytes is not None:
            tcp.take_in_at_most(stream.socket, self.limits.receive_buffer_bytes)
        return Metered(stream, self.limits)

    async def _accept(self, raw: trio.SocketStream) -> None:
        """One caller: handshake in a half-open place, then the link until it ends."""
        try:
            host, address = tcp.caller_of(raw)
        except OSError:
            return
        tcp.tune(raw.socket)
        stream = self.metered(raw)
        outcome: tuple[Link, list[Event]] | None = None
        guest: Callable[[], Awaitable[None]] | None = None
        reason, detail = "busy", "gave way to a newer caller before its handshake was over"
        with self._half_open.place(host):
            now = trio.current_time()
            cookies = self._jar.cookies(host, now) if self._half_open.crowded else ()
            try:
                with trio.fail_after(HANDSHAKE_S):
                    first = await _receive(stream)
                    if self.guests is not None and self.guests.expects(first):
                        guest = await self.guests.prove(stream, first, address, cookies)
                    else:
                        outcome = await self._greet_as_responder(stream, "tcp", address, first=first, cookies=cookies)
                    reason = ""
            except RemoteProtocolError as error:
                reason, detail = error.reason, error.detail
            except trio.TooSlowError:
                reason, detail = "timeout", "the handshake was not over in time"
            except (trio.BrokenResourceError, _StreamEndedError):
                reason = ""
        if reason:
            self.events.on_rejected(address, reason, detail)
        if guest is not None:
            await guest()
        elif outcome is not None:
            link, events = outcome
            if self._register(link):
                await link.run(events)

    async def _meet(
        self, stream: trio.abc.Stream, path: str, address: str, peer: NodeId, prologue: bytes
    ) -> tuple[Link, list[Event]]:
        """The responder's part on a stream from another way, whose other end must be `peer`. Raises `DialError`."""
        try:
            with trio.fail_after(HANDSHAKE_S):
                outcome = await self._greet_as_responder(stream, path, address, prologue=prologue, peer=peer)
        except RemoteProtocolError as error:
            self.events.on_rejected(address, error.reason, error.detail)
            raise DialError(f"refused by us: {error}") from None
        except trio.TooSlowError:
            raise DialError("no handshake in time") from None
        except QuotaUsedUpError as error:
            raise DialError(str(error)) from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, _StreamEndedError):
            raise DialError("the peer closed the stream in the handshake (does it know us?)") from None
        assert outcome is not None, "no cookie is asked for here"
        return outcome

    async def _greet_as_responder(
        self,
        stream: trio.abc.Stream,
        path: str,
        address: str,
        *,
        first: bytes = b"",
        prologue: bytes = TCP_PROLOGUE,
        cookies: tuple[bytes, ...] = (),
        peer: NodeId | None = None,
    ) -> tuple[Link, list[Event]] | None:
        """A proven link and what came with it, or None when a cookie was demanded.

        `first`: bytes that were read already; `peer`: who it must be, if known.

        Raises `RemoteProtocolError`, and what a stream raises that ends.
        """
        handshake = Responder(
            identity=self._identity,
            credential=self._credential(),
            run_id=self._run_id,
            entropy=os.urandom(ENTROPY_BYTES),
            admit=self._admit,
            prologue=prologue,
            cookies=cookies,
        )
        session = None
        while session is None:
            session, first = handshake.receive(first or await _receive(stream)), b""
            answer = handshake.data_to_send()
            if answer:
                await stream.send_all(answer)
            if handshake.cookie_sent:
                return None
        if peer is not None and session.peer != peer:
            raise RemoteProtocolError("identity", f"expected {peer}, came {session.peer}")
        return await self._open(stream, session, handshake.trailing, path, address, dialled=False)

    async def _open(
        self, stream: trio.abc.Stream, session: Session, trailing: bytes, path: str, address: str, *, dialled: bool
    ) -> tuple[Link, list[Event]]:
        """Exchange the first frames: after them both sides know that the other accepted."""
        framing = Framing(
            session,
            role=self._role,
            header=os.urandom(STREAM_HEADER_BYTES),
            limits=FramingLimits(self.options.tensor_bytes_max, self.options.window_bytes),
            count=self.events.on_bytes,
        )
        await stream.send_all(b"".join(framing.data_to_send(WRITE_BYTES)))
        events = framing.receive(trailing)
        while not events:
            events = framing.receive(await _receive(stream))
        assert isinstance(events[0], PeerReady)
        return Link(self, stream, session, framing, path=path, address=address, dialled=dialled), events[1:]

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


class _StreamEndedError(Exception):
    """The peer closed the connection in the middle of the handshake."""


async def _receive(stream: trio.abc.Stream) -> bytes:
    data = await stream.receive_some(4096)
    if not data:
        raise _StreamEndedError
    return bytes(data)


async def _close(stream: trio.abc.Stream) -> None:
    """At once, also while being cancelled."""
    with trio.CancelScope(shield=True):
        await trio.aclose_forcefully(stream)
