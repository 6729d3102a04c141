"""When a punching helper that says nothing is given up."""

from __future__ import annotations

from typing import Any

import structlog
import trio
import trio.testing

from node.links.punch.helper import HUNG_S, START_S, WATCH_S, _Process
from node.links.punch.helper_frames import Census, order_frame


class FakeChild:
    """A process that can be killed, and knows when it was."""

    pid = 7

    def __init__(self) -> None:
        self.killed_at: float | None = None

    def kill(self) -> None:
        self.killed_at = self.killed_at or trio.current_time()


async def killed_after_s(first_word_s: float) -> float:
    """When a helper is killed that speaks once, so long after its start."""
    process, child = _Process(structlog.get_logger(), None), FakeChild()
    helper, daemon = trio.testing.memory_stream_pair()
    began = trio.current_time()
    parts: Any = process  # its reader and its watch, without the process that `run` starts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts._read, daemon)
        nursery.start_soon(parts._watch, child)
        await trio.sleep(first_word_s)
        if child.killed_at is None:
            await helper.send_all(order_frame(0, Census(0, 0, 0)))
        while child.killed_at is None:
            await trio.sleep(WATCH_S)
        nursery.cancel_scope.cancel()
    return child.killed_at - began


async def test_a_helper_has_all_of_its_start_for_its_first_word(autojump_clock: trio.testing.MockClock) -> None:
    """A busy small computer needs longer to start it than one that runs may be silent; it was killed in the middle."""
    assert HUNG_S < START_S - 1.0
    assert START_S - 1.0 + HUNG_S < await killed_after_s(START_S - 1.0) <= START_S - 1.0 + HUNG_S + 2 * WATCH_S


async def test_a_helper_that_never_speaks_is_killed_after_its_start(autojump_clock: trio.testing.MockClock) -> None:
    assert START_S < await killed_after_s(10 * START_S) <= START_S + 2 * WATCH_S
