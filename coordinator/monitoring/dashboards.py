"""The five dashboards."""

from __future__ import annotations

from coordinator.monitoring.node_boards import node, servers, transport
from coordinator.monitoring.panels import Dashboard
from coordinator.monitoring.run_boards import run, swarm


def dashboards() -> tuple[Dashboard, ...]:
    """In the order in which an operator looks at them."""
    return (run(), swarm(), servers(), node(), transport())
