"""A server's own daemon in which something hangs: `python -m tests.integration.hanging lane|disk FILE server LINK …`;
with `slow` its disk takes its time, with `sums` it does so with each step's sum; with `clock` its clock is ahead, from
the start. `any` is for whatever command: its lane hangs once FILE.lane exists, its disk once FILE.disk does, and its
clock is ahead while FILE.clock is there.

Everything else is production: links, messages, pings, reports. From the moment that FILE exists, the server lane never
ends a job again, or the journal's writer never comes back from a sync; as with a disk or a driver that hangs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.compute.lanes import ServerPerformer
from node.process.journal import Journal
from protocol.cli import main

SLOW_S = 0.8
SUM_S = 5.0
AHEAD_S = 200.0
"""Of the 300 s by which clocks may differ."""


def _hangs_once_there(file: Path, original: Callable[..., Any]) -> Callable[..., Any]:
    def do(*arguments: Any) -> Any:
        if file.exists():
            time.sleep(10**6)
        return original(*arguments)

    return do


def _commits_slowly(file: Path, original: Callable[..., Any]) -> Callable[..., Any]:
    def at(statement: str) -> None:
        if statement == "COMMIT" and file.exists():
            time.sleep(SLOW_S)

    def opened(self: Any) -> Any:
        connection = original(self)
        connection.set_trace_callback(at)
        return connection

    return opened


def _applies_slowly(file: Path, original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*arguments: Any) -> Any:
        if file.exists():
            time.sleep(SUM_S)
        return original(*arguments)

    return apply


if __name__ == "__main__":
    _, where, name, *sys.argv[1:] = sys.argv
    if where == "lane":
        ServerPerformer.perform = _hangs_once_there(Path(name), ServerPerformer.perform)  # type: ignore[method-assign]
    elif where == "slow":
        Journal._open = _commits_slowly(Path(name), Journal._open)  # type: ignore[method-assign]
    elif where == "sums":
        ServerPerformer._apply = _applies_slowly(Path(name), ServerPerformer._apply)  # type: ignore[method-assign]
    elif where == "any":
        lane, disk, jump = (Path(f"{name}.{what}") for what in ("lane", "disk", "clock"))
        ServerPerformer.perform = _hangs_once_there(lane, ServerPerformer.perform)  # type: ignore[method-assign]
        Journal.commit = _hangs_once_there(disk, Journal.commit)  # type: ignore[method-assign]
        true_time = time.time
        time.time = lambda: true_time() + (AHEAD_S if jump.exists() else 0.0)
    elif where == "clock":
        right = time.time
        time.time = lambda: right() + AHEAD_S
    else:
        Journal.commit = _hangs_once_there(Path(name), Journal.commit)  # type: ignore[method-assign]
    main()
