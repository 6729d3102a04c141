"""Asking a home router to forward a port, in the words of NAT-PMP (RFC 6886, section 3). Pure."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass
from typing import Literal

from protocol.base.errors import RemoteProtocolError

ROUTER_PORT = 5351
LIFETIME_S = 3600
"""Asked for; the router says what it grants. Renewed at half of it or before."""
LIFETIME_MIN_S = 120
"""A router that grants less would have us ask all the time."""
LIFETIME_MAX_S = 86400
ANSWER_BYTES_MAX = 64

Transport = Literal["udp", "tcp"]

_OPCODES: dict[Transport, int] = {"udp": 1, "tcp": 2}
_RESULTS = {
    1: "speaks another version",
    2: "does not allow it",
    3: "has no address of its own yet",
    4: "has no room for more",
    5: "does not know this request",
}


@dataclass(frozen=True, slots=True)
class Mapping:
    """What the router forwards to us."""

    internal_port: int
    external_port: int
    lifetime_s: int


def address_request() -> bytes:
    """Which address do you have outside?"""
    return bytes(2)


def mapping_request(transport: Transport, internal_port: int, external_port: int, lifetime_s: int) -> bytes:
    """Forward `external_port` (a wish; 0: any) to our `internal_port`. `lifetime_s` 0 ends that."""
    return struct.pack("!BBHHHI", 0, _OPCODES[transport], 0, internal_port, external_port, lifetime_s)


def answers(request: bytes, datagram: bytes) -> bool:
    """Whether this is about that request; others may be late answers to what was sent again or before."""
    return len(datagram) >= 2 and datagram[1] == 128 + request[1]


def read_address(answer: bytes) -> ipaddress.IPv4Address:
    """The router's outer address. Raises `RemoteProtocolError`."""
    _check(answer, 0, 12)
    return ipaddress.IPv4Address(answer[8:12])


def read_mapping(answer: bytes, transport: Transport, internal_port: int) -> Mapping:
    """What was granted. Raises `RemoteProtocolError`, also for an answer to another request."""
    _check(answer, _OPCODES[transport], 16)
    internal, external, lifetime_s = struct.unpack("!HHI", answer[8:16])
    if internal != internal_port or external == 0:
        raise RemoteProtocolError("unexpected", f"the router maps port {internal} to {external}")
    return Mapping(internal, external, min(lifetime_s, LIFETIME_MAX_S))


def _check(answer: bytes, opcode: int, length: int) -> None:
    if len(answer) < 4:
        raise RemoteProtocolError("size", f"an answer of {len(answer)} bytes")
    version, code, result = struct.unpack("!BBH", answer[:4])
    if version != 0 or code != 128 + opcode:
        raise RemoteProtocolError("decode", f"version {version}, answer {code}")
    if result:
        raise RemoteProtocolError("unexpected", f"the router {_RESULTS.get(result, f'answers with error {result}')}")
    if len(answer) != length:
        raise RemoteProtocolError("size", f"an answer of {len(answer)} bytes")
