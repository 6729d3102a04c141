"""What dashboards are made of: rows of panels, each with its queries, its unit and one sentence on how to read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["stat", "timeseries", "heatmap", "bargauge", "table"]
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHTS: dict[str, int] = {"stat": 4, "timeseries": 8, "heatmap": 8, "bargauge": 8, "table": 8}


@dataclass(frozen=True)
class Query:
    """One expression and what its lines are called: `{{label}}` stands for a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. `unit` is Grafana's id of it; `width` counts of 24 columns."""

    title: str
    meaning: str
    kind: Kind
    unit: str
    queries: tuple[Query, ...]
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top: the values of `label` that series of `selector` have."""

    name: str
    title: str
    selector: str
    label: str
    many: bool = False


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. `uid` is fixed: links to it survive a new version."""

    uid: str
    title: str
    meaning: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def panels(self) -> Iterator[Panel]:
        for row in self.rows:
            yield from row.panels


JOB = Variable("job", "Job", "barnraise_build_info", "job")
RUN = Variable("run", "Run", 'barnraise_run_info{job="$job"}', "run")


def instances(family: str) -> Variable:
    return Variable("instance", "Instance", f'{family}{{job="$job"}}', "instance", many=True)


RATE = "$__rate_interval"
OF_RUN = 'run="$run"'
OF_ALL = 'job="$job"'
OF_ONE = 'job="$job", instance=~"$instance"'


def one(expression: str, legend: str) -> tuple[Query, ...]:
    return (Query(expression, legend),)


def quantiles(family: str, selector: str, by: str = "") -> tuple[Query, ...]:
    """Median and 95th percentile of a histogram."""
    labels = f"le, {by}" if by else "le"
    suffix = f" {{{{{by}}}}}" if by else ""
    rate = f"sum by ({labels}) (rate({family}_bucket{{{selector}}}[{RATE}]))"
    return tuple(
        Query(f"histogram_quantile({share}, {rate})", f"{name}{suffix}")
        for share, name in ((0.5, "half"), (0.95, "95 %"))
    )


def heat(family: str, selector: str) -> tuple[Query, ...]:
    return one(f"sum by (le) (increase({family}_bucket{{{selector}}}[{RATE}]))", "{{le}}")


def rates(family: str, selector: str, by: str) -> tuple[Query, ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return one(f"sum by ({by}) (rate({family}{{{selector}}}[{RATE}]))", legend)


def sums(family: str, selector: str, by: str) -> tuple[Query, ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return one(f"sum by ({by}) ({family}{{{selector}}})", legend)
