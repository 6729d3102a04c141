"""What tests need to know of expressions and metrics: names in them, families that exist, variables filled in."""

from __future__ import annotations

import re

from coordinator.monitoring.console import queries
from coordinator.monitoring.dashboards import dashboards
from coordinator.monitoring.rules import RECORDINGS, alerts
from coordinator.process.metrics import coordinator_families
from node.process.metrics import NODE_FAMILIES, SERVER_FAMILIES
from protocol.drive.metrics import DAEMON_FAMILIES, Family
from tests.coordinator.live.desk import CONFIG

FOREIGN = {"up", "ALERTS", "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
"""Series of Prometheus itself and of its client library."""
_NAME = re.compile(r"\b(?:barnraise[:_][a-z0-9_:]+|up|ALERTS|process_[a-z_]+)\b")
_QUOTED = re.compile(r'"[^"]*"')
_LABELS = re.compile(r"\b(?:by|on|group_left|group_right)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")


def families() -> dict[str, Family]:
    """Every family that any daemon exports, by name."""
    every = (*DAEMON_FAMILIES, *NODE_FAMILIES, *SERVER_FAMILIES, *coordinator_families(CONFIG))
    return {family.name: family for family in every}


def expressions() -> dict[str, str]:
    """Every expression that we ship, by where it stands."""
    found = {f"recording {rule.name}": rule.expression for rule in RECORDINGS}
    found |= {f"alert {alert.name}": alert.expression for alert in alerts()}
    found |= {f"console {number}": expression for number, expression in enumerate(queries())}
    for dashboard in dashboards():
        for panel in dashboard.panels():
            for number, query in enumerate(panel.queries):
                found[f"{dashboard.title}: {panel.title} {number}"] = query.expression
        for variable in dashboard.variables:
            found[f"{dashboard.title}: ${variable.name}"] = variable.selector
    return found


def names_in(expression: str) -> set[str]:
    """The series that an expression reads, without a histogram's endings."""
    known = families()
    bare = _LABELS.sub("", _QUOTED.sub('""', expression))
    names = set(_NAME.findall(_MATCHERS.sub("", bare)))
    return {
        name.rpartition("_")[0] if name not in known and name.endswith(("_bucket", "_count", "_sum")) else name
        for name in names
    }


def filled_in(expression: str, **variables: str) -> str:
    """With Grafana's variables replaced."""
    values = {"__rate_interval": "1m", "job": "barnraise", "run": "tiny", "instance": ".+", **variables}
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression
