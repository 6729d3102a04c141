"""A dashboard as Grafana's JSON (schema 39, Grafana 11 and newer): what its importer and its provisioning read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coordinator.monitoring.panels import HEIGHTS, WIDTH, Dashboard, Panel, Variable

SCHEMA_VERSION = 39
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def to_json(dashboard: Dashboard) -> dict[str, Any]:
    """The whole dashboard. It has no numeric id: Grafana gives one, and finds it again by its uid."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.meaning,
        "tags": ["barnraise"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "timezone": "browser",
        "time": {"from": "now-6h", "to": "now"},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards", "title": "Barnraise", "tags": ["barnraise"], "asDropdown": True,
                "includeVars": True, "keepTime": True, "icon": "dashboard", "targetBlank": False,
            }
        ],
        "templating": {"list": [_source(), *(_variable(variable) for variable in dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }  # fmt: skip


def _source() -> dict[str, Any]:
    return {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": 1,
        "hide": 0, "includeAll": False, "multi": False, "regex": "", "current": {}, "options": [],
    }  # fmt: skip


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.selector}, {variable.label})"
    return {
        "name": variable.name, "label": variable.title, "type": "query", "datasource": SOURCE,
        "definition": query, "query": {"query": query, "refId": variable.name}, "refresh": 2, "sort": 1, "hide": 0,
        "includeAll": variable.many, "multi": variable.many, "regex": "", "options": [],
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]} if variable.many else {},
    }  # fmt: skip


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Rows from the top; in each, panels from left to right, and a new line where the width is used up."""
    number, y = 1, 0
    for row in dashboard.rows:
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }  # fmt: skip
        number, y, x, line = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, line = 0, y + line, 0
            yield _panel(panel, number, x, y)
            number, x, line = number + 1, x + panel.width, max(line, HEIGHTS[panel.kind])
        y += line


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    instant = panel.kind in ("table", "bargauge")
    targets = [
        {
            "refId": chr(ord("A") + index), "datasource": SOURCE, "editorMode": "code", "expr": query.expression,
            "legendFormat": query.legend, "range": not instant, "instant": instant,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]  # fmt: skip
    return {
        "id": number, "type": "bargauge" if panel.kind == "table" else panel.kind, "title": panel.title,
        "description": panel.meaning, "datasource": SOURCE, "targets": targets, "transparent": False,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHTS[panel.kind]},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }  # fmt: skip


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "color": {"mode": "palette-classic"}}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": 30 if panel.stacked else 8, "showPoints": "never",
            "spanNulls": False, "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }  # fmt: skip
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none", "textMode": "value_and_name"}
    if panel.kind in ("bargauge", "table"):
        return {"reduceOptions": reduced, "displayMode": "basic", "orientation": "horizontal", "showUnfilled": True}
    if panel.kind == "heatmap":
        return {"calculate": False, "color": {"mode": "scheme", "scheme": "Blues"}, "yAxis": {"unit": panel.unit}}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
