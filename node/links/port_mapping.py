"""Keeps a port forwarded on the home router while the daemon runs, when the owner allows it (NAT-PMP, RFC 6886).

With it others can dial this computer directly. Without it nothing is lost: we dial, we punch, we are relayed.
UPnP is not spoken: it wants an HTTP server's worth of XML from a device nobody can vouch for.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import structlog
import trio

from node.links.natpmp import (
    ANSWER_BYTES_MAX,
    LIFETIME_MIN_S,
    LIFETIME_S,
    ROUTER_PORT,
    Mapping,
    Transport,
    address_request,
    answers,
    mapping_request,
    read_address,
    read_mapping,
)
from protocol.candidates import Reach, acceptable_address
from protocol.drive.addresses import host_port, is_loopback
from protocol.drive.tcp import said as why
from protocol.errors import BadInputError, RemoteProtocolError
from protocol.limits import ADDRESSES_MAX

TRIES_S = (0.25, 0.5, 1.0, 2.0)
"""How long an answer is waited for before the request is sent again (RFC 6886 section 3.1, which goes on to 64 s)."""
AGAIN_FIRST_S = 30.0
"""After a failure: the router may be restarting. Doubled with every further one, up to AGAIN_S."""
AGAIN_S = 600.0
RENEW_S = 120.0
"""Asked again at the latest, however long the router grants it for: one that lost power has forgotten all."""
LOOK_S = 10.0
"""Between two looks whether this computer is still at the same place."""
RELEASE_S = 0.6
"""For giving the mapping back when the daemon ends: time to ask twice."""


_Answer = TypeVar("_Answer")


class NoMappingError(Exception):
    """The router does not forward; the text says why."""


def default_router(routes: str) -> str | None:
    """The IPv4 address of the default route, out of the text of Linux's /proc/net/route."""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000" and int(fields[3], 16) & 2:
            return socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))
    return None


def find_router() -> str | None:
    """The address of this computer's router; None where there is none, or none can be found out."""
    try:
        return default_router(Path("/proc/net/route").read_text())
    except OSError:
        return None


def forwardable_port(listeners: Iterable[trio.SocketListener]) -> int:
    """The port that a home router can forward to. Raises `BadInputError` where none of these sockets will do."""
    for listener in listeners:
        if listener.socket.family == socket.AF_INET:
            host, port = listener.socket.getsockname()
            if not is_loopback(host):
                return int(port)
    raise BadInputError("--map-port: no socket here listens where the router reaches it by IPv4; see --listen")


def with_forwarded(addresses: tuple[str, ...], outside: tuple[str, int] | None) -> tuple[str, ...]:
    """What to announce: the forwarded address first, since a router vouches for it, then the node's own."""
    if outside is None:
        return addresses
    return tuple(dict.fromkeys((host_port(*outside), *addresses)))[:ADDRESSES_MAX]


async def keep_mapping(
    transport: Transport,
    port: int,
    on_change: Callable[[tuple[str, int] | None], None],
    *,
    router: tuple[str, int] | None = None,
) -> None:
    """Have `port` forwarded until cancelled; the mapping is given back then.

    `on_change` gets (public address, port) whenever that has changed, and None when it does not work any more.
    `router`: its address and port, found out when not given.
    """
    log = structlog.get_logger("port_mapping")
    known: tuple[str, int] | None = None
    granted_by: tuple[str, int] | None = None
    wished_port = port
    failures = 0
    said = ""
    try:
        while True:
            asked = router or _with_port(find_router())
            outside: tuple[str, int] | None = None
            try:
                address, mapping = await _ask(asked, transport, port, wished_port)
            except NoMappingError as error:
                wait_s = min(AGAIN_S, AGAIN_FIRST_S * 2**failures)
                failures = min(failures + 1, 16)
                if str(error) != said:  # asked again and again: said once
                    said = str(error)
                    log.warning("port is not forwarded", port=port, reason=said)
            else:
                outside, granted_by, wished_port = (address, mapping.external_port), asked, mapping.external_port
                wait_s = min(max(mapping.lifetime_s, LIFETIME_MIN_S) / 2, RENEW_S)
                failures, said = 0, ""
                if outside != known:
                    log.info("port is forwarded", port=port, address=host_port(address, outside[1]))
            if outside != known:
                known = outside
                on_change(known)
            with trio.move_on_after(wait_s):
                await _until_moved(router)
    finally:
        if granted_by is not None:
            with trio.move_on_after(RELEASE_S, shield=True):
                await _release(granted_by, transport, port)


async def _until_moved(router: tuple[str, int] | None) -> None:
    """Returns when this computer has got another address or another router: what was forwarded leads nowhere then."""
    place = _place(router)
    while _place(router) == place:
        await trio.sleep(LOOK_S)


def _place(router: tuple[str, int] | None) -> tuple[str, tuple[str, int] | None]:
    """(our address towards the router, the router); nothing is sent."""
    found = router or _with_port(find_router())
    if found is None:
        return "", None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(found)
            return str(sock.getsockname()[0]), found
    except OSError:
        return "", found


async def _ask(
    router: tuple[str, int] | None, transport: Transport, port: int, wished_port: int
) -> tuple[str, Mapping]:
    """(the router's outer address, what it forwards). Raises `NoMappingError`."""
    if router is None:
        raise NoMappingError("no router was found")
    try:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect(router)  # from here on nobody else's datagrams are received
            outside = await _request(sock, address_request(), read_address)
            if not acceptable_address(outside, 65535, Reach()):
                raise NoMappingError(f"the router itself is behind another one (its address is {outside})")
            request = mapping_request(transport, port, wished_port, LIFETIME_S)
            mapping = await _request(sock, request, lambda answer: read_mapping(answer, transport, port))
    except OSError as error:
        raise NoMappingError(f"the router cannot be reached: {why(error)}") from None
    except RemoteProtocolError as error:
        raise NoMappingError(error.detail) from None
    return str(outside), mapping


async def _request(sock: trio.socket.SocketType, request: bytes, read: Callable[[bytes], _Answer]) -> _Answer:
    for tries_s in TRIES_S:
        await sock.send(request)
        with trio.move_on_after(tries_s):
            while True:
                answer = await sock.recv(ANSWER_BYTES_MAX)
                if answers(request, answer):
                    return read(answer)
    raise NoMappingError("the router does not answer (it does not speak NAT-PMP, or it is switched off there)")


async def _release(router: tuple[str, int], transport: Transport, port: int) -> None:
    """Gives the mapping back, and waits for a word that this has arrived."""
    try:
        with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            await sock.connect(router)
            await _request(sock, mapping_request(transport, port, 0, 0), bytes)
    except (OSError, NoMappingError):
        return  # it expires by itself


def _with_port(host: str | None) -> tuple[str, int] | None:
    return None if host is None else (host, ROUTER_PORT)
