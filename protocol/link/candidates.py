"""Where a peer says it can be reached by UDP, and which of these places we are willing to send a packet to.

A candidate is an address in bytes, never a name: nothing is looked up for a peer. What is left after
`acceptable_candidates` is all that ICE may send a packet to, so that no peer can make us knock at the owner's own
network, at this computer or at a cloud's metadata service (state-and-trust 2.1, S8).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

CANDIDATES_MAX = 16
"""Candidates of one peer: a few interfaces, each with a reflected and a relayed address. More would be a scan."""
PORT_MIN = 1024
"""Below are the ports of services; nobody's ICE listens there."""

CandidateKind = Literal["host", "srflx", "relay"]
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class Candidate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A UDP address; there are no TCP candidates. Priorities and foundations follow from the kind (RFC 8445)."""

    kind: CandidateKind
    """An own interface, what a STUN server saw of us, or an address at a TURN server."""
    address: Annotated[bytes, msgspec.Meta(min_length=4, max_length=16)]
    """4 bytes (IPv4) or 16 (IPv6), network order."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    @property
    def ip(self) -> IpAddress:
        """Raises `ValueError` when `address` has neither 4 nor 16 bytes."""
        return ipaddress.ip_address(self.address)

    def __str__(self) -> str:
        host = str(self.ip)
        return f"{self.kind} [{host}]:{self.port}" if ":" in host else f"{self.kind} {host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Reach:
    """Beyond public addresses, where we may send packets for a peer.

    Args:
        lan: the owner said that peers on the same private networks may be reached.
        loopback: peers on this very computer may be reached; for trials on one machine.
        same_site: the coordinator sees us and the peer at one address. What a peer says about that proves nothing:
            ours stands in the letters that we write.
        ours: our own candidates. A peer at the same site counts as being on our private network, as far as its
            address lies in the subnet (/24, /64) of one of ours.
    """

    lan: bool = False
    loopback: bool = False
    ours: tuple[Candidate, ...] = ()
    same_site: bool = False


def _networks(*texts: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


_NEVER = _networks(
    "0.0.0.0/8",  # this network
    "169.254.0.0/16",  # link-local; 169.254.169.254 is the metadata service of most clouds
    "192.0.0.0/24",  # protocol assignments; 192.0.0.192 is a metadata service
    "168.63.129.16/32",  # a cloud's host service, on a public address
    "100.100.100.200/32",  # a metadata service within the shared addresses
    "198.18.0.0/15",  # benchmarks
    "224.0.0.0/4",  # multicast
    "240.0.0.0/4",  # reserved, and the broadcast address
    "::/96",  # unspecified, and IPv4 in an old dress; ::1 is looked at before
    "::ffff:0:0/96",  # IPv4 in IPv6: would lead around all rules for IPv4
    "64:ff9b::/96",  # the same through a translator
    "64:ff9b:1::/48",
    "2001::/32",  # the same by Teredo
    "2002::/16",  # the same by 6to4
    "100::/64",  # discard
    "fd00:ec2::254/128",  # a metadata service within the private addresses
    "fe80::/10",  # link-local
    "fec0::/10",  # site-local, of old
    "ff00::/8",  # multicast
)
_PRIVATE = _networks("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
_LOOPBACK = _networks("127.0.0.0/8", "::1/128")


def acceptable_address(ip: IpAddress, port: int, reach: Reach) -> bool:
    """Whether a packet may be sent to (ip, port)."""
    if port < PORT_MIN or port > 65535:
        return False
    if _within(ip, _LOOPBACK):
        return reach.loopback
    if _within(ip, _NEVER):
        return False
    if _within(ip, _PRIVATE):
        near = any(_neighbours(ip, own.ip) for own in reach.ours if own.kind == "host")
        return reach.lan or (reach.same_site and near)
    return True


def acceptable_candidates(theirs: Sequence[Candidate], reach: Reach) -> tuple[Candidate, ...]:
    """Those of a peer's candidates to which packets may be sent, at most CANDIDATES_MAX, none twice."""
    kept: dict[tuple[bytes, int], Candidate] = {}
    for candidate in theirs[:CANDIDATES_MAX]:
        try:
            ip = candidate.ip
        except ValueError:
            continue
        if acceptable_address(ip, candidate.port, reach):
            kept.setdefault((candidate.address, candidate.port), candidate)
    return tuple(kept.values())


def offered_candidates(ours: Iterable[Candidate], reach: Reach) -> tuple[Candidate, ...]:
    """Those of our own candidates that are worth telling a peer: private ones too, since it may be a neighbour."""
    open_reach = Reach(lan=True, loopback=reach.loopback)
    return acceptable_candidates(tuple(ours), open_reach)


def _within(ip: IpAddress, networks: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    return any(ip.version == network.version and ip in network for network in networks)


def _neighbours(first: IpAddress, second: IpAddress) -> bool:
    """Whether both lie in one /24 (IPv4) or /64 (IPv6)."""
    if first.version != second.version:
        return False
    kept_bytes = 3 if first.version == 4 else 8
    return first.packed[:kept_bytes] == second.packed[:kept_bytes]
