"""A server's lives with pauses in between, while the owner's quota of the month is used up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from node.process.metrics import NodeMetrics
from protocol.base.machine import Told
from protocol.drive.limits import Limits
from protocol.drive.process import watch_signals

PAUSE_TICK_S = 5.0
SUSPENDED_BY_QUOTA = "suspended: quota"
"""How a life ends that goes on when the month turns."""


async def live(life: Callable[[], Awaitable[str]], limits: Limits, metrics: NodeMetrics) -> str:
    """Lives of the machine, with pauses while the quota is used up; returns the last one's reason."""
    while True:
        limits.check_quota()
        if not limits.low.is_set():
            reason = await life()
            if reason != SUSPENDED_BY_QUOTA:
                return reason
        if not await _pause(limits, metrics):
            return "stopped"


async def _pause(limits: Limits, metrics: NodeMetrics) -> bool:
    """Until the month turns; False when the owner ends it before. Not a byte is moved meanwhile."""
    log = structlog.get_logger("node")
    log.warning(
        "suspended", reason="quota", detail="this month's transfer quota is used up; the node waits for the next"
    )
    told: list[Told] = []
    async with trio.open_nursery() as nursery:

        def stop(fact: Told) -> None:
            told.append(fact)
            nursery.cancel_scope.cancel()

        async def count_time() -> None:
            while True:
                metrics.suspended("quota", PAUSE_TICK_S)
                await trio.sleep(PAUSE_TICK_S)

        await nursery.start(watch_signals, stop)
        nursery.start_soon(count_time)
        await limits.wait_for_the_month()
        nursery.cancel_scope.cancel()
    metrics.resumed("quota")
    if not told:
        log.info("resumed", detail="a new month, a new quota")
    return not told
