"""Whom the operator may let go: whoever holds nothing that nobody else has."""

from __future__ import annotations

from coordinator.live.orders import DrainNode
from coordinator.live.outbox import Outbox
from coordinator.live.roster import Roster
from coordinator.live.slots import SlotTable
from protocol.base.ids import NodeId
from protocol.messages import DrainOrder


def why_no_drain(roster: Roster, table: SlotTable, node: NodeId) -> str:
    """A sentence, or nothing."""
    member = roster.get(node)
    if member is None or not member.welcomed:
        return "it is not here"
    slot = table.slot_of(node)
    if slot is None:
        return ""
    return (
        f"it is {table.name(slot)}, whose state nobody else has; a server is moved by stopping it and starting it again"
        " on its state folder, on another computer too"
    )


def drain(order: DrainNode, roster: Roster, table: SlotTable, outbox: Outbox) -> None:
    """Tells it to go, unless it has come to hold something since the order was given."""
    if not why_no_drain(roster, table, order.node):
        outbox.log("warning", "member drained", node=order.node, reason=order.reason)
        outbox.send(order.node, DrainOrder(reason=order.reason))
