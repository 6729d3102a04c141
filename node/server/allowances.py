"""Tells workers how many leases they get at once when that changes, and why; and tells the operator, by name."""

from __future__ import annotations

from node.server.context import StageContext
from node.server.pool import Pool
from protocol.messages import Allowance


def tell_allowances(context: StageContext, pools: list[Pool]) -> None:
    """Sends what the pools have ruled since they were asked last."""
    for pool in pools:
        for ruling in pool.take_rulings():
            message = Allowance(
                ledger_generation=context.generation,
                leases_max=ruling.leases_max,
                seconds=ruling.seconds,
                reason=ruling.reason,
            )
            context.out.send(ruling.node, message)
            if ruling.leases_max == 0:
                context.out.log(
                    "warning", "worker left out", worker=ruling.node, seconds=ruling.seconds, reason=ruling.reason
                )
            elif ruling.leases_max > 0:
                context.out.log("info", "worker gets less", worker=ruling.node, reason=ruling.reason)
