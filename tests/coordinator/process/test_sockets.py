"""The page for everybody, served: whoever reads it does not decide when the coordinator ends."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from coordinator.process.http import build_public_app
from coordinator.process.metrics import coordinator_families
from coordinator.process.sockets import serve
from protocol.drive import web
from protocol.drive.metrics import Metrics
from protocol.run.run import RunConfig

PATIENCE_S = 20.0
PIPELINED = b"GET /page/uplot.js HTTP/1.1\r\nHost: x\r\n\r\n" * 400
"""Twenty megabytes of answers."""


class Silent:
    """Nothing to show: the page's files are asked for."""

    def overview(self) -> dict[str, Any]:
        return {}

    def members(self, *, whole_ids: bool) -> list[dict[str, Any]]:
        return []

    def picture(self) -> bytes:
        return b""

    async def curve(self, points: int) -> list[Any]:
        return []

    async def validations(self, count_max: int) -> list[Any]:
        return []


async def test_a_reader_who_takes_no_answer_does_not_keep_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for a file four hundred times and reads nothing. The nursery that the page is served in ends all the
    same, as it must when the database fails: another coordinator waits for the lock."""
    monkeypatch.setattr(web, "END_S", 0.2)
    app = build_public_app(Silent(), Metrics(*coordinator_families(RunConfig())))
    stop, ended = trio.CancelScope(), trio.Event()

    async def run(task_status: trio.TaskStatus[str]) -> None:
        with stop:
            async with trio.open_nursery() as nursery:
                task_status.started(await serve(nursery, app, "--page", "127.0.0.1", 0))
        ended.set()

    async with trio.open_nursery() as nursery:
        url = await nursery.start(run)
        async with await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2])) as reader:
            await reader.send_all(PIPELINED)
            assert await reader.receive_some(1) == b"H"
            await trio.testing.wait_all_tasks_blocked(0.1)  # the buffers are full
            stop.cancel()
            with trio.move_on_after(PATIENCE_S):
                await ended.wait()
            over = ended.is_set()
        assert over  # now that the reader is gone it ends in any case
