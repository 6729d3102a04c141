"""A volunteer's process: lives of the node as its owner's limits allow, the owner's door, and thanks at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import structlog
import trio

from node.owner.consent import withdraw_consent
from node.owner.limits import OwnerLimits
from node.owner.thanks import ThanksBook, ThanksShelf
from node.platform.local_socket import open_door, tell_more
from node.platform.notify import notify
from node.platform.places import device_folder, limits_file, settings_folder
from node.platform.priority import stand_back
from node.platform.sensors import sensors_here
from node.process.control import serve_orders
from node.process.device_start import DeviceStart
from node.process.keeper import Keeper, Life
from node.process.metrics import NodeMetrics
from node.process.starting import Starting
from protocol.base.ids import NodeId
from protocol.drive.limits import Limits
from protocol.drive.process import watch_signals
from protocol.trust.membership import JoinLink


async def lend(
    make: Callable[[OwnerLimits], Life],
    *,
    state: Path,
    link: JoinLink,
    nodes: Sequence[NodeId],
    run_name: Callable[[], str],
    overrides: dict[str, str],
    metrics: Sequence[NodeMetrics],
    line: Limits,
    page: str | None = "",
    page_port: int = 0,
    starting: Starting | None = None,
) -> str:
    """Until the run is finished or the owner has enough; returns why it ended.

    Args:
        make: a new life of the node, with all its devices.
        nodes: what the run calls it, by device; `metrics`: theirs.
        overrides: limits of the command line, by name.
        page: the token of its owner's page, or nothing for the one of the visit before; None: no page.
        page_port: where that page was, and its browser waits; 0: where it was at the visit before.
        starting: what has heard the owner until now.
    """
    if starting is not None:
        starting.hand_over()
    run_id = link.run_id.hex()
    folders = [device_folder(state, place) for place in range(len(nodes))]
    books = [
        ThanksBook(folder, link.coordinator_key, link.run_id, node) for folder, node in zip(folders, nodes, strict=True)
    ]
    keeper = Keeper(
        state=state,
        settings=limits_file(),
        overrides=overrides,
        sensors=sensors_here(state, own_pids),
        line=line,
        metrics=metrics,
        run_name=run_name,
        thanks=ThanksShelf(books),
        not_yet=DeviceStart.forget_ahead,
    )
    if keeper.limits.low_priority:
        stand_back()
    door = await open_door(state, role="volunteer", run_id=run_id)
    if starting is not None:
        await trio.to_thread.run_sync(starting.close)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, keeper.told)
            nursery.start_soon(serve_orders, door, keeper)
            nursery.start_soon(keeper.watch)
            if page is not None:
                # a demo's volunteers need no web server
                from node.process.page import serve_page
                from node.process.page_gate import keep_place, kept_place

                kept = kept_place(state)
                token = page or kept.token
                address = await serve_page(nursery, keeper, token, page_port, kept.port, kept.second)
                tell_more(state, page=address)
                try:
                    keep_place(state, address)
                except OSError as error:
                    structlog.get_logger("owner").warning("cannot be kept", file="page.json", reason=error.strerror)
                structlog.get_logger("owner").info("page", address=address)
            notify("READY=1", "STATUS=ready")
            reason = await keeper.live(make)
            notify("STOPPING=1")
            await keeper.say_last()
            nursery.cancel_scope.cancel()
    finally:
        door.close()
        keeper.save()
    structlog.get_logger("owner").info("thanks", text=keeper.thanks())
    if reason == "left":
        withdraw_consent(settings_folder(), run_id)
    return reason


def own_pids() -> list[int]:
    """This process and those that it has started."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
