"""What `barnraise monitoring write` writes, as text by file name: everything that Prometheus and Grafana are given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from coordinator.monitoring.console import console
from coordinator.monitoring.dashboards import dashboards
from coordinator.monitoring.grafana import to_json
from coordinator.monitoring.rules import DEFAULT, RECORDINGS, Alert, Thresholds, alerts

SAMPLES_MAX = 20_000
"""Series of one scrape: a coordinator of 64 stages has under 2,000. More is no daemon of ours."""
EVERY_S = 15


def monitoring_files(coordinators: Sequence[str], folders: Sequence[str] = ()) -> dict[str, str]:
    """Every file by its path below the folder.

    Args:
        coordinators: addresses of coordinators' status APIs, such as http://127.0.0.1:8470.
        folders: state folders of daemons of this machine, whose `metrics.json` is read as well.
    """
    files = {
        "prometheus.yml": prometheus_config(coordinators, folders),
        "rules.yml": rules_file(),
        "RUNBOOK.md": runbook(),
        "consoles/barnraise.html": console(),
        "compose.yml": COMPOSE,
        "grafana/provisioning/datasources/barnraise.yml": DATA_SOURCE,
        "grafana/provisioning/dashboards/barnraise.yml": PROVIDER,
    }
    for dashboard in dashboards():
        files[f"dashboards/{dashboard.uid}.json"] = json.dumps(to_json(dashboard), indent=1) + "\n"
    return files


def prometheus_config(coordinators: Sequence[str], folders: Sequence[str] = ()) -> str:
    """prometheus.yml: a job for each coordinator, by HTTP service discovery, and one for folders of this machine."""
    lines = [
        "# Written by `barnraise monitoring write`. Check it with: promtool check config prometheus.yml",
        "global:",
        f"  scrape_interval: {EVERY_S}s",
        f"  evaluation_interval: {EVERY_S}s",
        "rule_files: [rules.yml]",
        "# An Alertmanager, where there is one:",
        "# alerting: {alertmanagers: [{static_configs: [{targets: ['127.0.0.1:9093']}]}]}",
        "scrape_configs:",
    ]
    for number, url in enumerate(coordinators, start=1):
        lines += [
            f"  - job_name: barnraise{'' if number == 1 else f'-{number}'}",
            f"    sample_limit: {SAMPLES_MAX}",
            "    http_sd_configs:",
            f"      - url: {json.dumps(url.rstrip('/') + '/api/sd')}",
            f"        refresh_interval: {EVERY_S}s",
        ]
    if folders:
        lines += [
            "  - job_name: barnraise-here",
            f"    sample_limit: {SAMPLES_MAX}",
            "    file_sd_configs:",
            f"      - files: {json.dumps([f'{folder}/metrics.json' for folder in folders])}",
            f"        refresh_interval: {EVERY_S}s",
        ]
    return "\n".join(lines) + "\n"


def rules_file(limits: Thresholds = DEFAULT, hold: Callable[[Alert], float] = lambda alert: alert.hold_s) -> str:
    """rules.yml. `hold` shortens the time that an expression must hold, where faults are staged."""
    lines = ["# Written by `barnraise monitoring write` from coordinator/monitoring/rules.py.", "groups:"]
    lines += ["  - name: barnraise-recordings", "    rules:"]
    for recording in RECORDINGS:
        lines += [f"      # {recording.meaning}"]
        lines += [f"      - record: {recording.name}", f"        expr: {json.dumps(recording.expression)}"]
    lines += ["  - name: barnraise-alerts", "    rules:"]
    for alert in alerts(limits):
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {hold(alert):g}s",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.meaning)}",
            f"          runbook_url: {json.dumps('RUNBOOK.md#' + alert.name.lower())}",
        ]
    return "\n".join(lines) + "\n"


def runbook() -> str:
    """RUNBOOK.md: an entry for each alert, pages first."""
    found = alerts()
    lines = [
        "# Runbook",
        "",
        "Made by `barnraise monitoring write` from `coordinator/monitoring/rules.py`: change it there. A **page**",
        "means that the run makes no progress or that something may be lost; a **ticket** can wait for the morning.",
        "Nothing here is urgent for the model: what has been trained lies on the servers' disks, and a run that waits",
        "loses nothing.",
        "",
        "| alert | severity | after | says |",
        "| --- | --- | --- | --- |",
    ]
    ordered: list[Alert] = sorted(found, key=lambda alert: alert.severity)
    for alert in ordered:
        first = alert.meaning.partition(". ")[0].rstrip(".")
        lines.append(f"| [{alert.name}](#{alert.name.lower()}) | {alert.severity} | {_time(alert.hold_s)} | {first} |")
    for alert in ordered:
        lines += [
            "",
            f"## {alert.name}",
            "",
            alert.meaning,
            "",
            f"**Look at:** {alert.look}",
            "",
            f"**Do:** {alert.do}",
        ]
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:g} h"
    return f"{seconds / 60:g} min" if seconds else "at once"


COMPOSE = """\
# Prometheus and Grafana beside a coordinator: docker compose up -d
# What --here named they do not see: a state folder is its owner's alone, so start Prometheus as that user instead.
# They use the host's network, since daemons answer on loopback unless told otherwise. Grafana: http://127.0.0.1:3000
services:
  prometheus:
    image: prom/prometheus:v3.5.0
    network_mode: host
    restart: unless-stopped
    command:
      - --config.file=/etc/prometheus/prometheus.yml
      - --storage.tsdb.path=/prometheus
      - --storage.tsdb.retention.time=90d
      - --web.listen-address=127.0.0.1:9090
    volumes:
      - ./prometheus.yml:/etc/prometheus/prometheus.yml:ro
      - ./rules.yml:/etc/prometheus/rules.yml:ro
      - prometheus:/prometheus
  grafana:
    image: grafana/grafana:12.1.0
    network_mode: host
    restart: unless-stopped
    environment:
      GF_SERVER_HTTP_ADDR: 127.0.0.1
      GF_ANALYTICS_REPORTING_ENABLED: "false"
      GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH: /var/lib/grafana/dashboards/barnraise-run.json
    volumes:
      - ./grafana/provisioning:/etc/grafana/provisioning:ro
      - ./dashboards:/var/lib/grafana/dashboards:ro
      - grafana:/var/lib/grafana
volumes:
  prometheus: {}
  grafana: {}
"""
DATA_SOURCE = """\
apiVersion: 1
datasources:
  - name: Prometheus
    uid: barnraise-prometheus
    type: prometheus
    access: proxy
    url: http://127.0.0.1:9090
    isDefault: true
    jsonData: {timeInterval: 15s}
"""
PROVIDER = """\
apiVersion: 1
providers:
  - name: barnraise
    type: file
    options: {path: /var/lib/grafana/dashboards}
"""
