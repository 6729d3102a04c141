"""Where a coordinator listens: for links, and for those who read its pages."""

from __future__ import annotations

import errno
from functools import partial
from typing import Any

import trio

from coordinator.process.page import READ_S
from protocol.base.errors import BadInputError
from protocol.drive.addresses import ANY_HOST, host_port
from protocol.drive.process import listening_socket
from protocol.drive.tcp import open_all_listeners
from protocol.drive.web import serve_app

DEFAULT_LISTEN = (("*", 8469),)
"""What the command line's default stands for."""


async def listen(where: tuple[tuple[str, int], ...]) -> tuple[list[trio.SocketListener], list[int]]:
    """Listens; of a taken port that nobody has asked for it says how to get another."""
    try:
        return await open_all_listeners(where)
    except BadInputError as error:
        cause = error.__cause__
        if where != DEFAULT_LISTEN or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            raise
        raise BadInputError(
            f"port {DEFAULT_LISTEN[0][1]} is in use by another program, perhaps another coordinator;"
            " `--listen HOST:PORT` chooses another"
        ) from cause


async def serve(nursery: trio.Nursery, app: Any, option: str, host: str, *ports: int) -> str:
    """Serves `app` at the first of these ports that is free (0: any); returns its address as a URL.

    Raises `BadInputError` that names the option.
    """
    host = "0.0.0.0" if host == ANY_HOST else host  # noqa: S104 - the operator's wish
    try:
        await trio.socket.getaddrinfo(host, ports[0])  # an unknown name holds up nobody else
        listening = listening_socket(host, ports)
    except OSError as error:
        raise BadInputError(f"{option}: {host_port(host, ports[0])}: {error.strerror or error}") from error
    url: str = await nursery.start(partial(serve_app, app, listening, read_s=READ_S))
    return url
