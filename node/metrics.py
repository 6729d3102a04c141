"""What a node and a server count: names, meanings and label values in one table (experience.md, section F).

Labels are fixed lists; who a series is from is Prometheus's own `instance`. Children with known labels exist from the
start, so that 0 is visible. The families that every daemon has are in `protocol.drive.metrics`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram

from protocol.errors import LocalProtocolError
from protocol.machine import Count

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SYNC_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)

LABEL_VALUES = {
    "operation": ("forward", "backward", "weight_gradient", "optimizer", "send", "receive"),
    "phase": ("compute", "transfer_wait", "input_wait", "codec", "optimizer", "paused", "other"),
    "outcome": (),
    "queue": ("leases", "unsent_tasks", "device", "server", "inbox"),
}
"""What each label may say; those of `outcome` differ by family and stand there."""

NODE_STATES = ("idle", "joining", "syncing", "training", "paused", "draining", "offline")
SERVER_ROLES = ("leader", "follower", "joining", "stopped")


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric. `labels` are filled in at the start where `values` (or the table above) knows them."""

    kind: type[Any]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    states: tuple[str, ...] = ()


_NODE = (
    _Family(Enum, "barnraise_node_state", "State of the node daemon", states=NODE_STATES),
    _Family(Counter, "barnraise_node_microbatches_total", "Microbatch operations finished", ("run", "operation")),
    _Family(Counter, "barnraise_node_tokens_total", "Training tokens processed", ("run",)),
    _Family(
        Counter,
        "barnraise_node_work_results_total",
        "Work results as judged by the swarm",
        ("run", "outcome"),
        outcomes=("accepted", "late", "rejected", "lost"),
    ),
    _Family(Counter, "barnraise_node_phase_seconds_total", "Wall time by phase; phases sum to wall time", ("phase",)),
    _Family(
        Histogram,
        "barnraise_node_operation_duration_seconds",
        "Duration of one pipeline operation",
        ("operation",),
        buckets=_SECONDS,
    ),
    _Family(Gauge, "barnraise_node_queue_items", "Items waiting in local queues", ("queue",)),
    _Family(Gauge, "barnraise_node_peak_flops_per_second", "Measured peak of this device"),
    _Family(Gauge, "barnraise_node_last_heartbeat_timestamp_seconds", "Last word from the coordinator"),
    _Family(Gauge, "barnraise_node_last_work_timestamp_seconds", "Last finished microbatch"),
)
_SERVER = (
    _Family(Enum, "barnraise_server_role", "Replication role", states=SERVER_ROLES),
    _Family(Gauge, "barnraise_server_parameters", "Parameters held", ("run",)),
    _Family(Gauge, "barnraise_server_parameter_bytes", "Bytes of weights held", ("run",)),
    _Family(Gauge, "barnraise_server_optimizer_state_bytes", "Bytes of optimizer state held", ("run",)),
    _Family(Gauge, "barnraise_server_step", "Newest step of this shard", ("run",)),
    _Family(
        Counter,
        "barnraise_server_updates_total",
        "Gradient updates, by what became of them",
        ("run", "outcome"),
        outcomes=("applied", "stale", "duplicate", "bad_signature", "not_finite", "norm"),
    ),
    _Family(
        Histogram,
        "barnraise_server_step_duration_seconds",
        "Time to aggregate and apply one step",
        ("run",),
        buckets=_SECONDS,
    ),
    _Family(
        Histogram, "barnraise_server_step_contributions", "Updates merged into one step", ("run",), buckets=_COUNTS
    ),
    _Family(Gauge, "barnraise_server_journal_bytes", "Journal size on disk"),
    _Family(Histogram, "barnraise_server_journal_sync_duration_seconds", "fsync time", buckets=_SYNC_SECONDS),
    _Family(
        Counter,
        "barnraise_server_checkpoints_total",
        "Checkpoint attempts",
        ("run", "outcome"),
        outcomes=("written", "failed"),
    ),
    _Family(
        Histogram,
        "barnraise_server_checkpoint_duration_seconds",
        "Time to write a checkpoint",
        ("run",),
        buckets=_SECONDS,
    ),
    _Family(Gauge, "barnraise_server_checkpoint_bytes", "Size of the last checkpoint", ("run",)),
    _Family(Gauge, "barnraise_server_checkpoint_last_success_timestamp_seconds", "Last good checkpoint", ("run",)),
    _Family(Gauge, "barnraise_server_disk_free_bytes", "Free space where checkpoints go"),
)


class NodeMetrics:
    """The node's families, and for a server the server's, in one registry.

    Args:
        role: `server` or `volunteer`.
        elsewhere: takes counts of families that are not in this table (those of every daemon).
    """

    def __init__(self, registry: CollectorRegistry, role: str, elsewhere: Callable[[Count], None]) -> None:
        self._families = {family.name: family for family in (*_NODE, *(_SERVER if role == "server" else ()))}
        self._elsewhere = elsewhere
        self._made = {name: _make(family, registry) for name, family in self._families.items()}
        self._run = ""
        self._phase_s = 0.0
        self._started = time.monotonic()
        for name, family in self._families.items():
            if family.labels and "run" not in family.labels:
                self._fill(name)

    def set_run(self, run: str) -> None:
        """The run's name is known: its series exist from here on."""
        if run == self._run:
            return
        self._run = run
        for name, family in self._families.items():
            if "run" in family.labels:
                self._fill(name)

    def count(self, effect: Count) -> None:
        """Adds to a counter, sets a gauge, or observes into a histogram; `run` is added where the family has it.

        Raises:
            LocalProtocolError: nobody knows the metric, or it has other labels: a bug of ours.
        """
        family = self._families.get(effect.metric)
        if family is None:
            self._elsewhere(effect)
            return
        labels = dict(effect.labels)
        if "run" in family.labels:
            labels.setdefault("run", self._run)
        if tuple(sorted(labels)) != tuple(sorted(family.labels)):
            raise LocalProtocolError(f"{effect.metric} has labels {family.labels}, not {tuple(labels)}")
        child = self._made[effect.metric].labels(**labels) if labels else self._made[effect.metric]
        if family.kind is Counter:
            child.inc(effect.value)
        elif family.kind is Gauge:
            child.set(effect.value)
        else:
            child.observe(effect.value)

    def add(self, metric: str, value: float = 1.0, **labels: str) -> None:
        """`count` for the driver's own facts."""
        self.count(Count(metric, value, tuple(labels.items())))

    def set_state(self, metric: str, state: str) -> None:
        """Sets a state set."""
        self._made[metric].state(state)

    def read_with(self, metric: str, read: Callable[[], float], **labels: str) -> None:
        """Lets a gauge ask `read` whenever somebody looks; it is called in another thread."""
        made = self._made[metric]
        (made.labels(**labels) if labels else made).set_function(read)

    def spend(self, phase: str, seconds: float) -> None:
        """Wall time of a phase; what nobody claims is `other`, so that phases sum to wall time."""
        self._phase_s += seconds
        self.add("barnraise_node_phase_seconds_total", seconds, phase=phase)

    def settle_phases(self) -> None:
        """Books the time since the start that no phase has claimed."""
        rest = time.monotonic() - self._started - self._phase_s
        if rest > 0:
            self.spend("other", rest)

    def _fill(self, name: str) -> None:
        family = self._families[name]
        choices: list[Iterable[str]] = []
        for label in family.labels:
            if label == "run":
                choices.append((self._run,))
            else:
                choices.append(family.outcomes if label == "outcome" else LABEL_VALUES[label])
        for values in product(*choices):
            self._made[name].labels(*values)


def _make(family: _Family, registry: CollectorRegistry) -> Any:
    extra: dict[str, Any] = {}
    if family.buckets:
        extra["buckets"] = family.buckets
    if family.states:
        extra["states"] = list(family.states)
    return family.kind(family.name, family.help, labelnames=family.labels, registry=registry, **extra)
