"""The two conversations in which a home router is asked to forward a port: NAT-PMP (RFC 6886), and UPnP.

Nothing but the router is spoken to, that is whoever our packets leave by; a search by UPnP asks the whole network, as
it must, but only the router's answer counts. Every wait and every answer is bounded.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import h11
import trio

from node.links.router import natpmp, upnp
from node.links.router.natpmp import Transport
from protocol.base.errors import RemoteProtocolError
from protocol.drive.addresses import host_port
from protocol.drive.tcp import said
from protocol.link.candidates import Reach, acceptable_address

TRIES_S = (0.25, 0.5, 1.0, 2.0)
"""How long an answer is waited for before the request is sent again (RFC 6886 section 3.1, which goes on to 64 s)."""
SEARCH_TRIES_S = (1.5, 1.5)
"""The same for a search by UPnP: an answer may be held back for a second."""
EXCHANGE_S = 3.0
"""For one request by HTTP."""
PORTS_TRIED = 4
"""By UPnP, when somebody else has the port that we wish for; NAT-PMP's routers choose by themselves."""

_Answer = TypeVar("_Answer")


class NoMappingError(Exception):
    """The router does not forward; the text says why."""


@dataclass(frozen=True)
class Router:
    """Where it is asked."""

    host: str
    natpmp_port: int = natpmp.ROUTER_PORT
    search_at: tuple[str, int] | None = upnp.SEARCH_AT
    """By UPnP; None: not at all."""


@dataclass(frozen=True)
class Grant:
    """What a router forwards to us."""

    address: str
    """Its public one."""
    port: int
    """There."""
    lifetime_s: int
    by: str
    """NAT-PMP or UPnP."""
    release: Callable[[], Awaitable[None]]
    """Gives it back; says nothing when that fails, since it expires by itself."""


def own_address(router: Router) -> str:
    """Ours towards the router; nothing is sent. Raises `OSError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((router.host, router.natpmp_port))
        return str(sock.getsockname()[0])


async def ask(router: Router | None, transport: Transport, port: int, wished_port: int) -> Grant:
    """By NAT-PMP, which is one question and one answer, else by UPnP. Raises `NoMappingError` with both reasons."""
    if router is None:
        raise NoMappingError("no router was found")
    try:
        return await ask_by_natpmp(router, transport, port, wished_port)
    except NoMappingError as error:
        if router.search_at is None:
            raise
        reason = str(error)
    try:
        return await ask_by_upnp(router, router.search_at, transport, port, wished_port)
    except NoMappingError as error:
        raise NoMappingError(f"by NAT-PMP {reason}; by UPnP {error}") from None


# ---- NAT-PMP ---------------------------------------------------------------------------------------------------------


async def ask_by_natpmp(router: Router, transport: Transport, port: int, wished_port: int) -> Grant:
    """Raises `NoMappingError`."""
    address = router.host, router.natpmp_port

    async def release() -> None:
        try:
            with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                await sock.connect(address)
                await _request(sock, natpmp.mapping_request(transport, port, 0, 0), bytes)
        except (OSError, NoMappingError):
            return

    try:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect(address)  # from here on nobody else's datagrams are received
            outside = await _request(sock, natpmp.address_request(), natpmp.read_address)
            if not acceptable_address(outside, 65535, Reach()):
                raise NoMappingError(f"the router itself is behind another one (its address is {outside})")
            request = natpmp.mapping_request(transport, port, wished_port, natpmp.LIFETIME_S)
            mapping = await _request(sock, request, lambda answer: natpmp.read_mapping(answer, transport, port))
    except OSError as error:
        raise NoMappingError(f"the router cannot be reached: {said(error)}") from None
    except RemoteProtocolError as error:
        raise NoMappingError(error.detail) from None
    return Grant(str(outside), mapping.external_port, mapping.lifetime_s, "NAT-PMP", release)


async def _request(sock: trio.socket.SocketType, request: bytes, read: Callable[[bytes], _Answer]) -> _Answer:
    for tries_s in TRIES_S:
        await sock.send(request)
        with trio.move_on_after(tries_s):
            while True:
                answer = await sock.recv(natpmp.ANSWER_BYTES_MAX)
                if natpmp.answers(request, answer):
                    return read(answer)
    raise NoMappingError("the router does not answer (it does not speak it, or it is switched off there)")


# ---- UPnP ------------------------------------------------------------------------------------------------------------


async def ask_by_upnp(
    router: Router, search_at: tuple[str, int], transport: Transport, port: int, wished_port: int
) -> Grant:
    """Raises `NoMappingError`."""
    host, protocol = router.host, transport.upper()
    try:
        described_at = await _search(router, search_at)
        status, reply, own = await _exchange(host, described_at, "GET", [], b"")
        service = upnp.read_description(reply if status == 200 else b"", host, described_at)

        async def command(action: str, **fields: str | int) -> str:
            headers, body = upnp.order(service, action, **fields)
            status, reply, _ = await _exchange(host, service.place, "POST", headers, body)
            return upnp.read_reply(status, reply)

        outside = upnp.read_address(await command("GetExternalIPAddress"))
        if not acceptable_address(outside, 65535, Reach()):
            raise NoMappingError(f"the router itself is behind another one (its address is {outside})")
        for tried in range(PORTS_TRIED):
            granted_port = (wished_port + tried) % 65536 or port
            try:
                await command(
                    "AddPortMapping",
                    NewRemoteHost="",
                    NewExternalPort=granted_port,
                    NewProtocol=protocol,
                    NewInternalPort=port,
                    NewInternalClient=own,
                    NewEnabled=1,
                    NewPortMappingDescription="Barnraise",
                    NewLeaseDuration=natpmp.LIFETIME_S,
                )
                break
            except upnp.RefusedError as error:
                if error.code != upnp.CONFLICT or tried == PORTS_TRIED - 1:
                    raise
    except OSError as error:
        raise NoMappingError(f"the router cannot be reached: {said(error)}") from None
    except RemoteProtocolError as error:
        raise NoMappingError(error.detail) from None
    except upnp.RefusedError as error:
        raise NoMappingError(str(error)) from None

    async def release() -> None:
        try:
            await command("DeletePortMapping", NewRemoteHost="", NewExternalPort=granted_port, NewProtocol=protocol)
        except (OSError, NoMappingError, RemoteProtocolError, upnp.RefusedError):
            return

    return Grant(str(outside), granted_port, natpmp.LIFETIME_S, "UPnP", release)


async def _search(router: Router, search_at: tuple[str, int]) -> upnp.Place:
    """Where the router describes itself; answers of others are passed over."""
    host = router.host
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
        # Where there are several networks: the search shall leave by the router's.
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_address(router)))
        for tries_s in SEARCH_TRIES_S:
            await sock.sendto(upnp.search(), search_at)
            with trio.move_on_after(tries_s):
                while True:
                    answer, sender = await sock.recvfrom(upnp.ANSWER_BYTES_MAX)
                    if sender[0] == host:
                        return upnp.read_location(answer, host)
    raise NoMappingError("the router does not answer (it does not speak it, or it is switched off there)")


async def _exchange(
    host: str, place: upnp.Place, method: str, headers: list[tuple[str, str]], body: bytes
) -> tuple[int, bytes, str]:
    """(status, what it says, our own address towards the router) of one request, on a connection of its own."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=upnp.ANSWER_BYTES_MAX)
    request = h11.Request(
        method=method,
        target=place.path,
        headers=[
            ("Host", host_port(host, place.port)),
            ("Connection", "close"),
            ("Content-Length", str(len(body))),
            *headers,
        ],
    )
    said_bytes = b"".join(connection.send(event) or b"" for event in (request, h11.Data(body), h11.EndOfMessage()))
    status, parts, byte_count = 0, [], 0
    try:
        with trio.fail_after(EXCHANGE_S), trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            await sock.connect((host, place.port))
            own = str(sock.getsockname()[0])
            await trio.SocketStream(sock).send_all(said_bytes)
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await sock.recv(16384))
                elif isinstance(event, h11.Response):
                    status = event.status_code
                elif isinstance(event, h11.Data):
                    parts.append(bytes(event.data))
                    byte_count += len(event.data)
                    if byte_count > upnp.REPLY_BYTES_MAX:
                        raise NoMappingError("the router says more than anybody needs")
                elif not isinstance(event, h11.InformationalResponse):
                    return status, b"".join(parts), own
    except trio.TooSlowError:
        raise NoMappingError("the router takes too long") from None
    except trio.BrokenResourceError:
        raise NoMappingError("the router closed the connection") from None
    except h11.RemoteProtocolError as error:
        raise NoMappingError(f"the router does not speak HTTP: {error}") from None
