"""The month's quota: the node finishes and leaves, waits with the reason named, and comes back when the month turns."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog.testing
import trio
import trio.testing

from node.process.metrics import NodeMetrics
from node.process.quota_pause import SUSPENDED_BY_QUOTA, live
from protocol.drive.limits import Limits, Quota

START_S = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
MONTH_END_S = datetime(2026, 12, 1, tzinfo=UTC).timestamp() - START_S


@pytest.fixture
async def limits(tmp_path: Path) -> Limits:
    """A quota of 1000 bytes, on a wall clock that runs with trio's from noon of 30 November on."""
    began = trio.current_time()
    return Limits(quota=Quota(1000, tmp_path / "transfers.json", lambda: START_S + trio.current_time() - began))


def sample(metrics: NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


async def test_it_resumes_when_the_month_turns(limits: Limits, autojump_clock: trio.testing.MockClock) -> None:
    """A life that ends for want of quota is followed by a pause to the first of the month, then by the next life."""
    metrics, lives = NodeMetrics("volunteer"), []

    async def life() -> str:
        lives.append(trio.current_time())
        if len(lives) > 1:
            return "finished"
        await trio.sleep(3600)
        limits.spend_down(995)
        await limits.low.wait()
        return SUSPENDED_BY_QUOTA

    async def look() -> None:
        await trio.sleep(MONTH_END_S - 60)
        assert sample(metrics, "barnraise_node_suspended", reason="quota") == 1
        assert sample(metrics, "barnraise_node_state", barnraise_node_state="paused") == 1
        metrics.show_limits(limits)
        assert sample(metrics, "barnraise_node_transfer_quota_remaining_bytes") == 5

    with structlog.testing.capture_logs() as logs:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            assert await live(life, limits, metrics) == "finished"
    assert lives[0] == 0 and MONTH_END_S <= lives[1] <= MONTH_END_S + 60
    assert [(line["event"], line.get("reason")) for line in logs] == [("suspended", "quota"), ("resumed", None)]
    assert sample(metrics, "barnraise_node_suspended", reason="quota") == 0
    held_s = sample(metrics, "barnraise_node_suspended_seconds_total", reason="quota")
    assert held_s == pytest.approx(MONTH_END_S - 3600, abs=60)


async def test_a_start_without_quota_waits_too(limits: Limits, autojump_clock: trio.testing.MockClock) -> None:
    """A restart is no way around the quota: not even a first call is made."""
    limits.spend_up(1000)
    limits.low, limits.used_up = trio.Event(), trio.Event()

    async def life() -> str:
        return f"lived at {trio.current_time() >= MONTH_END_S}"

    assert await live(life, limits, NodeMetrics("volunteer")) == "lived at True"


async def test_the_owner_may_end_the_pause(limits: Limits) -> None:
    """Ctrl-C while it waits ends the process in peace."""
    limits.spend_up(1000)

    async def life() -> str:
        raise AssertionError("there is no quota to live on")

    async def interrupt() -> None:
        await trio.testing.wait_all_tasks_blocked()
        os.kill(os.getpid(), signal.SIGINT)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(interrupt)
        with trio.fail_after(10):
            assert await live(life, limits, NodeMetrics("volunteer")) == "stopped"
