"""Which addresses can be dialled from where: the ones that anybody reaches, and those of one network only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from protocol.base.limits import ADDRESSES_MAX
from protocol.link.candidates import PORT_MIN, Reach, acceptable_address

WEB_PORT = 443
"""The one port of services that a node may listen at: firewalls let it out."""

_LOCAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
        "192.168.0.0/16", "224.0.0.0/3", "::/127", "fc00::/7", "fe80::/10", "ff00::/8",
    )
)  # fmt: skip
"""Loopback, link-local, private, carrier-grade NAT (RFC 6598), multicast and reserved: nobody on the public network is
there. Documentation networks (RFC 5737) are left out: test beds use them as public ones."""


def host_of(address: str) -> str:
    """The host of HOST:PORT or [IPV6]:PORT."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")


def is_local(host: str) -> bool:
    """Whether `host` is an address that means something only inside one network. A name is taken for public."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address.version == network.version and address in network for network in _LOCAL)


def is_loopback(host: str) -> bool:
    """Whether `host` is this computer itself."""
    return host in ("localhost", "::1") or host.startswith("127.")


def split(addresses: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(those that anybody can dial, those of one network only), each in their order."""
    both = tuple(addresses)
    local = tuple(address for address in both if is_local(host_of(address)))
    return tuple(address for address in both if address not in local), local


def dialable(addresses: Sequence[str], local_addresses: Sequence[str], seen_from: str) -> tuple[str, ...]:
    """Where others reach a node that was seen coming from `seen_from` (empty: not known).

    Its local addresses count when it was seen at such a one: then whoever saw it is in the same network, and so is
    the run. A node seen from a public address that it does not have itself sits behind a NAT; a stranger who dialled
    its local addresses would knock at somebody else's door.
    """
    here = local_addresses if not seen_from or is_local(seen_from) else ()
    return (*addresses, *here)[:ADDRESSES_MAX]


def same_network(ours: str, theirs: str) -> bool:
    """Whether two nodes, seen from these hosts, may share a network behind one address."""
    return bool(ours) and (ours == theirs or (is_local(ours) and is_local(theirs)))


def worth_dialling(addresses: Sequence[str], local_addresses: Sequence[str], ours: str, theirs: str) -> tuple[str, ...]:
    """Those of a peer's addresses that we may dial on its word alone, best first.

    `ours` and `theirs`: the hosts that the coordinator sees both at. A private address counts only between two that may
    share a network, and this computer's own only when we were seen from it: a word that was made up on the way must
    not make us knock at the owner's own network (state-and-trust 2.1). A name never does: to look it up would already
    be a service to whoever wrote it, and what it stands for is its owner's choice.
    """
    neighbours = same_network(ours, theirs)
    near, everywhere = Reach(lan=True, loopback=is_loopback(ours)), Reach()
    local, public = [], []
    for address in dict.fromkeys((*addresses, *local_addresses)):
        try:
            ip = ipaddress.ip_address(host_of(address))
        except ValueError:
            continue
        port = int(address.rpartition(":")[2])
        if is_local(str(ip)):
            if neighbours and acceptable_address(ip, port, near):
                local.append(address)
        elif address in addresses and acceptable_address(ip, PORT_MIN if port == WEB_PORT else port, everywhere):
            public.append(address)
    return (*local, *public)[:ADDRESSES_MAX]
