"""What a volunteer is told before it says yes follows from the run's own numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from node.enquiry import _Asker, describe, gigabytes_per_hour, measure_stage
from protocol.messages import Message, Ping, Pong
from protocol.run import BatchSection, LimitsSection, ModelSection, RunConfig, StagesSection, WireSection

CONFIG = RunConfig(
    name="tiny",
    model=ModelSection(layers=2, hidden=1000, heads=2, kv_heads=1, feed_forward=24, context=10),
    batch=BatchSection(microbatches=8, samples=5),
    stages=StagesSection(count=2),
    wire=WireSection(activations="bf16", gradients="fp32", parameters="bf16"),
    limits=LimitsSection(contribution_tasks=2),
)


def test_traffic_is_hand_checkable() -> None:
    """1,000 tokens/s of width 1,000 in bf16 both ways; 2 M parameters: a gradient each 100 tokens, weights each 400."""
    up, down = gigabytes_per_hour(CONFIG, 2_000_000, 1000.0)
    assert up == pytest.approx((2 * 1000 * 2 + 1_000_000 * 4 / 100) * 1000 * 3600 / 1e9)
    assert down == pytest.approx((2 * 1000 * 2 + 1_000_000 * 2 / 400) * 1000 * 3600 / 1e9)


def test_the_text_names_run_cost_and_promise() -> None:
    """Run, size, gigabytes an hour, and that no code is sent; without a measurement no figure is made up."""
    text = describe(CONFIG, 259, 1, 500.0)
    assert "The run: tiny" in text and "never code" in text and "GB an hour up" in text and "500 tokens/s" in text
    assert "GB an hour" not in describe(CONFIG, 259, 1, 0.0)


def test_the_benchmark_measures_a_stage() -> None:
    """A figure above nothing, also when a stage is less than a layer."""
    small = RunConfig(
        model=ModelSection(layers=1, hidden=16, heads=2, kv_heads=1, feed_forward=24, context=8),
        stages=StagesSection(count=3),
    )
    assert measure_stage(small, 37, 1) > 0


async def test_whoever_waits_for_a_run_to_begin_answers_pings() -> None:
    """A run whose servers are not there yet may leave a person waiting for long; silence would cost the link."""
    sent: list[Message] = []
    link: Any = SimpleNamespace(send=sent.append, close=lambda reason: None)
    asker = _Asker()
    await asker.on_message(link, Ping(number=7), ())
    assert sent == [Pong(number=7)] and not asker.heard.is_set()
