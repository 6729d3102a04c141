"""HOST:PORT on the command line, and the addresses under which others reach a socket of ours."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

import click
import psutil

from protocol.base.errors import BadInputError
from protocol.base.limits import ADDRESSES_MAX
from protocol.trust.membership import check_address

ANY_HOST = "*"
"""As a host to listen at: every interface, both families where there are two."""
OFF = ("off", 0)
"""What `--metrics off` stands for."""
_ANY_OF = {
    "0.0.0.0": (socket.AF_INET,),  # noqa: S104 - recognised, not bound
    "::": (socket.AF_INET6,),
    ANY_HOST: (socket.AF_INET, socket.AF_INET6),
}


class HostPort(click.ParamType[tuple[str, int]]):
    """HOST:PORT, or [IPV6]:PORT; port 0 lets the system choose."""

    name = "HOST:PORT"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        host, colon, port = value.rpartition(":")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise BadInputError(f"{param.opts[0] if param else 'address'}: {value!r} is not HOST:PORT")
        return host.removeprefix("[").removesuffix("]"), int(port)


class MetricsPlace(HostPort):
    """HOST:PORT, or `off`."""

    name = "HOST:PORT|off"

    def convert(
        self, value: str | tuple[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        return OFF if value == "off" else super().convert(value, param, ctx)


def host_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_web_address(url: str) -> bool:
    """Whether `url` can be a coordinator's: http://HOST:PORT, perhaps with a path."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket without its other, a port that is no number
        return False


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach a socket bound to `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def reachable_addresses(sockets: Sequence[tuple[str, int]], announced: Sequence[str] = ()) -> tuple[str, ...]:
    """Where others can dial sockets that listen at these (host, port), best first; at most ADDRESSES_MAX.

    What was announced counts alone; a host that stands for all interfaces becomes this machine's addresses of that
    family, loopback last. Raises `BadInputError` when an announced address cannot be.
    """
    if announced:
        if len(announced) > ADDRESSES_MAX:
            raise BadInputError(f"--announce: more than {ADDRESSES_MAX} addresses")
        for address in announced:
            check_address(address)
        return tuple(announced)
    found = [(own, port) for host, port in sockets for own in _hosts(host)]
    found.sort(key=lambda pair: is_loopback(pair[0]))
    return tuple(dict.fromkeys(host_port(host, port) for host, port in found))[:ADDRESSES_MAX]


def _hosts(host: str) -> list[str]:
    """The host itself, or this machine's addresses for which it stands; none that hold only on one cable."""
    if host not in _ANY_OF:
        return [host]
    entries = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return [
        entry.address
        for family in _ANY_OF[host]
        for entry in entries
        if entry.family == family and "%" not in entry.address
    ]
