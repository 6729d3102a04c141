"""Where a node can be dialled, as that changes while it runs: its computer's own addresses, and what a router forwards.

A provider gives a home another IPv6 prefix in the night, a lease of DHCP ends, a laptop goes elsewhere: a plan, a note
or a list of relays that still names the old address sends peers to nobody, or to a stranger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import trio

from node.links.connector import Connector
from node.links.router.port_mapping import LOOK_S, with_forwarded

Places = tuple[tuple[str, ...], tuple[str, ...]]
"""(where anybody can dial us, where our own network can)"""


@dataclass(frozen=True)
class OwnPlaces:
    """How a process finds its own places, and who else hears of them."""

    look: Callable[[], Places]
    """What they are now."""
    announce: Callable[[tuple[str, ...], tuple[str, ...]], None]
    """Told both kinds whenever they have changed, after the peers' side knows."""
    forwarded_port: int = 0
    """Where we listen by TCP, for the home router; counts only where its owner allows that."""


class Whereabouts:
    """Tells connector and machine of each change, wherever it comes from."""

    def __init__(self, connector: Connector, places: OwnPlaces) -> None:
        self._connector = connector
        self._places = places
        self._own: Places = (connector.here.addresses, connector.here.local_addresses)
        self._outside: tuple[str, int] | None = None
        self._log = structlog.get_logger("links")

    async def watch(self) -> None:
        """Looks at this computer's addresses until cancelled; the first look is at once, since starting takes time."""
        while True:
            try:
                own = self._places.look()
            except OSError as error:  # an interface that goes while we ask: the next look shows what is left
                self._log.debug("own addresses not found out", reason=str(error))
            else:
                if own != self._own:
                    self._own = own
                    self._log.info("own addresses changed", addresses=own[0], local_addresses=own[1])
                    self._tell()
            await trio.sleep(LOOK_S)

    def forwarded(self, outside: tuple[str, int] | None) -> None:
        """The home router forwards a port of this (host, port) to us, or none any more."""
        self._outside = outside
        self._tell()

    def _tell(self) -> None:
        everybody, local = self._own
        self._connector.set_addresses(with_forwarded(everybody, self._outside), local)
        here = self._connector.here
        self._places.announce(here.addresses, here.local_addresses)
