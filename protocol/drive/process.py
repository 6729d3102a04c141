"""What every daemon process needs around its machine: logs, signals, and a watch on its own loop."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog
import trio
from structlog.typing import EventDict

from protocol.base.machine import Log, Told
from protocol.base.printable import all_printable
from protocol.drive.human_log import HumanLines
from protocol.drive.metrics import LEVELS, Metrics

SECRET_FIELDS = frozenset({"seed", "secret", "key", "invite", "credential", "link", "password", "token"})
_SHOWN_BYTES = 4
PORTS = range(20_000, 32_000)
PORT_TRIES = 64
LISTEN_COUNT = 100
"""Callers that may wait to be taken."""


def set_up_logging(
    metrics: Metrics,
    *,
    level: str = "info",
    stream: TextIO | None = None,
    json: bool | None = None,
    seldom: Mapping[str, float] | None = None,
    detail: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **bound: Any,
) -> Any:
    """Configure structlog for this process; returns the logger, with `bound` on every line.

    Lines for people on a terminal (`human_log`; without `bound`), JSON otherwise (`json` decides when given). Lines
    below `level` are dropped, the others counted; secrets and byte strings are never written whole. On a terminal
    floats are rounded, of the events in `seldom` one is shown every so many seconds by `clock`, and of those in
    `detail` the field of that name is left out; JSON has everything.
    """
    stream = stream or sys.stderr
    as_json = not stream.isatty() if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else HumanLines(stream, bound)

    def filter_and_count(_logger: Any, method: str, event: EventDict) -> EventDict:
        name = "error" if method == "exception" else method
        if LEVELS.index(name) < LEVELS.index(level):
            raise structlog.DropEvent
        metrics.record("barnraise_log_messages_total", level=name)
        return event

    shown_at: dict[str, float] = {}

    def for_people(_logger: Any, _method: str, event: EventDict) -> EventDict:
        name, now = event["event"], clock()
        every_s = (seldom or {}).get(name)
        if every_s is not None:
            if now < shown_at.get(name, float("-inf")) + every_s:
                raise structlog.DropEvent
            shown_at[name] = now
        left_out = (detail or {}).get(name)
        return {field: all_printable(_rounded(value)) for field, value in event.items() if field != left_out}

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            filter_and_count,
            *([] if as_json else [for_people]),
            structlog.processors.add_log_level,
            *([structlog.processors.TimeStamper(fmt="iso", utc=True)] if as_json else []),
            _hide_secrets,
            structlog.processors.format_exc_info,
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, LastingStream(stream))),
        wrapper_class=structlog.make_filtering_bound_logger(0),
        cache_logger_on_first_use=False,
    )
    return structlog.get_logger(**bound)


class LastingStream:
    """A stream of text that may lose its reader: a terminal that was closed must not end the process by an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream

    def write(self, text: str) -> int:
        return self._try(lambda stream: stream.write(text)) or len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, act: Callable[[TextIO], int | None]) -> int | None:
        if self._stream is None:
            return None
        try:
            return act(self._stream)
        except (OSError, ValueError):  # EIO, EPIPE, or closed: nobody reads any more
            self._stream = None
            return None


def write_log(logger: Any, effect: Log) -> None:
    """Write what a machine's `Log` orders."""
    getattr(logger, effect.level)(effect.event, **effect.fields)


def _hide_secrets(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Fields named like secrets become "hidden"; byte strings keep their first bytes and their length."""
    return {name: "hidden" if name in SECRET_FIELDS else _shown(value) for name, value in event.items()}


def _rounded(value: Any) -> Any:
    """Floats as a person reads them: four digits, or one behind the point where they are large."""
    if isinstance(value, float) and math.isfinite(value):
        return round(value, 1) if abs(value) >= 1000 else float(f"{value:.4g}")
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _shown(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value[: _SHOWN_BYTES + 1])
        return data.hex() if len(data) <= _SHOWN_BYTES else f"{data[:_SHOWN_BYTES].hex()}… ({len(value)} bytes)"
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    if isinstance(value, dict):
        return {key: "hidden" if key in SECRET_FIELDS else _shown(item) for key, item in value.items()}
    return value


ENDING_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK") if hasattr(signal, name)
)
"""Whoever sends one of these wants the process to end: a service manager, Ctrl-C, a terminal that closes."""
HANG_UP = getattr(signal, "SIGHUP", None)


async def watch_signals(
    tell: Callable[[Told], None], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Turn SIGTERM, Ctrl-C and a hang-up into facts: the first asks to `drain` (finish and leave), any further one to
    `stop`. A terminal that closes may hang up twice, once itself and once through its shell: that is one wish.

    Begin it with `nursery.start`, before anything is said: whoever reads the first line may want to leave at once.
    """
    with trio.open_signal_receiver(*ENDING_SIGNALS) as signals:
        task_status.started()
        what, hung_up = "drain", False
        async for number in signals:
            if number == HANG_UP and hung_up:
                continue
            hung_up = hung_up or number == HANG_UP
            tell(Told(what))
            what = "stop"


async def watch_loop(metrics: Metrics, *, every_s: float = 0.25) -> None:
    """Measure how late the loop wakes a task that only sleeps; runs until cancelled."""
    while True:
        due = trio.current_time() + every_s
        await trio.sleep_until(due)
        metrics.record("barnraise_event_loop_lag_seconds", trio.current_time() - due)


def listening_socket(host: str, ports: Iterable[int]) -> socket.socket:
    """A TCP socket that listens at the first of `ports` that nobody has (0: any). Raises `OSError` for the last one.

    It listens from here on: a port that was only looked at may be somebody else's before it is used, and of three
    volunteers that began in the same moment one found its owner's page taken and ended.
    """
    failure = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    for port in ports:
        made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if sys.platform != "win32":  # where it would share a port that somebody listens at
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # who was there has just closed its links
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.bind((host, port))
            made.listen(LISTEN_COUNT)
        except OSError as error:
            made.close()
            failure = error
        else:
            return made
    raise failure


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on right now. Prefer port 0 where a server can say what it got.

    Drawn from below those that systems give to outgoing connections (from 32768 on): one of them may be taken in the
    second that the process which is told this port needs to start, and it would end at once.
    """
    for port in (*random.SystemRandom().sample(PORTS, PORT_TRIES), 0):
        with suppress(OSError), socket.create_server((host, port)) as server:
            found: int = server.getsockname()[1]
            return found
    raise OSError(f"no port of {host} is free")
