"""Where a volunteer's computer connects to: servers that a coordinator names, but no neighbour of its owner.

The addresses of a plan come from the coordinator, whom the volunteer does not know. A false one would let it knock at
the doors of the owner's network (routers, printers, services of this computer), and time would tell what is open.
So a private address counts only when the coordinator is in a private network itself, or the owner says `--lan`, and
this computer's own only when the coordinator runs on it: then all are in one house. A name counts by what it
stands for.
"""

from __future__ import annotations

import ipaddress

from protocol.base.ids import NodeId
from protocol.drive.transport import Transport
from protocol.link.reach import is_local, is_loopback

HOSTS_MAX = 64
"""Addresses of the coordinator that are remembered: the link names eight, each with a few of both families."""


class Neighbourhood:
    """What may be dialled, going by where the join link says that the coordinator is."""

    def __init__(self, transport: Transport, coordinator: NodeId, *, lan: bool) -> None:
        """Sets itself as the transport's `may_dial`. `lan`: private addresses are this network's, the owner says."""
        self._coordinator = coordinator
        self._lan = lan
        self._hosts: dict[str, None] = {}
        """IP addresses that stand for the coordinator's."""
        transport.may_dial = self.may_dial

    def may_dial(self, peer: NodeId, host: str) -> bool:
        """Whether to connect to the IP address `host` for `peer`; the coordinator's own come from the join link."""
        if peer == self._coordinator:
            if len(self._hosts) < HOSTS_MAX:
                self._hosts[host] = None
            return True
        if not is_local(host):
            return True
        known = list(self._hosts)
        if known and all(map(is_loopback, known)):
            return True
        together = self._lan or (bool(known) and all(map(is_local, known)))
        return together and _is_neighbour(host)


def _is_neighbour(host: str) -> bool:
    """A private address of another computer: not this one by any of its names, no group, and not 169.254.0.0/16, where
    clouds keep their instances' secrets."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    own = address.is_loopback or address.is_unspecified
    return not (own or address.is_link_local or address.is_multicast or address.is_reserved)
