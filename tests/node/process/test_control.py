"""The owner's orders, as a daemon answers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from node.platform.local_socket import ask, open_door
from node.process.control import serve_orders


class Owned:
    def order(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"state": "working"}


async def test_a_line_of_brackets_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the socket could end the owner's daemon with it, without the token: on Windows every program of
    the computer reaches it."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    door = await open_door(tmp_path, unix=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_orders, door, Owned())
        stream = await trio.open_tcp_stream(*door.listener.socket.getsockname())
        await stream.send_all(b"[" * 60_000 + b"\n")
        with trio.fail_after(20):
            assert b"not an order" in await stream.receive_some()
        assert (await trio.to_thread.run_sync(ask, tmp_path, {"verb": "status"}))["state"] == "working"
        nursery.cancel_scope.cancel()
    await stream.aclose()
    door.close()
