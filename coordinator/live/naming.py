"""What the operator calls members: names that outlive links, and that nobody else can take."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.live.orders import NameNode
from coordinator.live.outbox import Outbox
from coordinator.live.records import Named
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import PUBLIC_NAME_MAX
from protocol.base.printable import is_printable


class Naming:
    """Names by node; whoever has none is called by what it is and the first letters of its id."""

    def __init__(self, known: Iterable[Named], outbox: Outbox) -> None:
        self._outbox = outbox
        self._names = {one.node: one.name for one in known}

    def of(self, node: NodeId) -> str:
        """The operator's name for it, or nothing."""
        return self._names.get(node, "")

    def checked(self, node: NodeId, name: str) -> str:
        """The name as it will stand. Raises `BadInputError` for one that cannot be, or that another node has."""
        name = " ".join(name.split())
        if len(name) > PUBLIC_NAME_MAX or not is_printable(name):
            raise BadInputError(f"NAME: at most {PUBLIC_NAME_MAX} letters that can be printed")
        other = next((one for one, taken in self._names.items() if taken == name and one != node), None)
        if name and other is not None:
            raise BadInputError(f"NAME: {other[:8]} is called {name} already")
        return name

    def order(self, order: NameNode) -> None:
        """Counts once it is durable."""
        named = Named(node=order.node, name=order.name)
        self._outbox.log("info", "member named", node=order.node, detail=order.name or "no name any more")
        self._outbox.persist(named, lambda now: self._durable(named))

    def _durable(self, named: Named) -> None:
        self._names.pop(named.node, None)
        if named.name:
            self._names[named.node] = named.name
