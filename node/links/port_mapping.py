"""Keeps a port forwarded on the home router while the daemon runs, when the owner allows it (NAT-PMP, RFC 6886).

With it others can dial this computer directly. Without it nothing is lost: we dial, we punch, we are relayed.
UPnP is not spoken: it wants an HTTP server's worth of XML from a device nobody can vouch for.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
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
    mapping_request,
    read_address,
    read_mapping,
)
from protocol.candidates import Reach, acceptable_address
from protocol.errors import RemoteProtocolError

TRIES_S = (0.25, 0.5, 1.0, 2.0)
"""How long an answer is waited for before the request is sent again (RFC 6886 section 3.1, which goes on to 64 s)."""
AGAIN_S = 600.0
"""After a failure: the router may be restarting, or another one may be there."""
RELEASE_S = 0.5
"""For giving the mapping back when the daemon ends; it expires by itself."""


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
    wished_port = port
    while True:
        wait_s = AGAIN_S
        address = router or _with_port(find_router())
        try:
            outside, mapping = await _ask(address, transport, port, wished_port)
            wished_port = mapping.external_port
            wait_s = max(mapping.lifetime_s, LIFETIME_MIN_S) / 2
        except NoMappingError as error:
            outside = None
            log.info("no port is forwarded", port=port, why=str(error))
        if outside != known:
            known = outside
            on_change(known)
        try:
            await trio.sleep(wait_s)
        except trio.Cancelled:
            if known is not None and address is not None:
                await _release(address, transport, port)
            raise


async def _ask(
    router: tuple[str, int] | None, transport: Transport, port: int, wished_port: int
) -> tuple[tuple[str, int], Mapping]:
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
        raise NoMappingError(f"the router cannot be reached: {error}") from None
    except RemoteProtocolError as error:
        raise NoMappingError(error.detail) from None
    return (str(outside), mapping.external_port), mapping


async def _request(sock: trio.socket.SocketType, request: bytes, read: Callable[[bytes], _Answer]) -> _Answer:
    for tries_s in TRIES_S:
        await sock.send(request)
        with trio.move_on_after(tries_s):
            return read(await sock.recv(ANSWER_BYTES_MAX))
    raise NoMappingError("the router does not answer (it does not speak NAT-PMP, or it is switched off there)")


async def _release(router: tuple[str, int], transport: Transport, port: int) -> None:
    with trio.move_on_after(RELEASE_S, shield=True):
        try:
            with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                await sock.connect(router)
                await sock.send(mapping_request(transport, port, 0, 0))
        except OSError:
            return


def _with_port(host: str | None) -> tuple[str, int] | None:
    return None if host is None else (host, ROUTER_PORT)
