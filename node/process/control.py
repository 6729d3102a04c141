"""Answers the owner's orders on the local socket: one line of JSON each way (see `node.platform.local_socket`)."""

from __future__ import annotations

import json
from typing import Any, Protocol

import trio

from node.platform.local_socket import Door, is_ours
from protocol.base.errors import BadInputError

ORDER_BYTES_MAX = 64 << 10
IDLE_S = 60.0
"""A caller that says nothing for so long is let go."""


class Owned(Protocol):
    """What does as its owner says: the keeper, or `join` before there is one."""

    def order(self, order: dict[str, Any]) -> dict[str, Any]: ...


async def serve_orders(door: Door, owned: Owned) -> None:
    """Until cancelled. A caller that talks nonsense gets a sentence, and nobody else notices."""

    async def answer(stream: trio.SocketStream) -> None:
        data = bytearray()
        try:
            with trio.move_on_after(IDLE_S):
                async for more in stream:
                    data += more
                    if len(data) > ORDER_BYTES_MAX:
                        break
                    while b"\n" in data:
                        line, _, rest = bytes(data).partition(b"\n")
                        data = bytearray(rest)
                        await stream.send_all(json.dumps(_answer(line, door, owned)).encode() + b"\n")
        except trio.BrokenResourceError:
            pass  # it went away before it had its answer
        finally:
            await stream.aclose()

    await trio.serve_listeners(answer, [door.listener])


def _answer(line: bytes, door: Door, owned: Owned) -> dict[str, Any]:
    try:
        order = json.loads(line)
        if not isinstance(order, dict) or not is_ours(door.token, order.get("token", "")):
            return {"error": "not an order of this computer's owner"}
        return owned.order(order)
    except (BadInputError, ValueError) as error:
        return {"error": str(error)}
    except RecursionError:  # a line of brackets, before anybody has shown a token
        return {"error": "not an order of this computer's owner"}
