"""Metrics: families declared as data, their children made at the start so that 0 is visible.

`DAEMON_FAMILIES` is what every daemon has; nodes, servers and the coordinator declare theirs beside their own code
in the same form. No label ever holds a node, an address or a person.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from protocol.base.forms import FORMS
from protocol.base.limits import REJECT_REASONS
from protocol.base.machine import Count
from protocol.drive.link import PATHS
from protocol.drive.metrics_http import serve_metrics
from protocol.link.codec import PROTOCOL_MINOR
from protocol.trust.handshake import VERSION

TRAFFIC_KINDS = ("activation", "gradient", "weights", "measuring", "control", "checkpoint", "data")
DIRECTIONS = ("rx", "tx")
LEVELS = ("debug", "info", "warning", "error", "critical")
CONNECT_OUTCOMES = ("ok", "failed")
COMPONENTS = ("transport", "compute", "storage", "machine", "planner", "http")

_FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_NETWORK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Family:
    """One metric family. A label whose values are not a fixed list (`run`, `stage`) has None for them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    buckets: Sequence[float] = _NETWORK_S


DAEMON_FAMILIES = (
    Family(
        "barnraise_build_info",
        "gauge",
        "Build of this daemon.",
        {"version": None, "protocol": None, "python": None, "torch": None},
    ),
    Family("barnraise_log_messages_total", "counter", "Log lines written.", {"level": LEVELS}),
    Family("barnraise_errors_total", "counter", "Errors handled, by component.", {"component": COMPONENTS}),
    Family(
        "barnraise_event_loop_lag_seconds",
        "histogram",
        "Delay between when a task was runnable and when it ran.",
        buckets=_FAST_S,
    ),
    Family(
        "barnraise_clock_offset_seconds",
        "gauge",
        "Local clock minus coordinator clock, to a second, at the newest membership.",
    ),
    Family("barnraise_transport_connections", "gauge", "Open peer connections.", {"path": PATHS}),
    Family("barnraise_transport_incoming_bytes", "gauge", "Tensor bytes that links hold, announced and not digested."),
    Family("barnraise_transport_incoming_limit_bytes", "gauge", "What they may hold, with the tensors in the store."),
    Family(
        "barnraise_transport_connects_total",
        "counter",
        "Connection attempts.",
        {"path": PATHS, "outcome": CONNECT_OUTCOMES},
    ),
    Family(
        "barnraise_transport_connect_duration_seconds",
        "histogram",
        "Time to establish a peer connection.",
        {"path": PATHS},
    ),
    Family(
        "barnraise_transport_bytes_total",
        "counter",
        "Payload bytes moved.",
        {"direction": DIRECTIONS, "kind": TRAFFIC_KINDS},
    ),
    Family(
        "barnraise_transport_messages_total",
        "counter",
        "Messages moved.",
        {"direction": DIRECTIONS, "kind": TRAFFIC_KINDS},
    ),
    Family("barnraise_transport_round_trip_seconds", "histogram", "Peer round-trip time.", {"path": PATHS}),
    Family(
        "barnraise_transport_rejected_messages_total",
        "counter",
        "Messages refused before use.",
        {"reason": REJECT_REASONS},
    ),
    Family(
        "barnraise_codec_input_bytes_total",
        "counter",
        "Bytes of sent tensors, had they travelled as fp32.",
        {"codec": FORMS},
    ),
    Family(
        "barnraise_codec_output_bytes_total",
        "counter",
        "Bytes of sent tensors in the form that they travel in.",
        {"codec": FORMS},
    ),
)


class Metrics:
    """The metrics of one process, in a registry of its own."""

    def __init__(self, *families: Family) -> None:
        """Every daemon's families, and `families` of this one."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._families: dict[str, tuple[Family, Counter | Gauge | Histogram]] = {}
        self._shown: dict[str, frozenset[str]] = {}
        ProcessCollector(registry=self.registry)
        for each in (*DAEMON_FAMILIES, *families):
            self._add(each)
        self.record(
            "barnraise_build_info",
            1,
            version=_version("barnraise"),
            protocol=f"{VERSION}.{PROTOCOL_MINOR}",
            python=platform.python_version(),
            torch=_version("torch"),
        )

    def record(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Add to a counter, set a gauge, or observe in a histogram. An unknown name or label is a bug: `KeyError`."""
        family, metric = self._families[name]
        for label, its_value in labels.items():
            values = family.labels[label]
            if values is not None and its_value not in values:
                raise KeyError(f"{name}: {label}={its_value!r} is not one of its values")
        child = metric.labels(**labels) if family.labels else metric
        if isinstance(child, Counter):
            child.inc(value)
        elif isinstance(child, Gauge):
            child.set(value)
        else:
            child.observe(value)

    def show_only(self, label: str, values: Collection[str]) -> None:
        """Of a label whose values are known only these have series from now on, at 0 where they are new: a stage that
        a run does not have must not look like one where nobody works."""
        if self._shown.get(label) == (shown := frozenset(values)):
            return
        self._shown[label] = shown
        for family, metric in self._families.values():
            known = [known or () for known in family.labels.values()]
            for combined in itertools.product(*known) if label in family.labels else ():
                if dict(zip(family.labels, combined, strict=True))[label] in shown:
                    metric.labels(*combined)
                else:
                    metric.remove(*combined)

    def apply(self, effect: Count) -> None:
        """What a machine's `Count` orders."""
        self.record(effect.metric, effect.value, **dict(effect.labels))

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Answer `/metrics` from a thread of its own, so that a busy loop stays visible; returns the port.

        Only loopback by default: whoever opens it to others puts something with a password before it.
        """
        return serve_metrics(self.registry, host, port)

    def _add(self, family: Family) -> None:
        kinds: dict[str, type[Counter] | type[Gauge]] = {"counter": Counter, "gauge": Gauge}
        names = tuple(family.labels)
        metric: Counter | Gauge | Histogram
        if family.kind == "histogram":
            metric = Histogram(family.name, family.meaning, names, registry=self.registry, buckets=family.buckets)
        else:
            metric = kinds[family.kind](family.name, family.meaning, names, registry=self.registry)
        self._families[family.name] = (family, metric)
        fixed = [values for values in family.labels.values() if values is not None]
        if names and len(fixed) == len(names):
            for values in itertools.product(*fixed):
                metric.labels(*values)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
