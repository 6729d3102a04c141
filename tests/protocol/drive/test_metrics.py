"""Which series a process shows."""

from __future__ import annotations

from prometheus_client import generate_latest

from protocol.drive.metrics import Family, Metrics

STAGES = {"run": ("mine",), "stage": ("0", "1", "2")}


def lines(metrics: Metrics) -> list[str]:
    text = generate_latest(metrics.registry).decode()
    return [line for line in text.splitlines() if line.startswith("tests_")]


def test_a_value_that_is_not_shown_has_no_series_until_it_is() -> None:
    """A stage that a run does not have looks like none; one that a replan has made is there at 0."""
    metrics = Metrics(
        Family("tests_nodes", "gauge", "Nodes.", STAGES),
        Family("tests_steps", "gauge", "Steps.", {"run": ("mine",)}),
    )
    metrics.record("tests_nodes", 3, run="mine", stage="0")
    metrics.show_only("stage", ["0"])
    assert lines(metrics) == ['tests_nodes{run="mine",stage="0"} 3.0', 'tests_steps{run="mine"} 0.0']
    metrics.show_only("stage", ["0", "1"])
    assert lines(metrics)[:2] == ['tests_nodes{run="mine",stage="0"} 3.0', 'tests_nodes{run="mine",stage="1"} 0.0']
    metrics.show_only("stage", [])
    assert lines(metrics) == ['tests_steps{run="mine"} 0.0']
