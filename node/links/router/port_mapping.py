"""Keeps a port forwarded on the home router while the daemon runs, when the owner allows it (NAT-PMP or UPnP).

With it others can dial this computer directly. Without it nothing is lost: we dial, we punch, we are relayed.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
import trio

from node.links.router.natpmp import LIFETIME_MIN_S, Transport
from node.links.router.routers import Grant, NoMappingError, Router, ask, own_address
from protocol.base.errors import BadInputError
from protocol.base.limits import ADDRESSES_MAX
from protocol.drive.addresses import host_port, is_loopback

AGAIN_FIRST_S = 30.0
"""After a failure: the router may be restarting. Doubled with every further one, up to AGAIN_S."""
AGAIN_S = 600.0
RENEW_S = 120.0
"""Asked again at the latest, however long the router grants it for: one that lost power has forgotten all."""
LOOK_S = 10.0
"""Between two looks whether this computer is still at the same place."""
RELEASE_S = 1.0
"""For giving the mapping back when the daemon ends; it expires by itself."""


def default_router(routes: str) -> str | None:
    """The IPv4 address of the default route, out of the text of Linux's /proc/net/route."""
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == "00000000" and fields[7] == "00000000" and int(fields[3], 16) & 2:
            return socket.inet_ntoa(struct.pack("=I", int(fields[2], 16)))
    return None


def find_router() -> Router | None:
    """This computer's router; None where there is none, or none can be found out."""
    try:
        host = default_router(Path("/proc/net/route").read_text())
    except OSError:
        return None
    return None if host is None else Router(host)


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
    router: Router | None = None,
) -> None:
    """Have `port` forwarded until cancelled; the mapping is given back then.

    `on_change` gets (public address, port) whenever that has changed, and None when it does not work any more.
    `router`: found out when not given.
    """
    log = structlog.get_logger("port_mapping")
    known: tuple[str, int] | None = None
    grant: Grant | None = None
    wished_port = port
    failures = 0
    said = ""
    try:
        while True:
            outside: tuple[str, int] | None = None
            try:
                grant = await ask(router or find_router(), transport, port, wished_port)
            except NoMappingError as error:
                wait_s = min(AGAIN_S, AGAIN_FIRST_S * 2**failures)
                failures = min(failures + 1, 16)
                if str(error) != said:  # asked again and again: said once
                    said = str(error)
                    log.warning("port is not forwarded", port=port, reason=said)
            else:
                outside, wished_port = (grant.address, grant.port), grant.port
                wait_s = min(max(grant.lifetime_s, LIFETIME_MIN_S) / 2, RENEW_S)
                failures, said = 0, ""
                if outside != known:
                    log.info("port is forwarded", port=port, address=host_port(*outside), by=grant.by)
            if outside != known:
                known = outside
                on_change(known)
            with trio.move_on_after(wait_s):
                await _until_moved(router)
    finally:
        if grant is not None:
            with trio.move_on_after(RELEASE_S, shield=True):
                await grant.release()


async def _until_moved(router: Router | None) -> None:
    """Returns when this computer has got another address or another router: what was forwarded leads nowhere then."""
    place = _place(router)
    while _place(router) == place:
        await trio.sleep(LOOK_S)


def _place(router: Router | None) -> tuple[str, Router | None]:
    """(our address towards the router, the router)."""
    found = router or find_router()
    try:
        return ("" if found is None else own_address(found)), found
    except OSError:
        return "", found
