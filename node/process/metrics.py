"""What a node and a server count, beside what every daemon counts (experience.md, section F).

Labels are fixed lists, but for `run`, whose name is known only after the coordinator's welcome: then its series are
made, so that 0 is visible. Who a series is from is Prometheus's own `instance`.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.links.relay.relay_desk import REFUSED_FOR
from node.server.audits import OUTCOMES
from protocol.base.machine import Count
from protocol.drive.limits import Limits
from protocol.drive.metrics import DIRECTIONS, Family, Metrics

if TYPE_CHECKING:
    from node.core import NodeMachine

NODE_STATES = ("idle", "joining", "syncing", "training", "paused", "draining", "offline")
SERVER_ROLES = ("leader", "follower", "joining", "stopped")
OPERATIONS = (
    "forward", "backward", "backward_weights", "validation", "weight_gradient", "optimizer", "send", "receive",
)  # fmt: skip
PHASES = ("compute", "transfer_wait", "input_wait", "codec", "optimizer", "paused", "other")
SUSPENDED_REASONS = (
    "user", "user_active", "schedule", "program", "battery", "metered", "temperature", "power", "memory", "disk",
    "quota", "no_work", "coordinator",
)  # fmt: skip
TASK_STATES = ("input", "free", "leased")
QUEUES = ("leases", "unsent_tasks", "device", "server")

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_SYNC_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
_COUNTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_RUN = {"run": None}

NODE_FAMILIES = (
    Family("barnraise_node_state", "gauge", "State of the node daemon.", {"barnraise_node_state": NODE_STATES}),
    Family(
        "barnraise_node_microbatches_total",
        "counter",
        "Microbatch operations finished.",
        {**_RUN, "operation": OPERATIONS},
    ),
    Family("barnraise_node_tokens_total", "counter", "Training tokens processed.", _RUN),
    Family(
        "barnraise_node_work_results_total",
        "counter",
        "Work results as judged by the swarm.",
        {**_RUN, "outcome": ("accepted", "late", "rejected", "lost")},
    ),
    Family(
        "barnraise_node_phase_seconds_total",
        "counter",
        "Wall time by phase; phases sum to wall time.",
        {"phase": PHASES},
    ),
    Family(
        "barnraise_node_operation_duration_seconds",
        "histogram",
        "Duration of one pipeline operation.",
        {"operation": OPERATIONS},
        buckets=_SECONDS,
    ),
    Family(
        "barnraise_node_suspended", "gauge", "1 while this reason holds the node back.", {"reason": SUSPENDED_REASONS}
    ),
    Family(
        "barnraise_node_suspended_seconds_total",
        "counter",
        "Time held back, by reason.",
        {"reason": SUSPENDED_REASONS},
    ),
    Family(
        "barnraise_node_bandwidth_limit_bytes_per_second",
        "gauge",
        "The owner's limit of the line, 0 for none.",
        {"direction": DIRECTIONS},
    ),
    Family("barnraise_node_transfer_quota_remaining_bytes", "gauge", "Left of this month's transfer quota."),
    Family("barnraise_node_device_temperature_celsius", "gauge", "The working device's heat, 0 without a sensor."),
    Family("barnraise_node_device_temperature_limit_celsius", "gauge", "The owner's limit of it, 0 for none."),
    Family("barnraise_node_device_power_watts", "gauge", "What the working device draws, 0 without a sensor."),
    Family("barnraise_node_port_forwarded", "gauge", "1 while the home router forwards a port to this node."),
    Family("barnraise_node_queue_items", "gauge", "Items waiting in local queues.", {"queue": QUEUES}),
    Family("barnraise_node_last_heartbeat_timestamp_seconds", "gauge", "Last word from the coordinator."),
    Family("barnraise_node_last_work_timestamp_seconds", "gauge", "Last finished microbatch operation."),
)
SERVER_FAMILIES = (
    Family("barnraise_server_role", "gauge", "Replication role.", {"barnraise_server_role": SERVER_ROLES}),
    Family("barnraise_server_parameters", "gauge", "Parameters held.", _RUN),
    Family("barnraise_server_parameter_bytes", "gauge", "Bytes of weights held.", _RUN),
    Family("barnraise_server_optimizer_state_bytes", "gauge", "Bytes of optimizer state held.", _RUN),
    Family("barnraise_server_step", "gauge", "Newest step of this shard.", _RUN),
    Family(
        "barnraise_server_audits_total",
        "counter",
        "Contributions that were computed again, by what came of it.",
        {**_RUN, "outcome": OUTCOMES},
    ),
    Family(
        "barnraise_server_updates_total",
        "counter",
        "Gradient updates, by what became of them.",
        {**_RUN, "outcome": ("applied", "stale", "duplicate", "doubted", "false", "banned")},
    ),
    Family(
        "barnraise_server_step_duration_seconds",
        "histogram",
        "Time to aggregate and apply one step.",
        _RUN,
        buckets=_SECONDS,
    ),
    Family("barnraise_server_step_contributions", "histogram", "Updates merged into one step.", _RUN, buckets=_COUNTS),
    Family("barnraise_server_journal_bytes", "gauge", "Journal size on disk."),
    Family("barnraise_server_journal_sync_duration_seconds", "histogram", "fsync time.", buckets=_SYNC_S),
    Family(
        "barnraise_server_checkpoints_total",
        "counter",
        "Checkpoint attempts.",
        {**_RUN, "outcome": ("written", "failed")},
    ),
    Family(
        "barnraise_server_checkpoint_duration_seconds",
        "histogram",
        "Time to write a checkpoint.",
        _RUN,
        buckets=_SECONDS,
    ),
    Family("barnraise_server_checkpoint_bytes", "gauge", "Size of the last checkpoint.", _RUN),
    Family("barnraise_server_checkpoint_last_success_timestamp_seconds", "gauge", "Last good checkpoint.", _RUN),
    Family("barnraise_server_disk_free_bytes", "gauge", "Free space where the state folder is."),
    Family(
        "barnraise_server_tasks",
        "gauge",
        "Unfinished tasks of this server's pools: their input is missing, they are free, or somebody has a lease.",
        {"state": TASK_STATES},
    ),
    Family("barnraise_server_reissued_tasks_total", "counter", "Leases of a task that had been leased before."),
    Family("barnraise_server_volunteers", "gauge", "Volunteers that this server hands tasks to now."),
    Family("barnraise_server_relay_sessions", "gauge", "Links of others that go through this server now."),
    Family("barnraise_server_relay_bytes_total", "counter", "Bytes carried for others, each counted once."),
    Family(
        "barnraise_server_relay_refused_total",
        "counter",
        "Nodes that this server would not carry bytes for.",
        {"reason": REFUSED_FOR},
    ),
)


class NodeMetrics(Metrics):
    """The metrics of a node process. `role`: server or volunteer."""

    def __init__(self, role: str) -> None:
        super().__init__(*NODE_FAMILIES, *(SERVER_FAMILIES if role == "server" else ()))
        self._run = ""
        self._claimed_s = 0.0
        self._reissued = 0.0
        self._started = time.monotonic()

    def set_run(self, run: str) -> None:
        """The run's name is known: its series exist from here on."""
        if self._run:
            return
        self._run = run
        for family, metric in self._families.values():
            if "run" in family.labels:
                for values in itertools.product(*(values or (run,) for values in family.labels.values())):
                    metric.labels(*values)

    def record(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """As `Metrics.record`; the run's name goes with every family that wants it."""
        if "run" in self._families[name][0].labels:
            labels.setdefault("run", self._run)
        super().record(name, value, **labels)

    def apply(self, effect: Count) -> None:
        self.record(effect.metric, effect.value, **dict(effect.labels))

    def ask(self, name: str, read: Callable[[], float], **labels: str) -> None:
        """Lets a gauge call `read`, in another thread, whenever somebody looks."""
        metric: Any = self._families[name][1]
        (metric.labels(**labels) if labels else metric).set_function(read)

    def ask_volunteer(self, machine: NodeMachine) -> None:
        """Lets the two queues of a volunteer's work be read live: who asks wants to know what would be lost now."""
        for queue in ("leases", "unsent_tasks"):
            self.ask("barnraise_node_queue_items", partial(_held, machine, queue), queue=queue)

    def offline(self) -> None:
        """A life has ended: until the next one nothing is held, and nobody is linked. (`suspended` says of a pause.)"""
        for name in NODE_STATES:
            self.record("barnraise_node_state", name == "offline", barnraise_node_state=name)
        for queue in QUEUES:
            self.ask("barnraise_node_queue_items", lambda: 0.0, queue=queue)

    def spend(self, phase: str, seconds: float) -> None:
        """Wall time of a phase."""
        self._claimed_s += seconds
        self.record("barnraise_node_phase_seconds_total", seconds, phase=phase)

    def suspended(self, reason: str, seconds: float) -> None:
        """The node has been held back for so long, and still is."""
        for name in NODE_STATES:
            self.record("barnraise_node_state", name == "paused", barnraise_node_state=name)
        self.record("barnraise_node_suspended", 1, reason=reason)
        self.record("barnraise_node_suspended_seconds_total", seconds, reason=reason)
        self.spend("paused", seconds)

    def held_back(self, reason: str, seconds: float, paused: bool) -> None:
        """The owner's limits, or the run itself, keep this node from working; `paused`: it takes no part meanwhile."""
        if paused:
            self.suspended(reason, seconds)
        else:
            self.record("barnraise_node_suspended", 1, reason=reason)
            self.record("barnraise_node_suspended_seconds_total", seconds, reason=reason)

    def show_device(self, temperature_c: float | None, limit_c: float | None, power_w: float | None) -> None:
        """What the device's sensors say; a computer without them shows 0."""
        self.record("barnraise_node_device_temperature_celsius", temperature_c or 0.0)
        self.record("barnraise_node_device_temperature_limit_celsius", limit_c or 0.0)
        self.record("barnraise_node_device_power_watts", power_w or 0.0)

    def resumed(self, reason: str) -> None:
        self.record("barnraise_node_suspended", 0, reason=reason)

    def show_limits(self, limits: Limits) -> None:
        """What the owner lends of the line."""
        name = "barnraise_node_bandwidth_limit_bytes_per_second"
        self.record(name, limits.up_bytes_per_s or 0.0, direction="tx")
        self.record(name, limits.down_bytes_per_s or 0.0, direction="rx")
        if limits.remaining_bytes is not None:
            self.record("barnraise_node_transfer_quota_remaining_bytes", limits.remaining_bytes)

    def show_disk(self, folder: Path) -> None:
        """What is free where the state folder is. Blocks: a disk may hang, or have failed, and says nothing then."""
        if "barnraise_server_role" in self._families:
            with suppress(OSError):
                self.record("barnraise_server_disk_free_bytes", shutil.disk_usage(folder).free)

    def show(self, machine: NodeMachine, journal_bytes: int) -> None:
        """Sets the gauges that the machine knows; books the time that no phase has claimed."""
        server = machine.server
        state = "joining" if machine.stage < 0 else "training"
        if server is not None:
            state = "training" if server.ready else "syncing"
        for name in NODE_STATES:
            self.record("barnraise_node_state", name == state, barnraise_node_state=name)
        rest_s = time.monotonic() - self._started - self._claimed_s
        if rest_s > 0:
            self.spend("input_wait" if server is None else "other", rest_s)
        if "barnraise_server_role" not in self._families:
            return
        self.record("barnraise_server_journal_bytes", journal_bytes)
        role = "joining" if server is None else ("follower" if server.ledger is None else "leader")
        for name in SERVER_ROLES:
            self.record("barnraise_server_role", name == role, barnraise_server_role=name)
        if server is not None and server.shard.version >= 0:
            self.record("barnraise_server_step", server.shard.version)
        if server is None:
            return
        tasks = server.task_counts()
        for name in TASK_STATES:
            self.record("barnraise_server_tasks", tasks[name], state=name)
        counters = server.counters()
        self.record("barnraise_server_volunteers", counters["volunteers"])
        # A machine that begins anew counts from 0 again; the process's sum only grows.
        self.record("barnraise_server_reissued_tasks_total", max(0.0, counters["reissued"] - self._reissued))
        self._reissued = counters["reissued"]


def _held(machine: NodeMachine, queue: str) -> float:
    """One of the volunteer's counters, from another thread than the machine's."""
    for _ in range(10):
        try:
            return machine.volunteer.counters()[queue] if machine.volunteer is not None else 0.0
        except RuntimeError:  # a dict grew while it was counted: count again
            continue
    return 0.0
