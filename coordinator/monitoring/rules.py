"""Recording and alert rules, as data: expressions, how long they must hold, and what to do about them.

Each alert is told once, here: `files.py` makes the rules file and the runbook of it. A page means that the run makes
no progress or that something may be lost; everything else is a ticket. Expressions name series of
`coordinator.process.metrics` and of the node's; a test holds that every one exists and that every alert fires and
keeps quiet when it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Thresholds:
    """Numbers an operator may want otherwise; a test that stages faults makes them small. Seconds and bytes."""

    stalled_s: float = 900.0
    """Without a step for so long a run stands still; more where its own steps take longer (`stalled_steps`)."""
    stalled_steps: float = 5.0
    checkpoint_s: float = 3 * 3600.0
    """Age of the newest checkpoint; more where three of the run's own intervals are longer."""
    disk_bytes: float = 2e9
    """Free beside what the next checkpoint takes: the journal of some steps of an 8 B model's stage."""
    clock_s: float = 120.0
    """Of the 300 s by which clocks may differ before memberships are refused."""


@dataclass(frozen=True)
class Recording:
    """A series that Prometheus computes once for all who read it."""

    name: str
    expression: str
    meaning: str


@dataclass(frozen=True)
class Alert:
    """One alert and its runbook entry."""

    name: str
    expression: str
    hold_s: float
    severity: Literal["page", "ticket"]
    summary: str
    """One line; may hold Prometheus's templates."""
    meaning: str
    look: str
    do: str


RECORDINGS = (
    Recording(
        "barnraise:run_tokens:rate5m",
        "sum by (run) (rate(barnraise_run_tokens_total[5m]))",
        "Tokens of closed steps a second.",
    ),
    Recording(
        "barnraise:run_goodput:ratio1h",
        'clamp_max(sum by (run) (rate(barnraise_run_microbatches_total{outcome="accepted"}[1h]))'
        " / (sum by (run) (rate(barnraise_coordinator_stage_microbatches_total[1h])) > 0), 1)",
        "Accepted over computed: the share of the swarm's work that counted.",
    ),
    Recording(
        "barnraise:run_remaining_seconds",
        "(barnraise_run_target_steps - barnraise_run_step - 1) * (barnraise_run_step_interval_seconds > 0)",
        "Time to the last step, at the pace of the newest ten.",
    ),
)


DEFAULT = Thresholds()


def alerts(limits: Thresholds = DEFAULT) -> tuple[Alert, ...]:
    """Every alert, those of the run first."""
    return (*_run_alerts(limits), *_stage_alerts(), *_server_alerts(limits), *_process_alerts(limits))


def _number(value: float) -> str:
    return f"{value:g}"


def _run_alerts(limits: Thresholds) -> tuple[Alert, ...]:
    ongoing = 'on (run) (sum by (run) (barnraise_run_state{state=~"waiting|training"}) == 1)'
    # The time of a server's newest checkpoint begins at 0 with its process: until there is one, the start of the
    # oldest process counts.
    newest = "max by (run) (barnraise_server_checkpoint_last_success_timestamp_seconds)"
    begun = (
        "min by (run) ((barnraise_server_checkpoint_last_success_timestamp_seconds * 0 + 1)"
        " * on (instance, job) group_left process_start_time_seconds)"
    )
    interval = "barnraise_run_step_interval_seconds"
    return (
        Alert(
            "BarnraiseRunStalled",
            "(time() - (barnraise_run_last_step_timestamp_seconds > 0))"
            f" > on (run) clamp_min({_number(limits.stalled_steps)} * {interval}, {_number(limits.stalled_s)})"
            f" and {ongoing}",
            60,
            "page",
            "{{ $labels.run }}: no step for {{ $value | humanizeDuration }}",
            "The run has begun and is not finished, and no step has closed for a quarter of an hour (or five of its"
            " own steps, if that is longer). It counts whether the coordinator calls the run training or waiting.",
            "`barnraise status`, or the live page: the line under the run's name says who is waited for, each server"
            " says what it waits for. The Run dashboard's row *Pipeline* shows which stage's queue has stopped.",
            "A server that is away: start it again with the same command and state folder. A stage without anybody who"
            " computes: ask for volunteers, or set `stages.collocated`. Nothing is lost while a run waits.",
        ),
        Alert(
            "BarnraiseRunNotFinite",
            '(sum by (run) (increase(barnraise_run_bad_steps_total{reason="skipped"}[15m])) > 0)'
            " or (sum by (run) (barnraise_run_loss) != sum by (run) (barnraise_run_loss))"
            " or (sum by (run) (barnraise_run_loss) == Inf)",
            0,
            "page",
            "{{ $labels.run }}: a step's loss or gradient was not finite",
            "A step's gradient norm was not a finite number, so the step was skipped: the weights stayed as they were.",
            "The Run dashboard's row *Learning*: loss and gradient norm before it. One skipped step after a spike is"
            " harmless; one after the other means that the model has diverged.",
            "Once: nothing. Again and again: lower the rate or the clip while it runs (`barnraise run set"
            " optimizer.learning_rate VALUE`); if the model has diverged already, start a run from the newest"
            " checkpoint before the spike (`barnraise export`, `model.start_from`).",
        ),
        Alert(
            "BarnraiseLossSpike",
            'avg_over_time(barnraise_run_loss{split="train"}[5m])'
            ' > 1.5 * (avg_over_time(barnraise_run_loss{split="train"}[10m] offset 10m)'
            # Before the first step the loss stands at 0, and any loss is more than that.
            ' and min_over_time(barnraise_run_loss{split="train"}[10m] offset 10m) > 0)',
            300,
            "ticket",
            "{{ $labels.run }}: the loss is {{ $value | humanize }}, half as much again as twenty minutes ago",
            "The mean loss of five minutes is 1.5 times the mean of the ten minutes that ended ten minutes ago.",
            "Row *Learning*: did the gradient norm rise before it? Did the run go back to a checkpoint (bad steps,"
            " rolled_back), which makes an old loss new?",
            "Most spikes heal by themselves. If the loss stays up for an hour, treat it as a divergence.",
        ),
        Alert(
            "BarnraiseThroughputDropped",
            f"barnraise:run_tokens:rate5m < 0.5 * (barnraise:run_tokens:rate5m offset 1h) and {ongoing}",
            900,
            "ticket",
            "{{ $labels.run }}: {{ $value | humanize }} tokens/s, under half of an hour ago",
            "The run goes on, at less than half of the speed of an hour ago.",
            "Swarm dashboard: have volunteers left? Row *Pipeline*: one stage with a long queue slows all others."
            " `barnraise status`, the table of links: one slow line in a stage of two.",
            "Nothing, if the swarm has shrunk: volunteers are moved to where most is missing. Else look at the slowest"
            " stage's members.",
        ),
        Alert(
            "BarnraiseWorkRepeated",
            'sum by (run) (rate(barnraise_run_microbatches_total{outcome=~"reissued|recomputed"}[30m]))'
            ' > 0.1 * (sum by (run) (rate(barnraise_run_microbatches_total{outcome="accepted"}[30m])) > 0)',
            900,
            "ticket",
            "{{ $labels.run }}: {{ $value | humanize }} microbatches a second are done again",
            "Over a tenth of the work is leased or computed a second time: volunteers leave in the middle of it, or"
            " are slower than their leases.",
            "Swarm dashboard: leaves by reason. Node dashboard of a volunteer: results by outcome, *late* above all.",
            "Leases that run out while members live: raise `limits.lease_s`. A member that never delivers:"
            " `barnraise run ban NODE`.",
        ),
        Alert(
            "BarnraiseCheckpointOld",
            f"(time() - (({newest} >= {begun}) or {begun}))"
            " > on (run) clamp_min(3 * barnraise_run_checkpoint_every_steps * on (run)"
            f" {interval}, {_number(limits.checkpoint_s)})"
            f" and on (run) (barnraise_run_checkpoint_every_steps > 0) and {ongoing}",
            300,
            "page",
            "{{ $labels.run }}: the newest checkpoint is {{ $value | humanizeDuration }} old",
            "No server has written its part of a checkpoint for three hours (or three of the run's own intervals).",
            "Servers dashboard: checkpoints by outcome, free disk. A server's log: `checkpoint`.",
            "Make room on the disk, or mount the shared folder again. Training goes on meanwhile; what a lost disk"
            " would cost grows.",
        ),
    )


def _stage_alerts() -> tuple[Alert, ...]:
    # A run that waits for volunteers says that it waits; one that has not begun, or whose servers are away, has alerts
    # of its own.
    idle = (
        "sum by (run, stage) (rate(barnraise_coordinator_stage_microbatches_total[10m])) == 0"
        ' and on (run) (sum by (run) (barnraise_run_state{state=~"waiting|training"}) == 1)'
        " and on (run) (barnraise_run_last_step_timestamp_seconds > 0)"
        ' unless on (run) (sum by (run) (barnraise_coordinator_stage_places{state!="filled"}) > 0)'
    )
    return (
        Alert(
            "BarnraiseStageEmpty",
            f"(sum by (run, stage) (barnraise_coordinator_stage_nodes) == 0) and on (run, stage) ({idle})",
            600,
            "page",
            "{{ $labels.run }}: nobody computes for stage {{ $labels.stage }}",
            "A stage has no volunteer, and nothing has been computed for it for ten minutes, though the run has begun"
            " and all its servers are there.",
            "Row *Pipeline* of the Run dashboard; `barnraise status`.",
            'Ask for volunteers, or let servers compute: `collocated = "when_empty"` is the default.',
        ),
        Alert(
            "BarnraiseStageStarved",
            "(sum by (run, stage) (barnraise_coordinator_stage_nodes) <= 1) and on (run, stage)"
            " (min by (run, stage) (min_over_time(barnraise_coordinator_stage_queue_items[15m])) > 0)",
            900,
            "ticket",
            "{{ $labels.run }}: stage {{ $labels.stage }} has work waiting and {{ $value }} volunteers",
            "For a quarter of an hour tasks of this stage have waited, and at most one volunteer serves it: it slows"
            " the whole run, and is one departure from being empty.",
            "Row *Pipeline*: the other stages' queues and nodes.",
            "The coordinator moves volunteers by itself where their memory allows; more volunteers help.",
        ),
        Alert(
            "BarnraiseServerGone",
            'sum by (run, stage) (barnraise_coordinator_stage_places{state="away"}) > 0'
            ' and on (run) (barnraise_run_state{state="finished"} == 0)',
            300,
            "page",
            "{{ $labels.run }}: {{ $value }} servers of stage {{ $labels.stage }} are away",
            "The coordinator has no link to a server of the plan. A step needs every server, so the run waits for it,"
            " or only its link to the coordinator is down.",
            "The live page names it. Is its machine up? Its log's last lines say why it stopped.",
            "Start it again: same command, same state folder. If its disk is lost and checkpoints are shared, start an"
            " empty one: it takes the place after two minutes, where a buddy has its shard after half a minute.",
        ),
        Alert(
            "BarnraisePlacesOpen",
            'sum by (run) (barnraise_coordinator_stage_places{state="open"}) > 0'
            ' and on (run) (barnraise_run_state{state="waiting"} == 1)',
            1800,
            "ticket",
            "{{ $labels.run }}: {{ $value }} places have never had a server",
            "The run cannot begin: stages times front and back servers is more than have joined.",
            "`barnraise status`: which servers are here.",
            "Start more servers with the servers' link (`barnraise status --links`). With fewer `stages.count` it is"
            " another run once a server has joined: start the coordinator with it and another `--state`.",
        ),
        Alert(
            "BarnraiseNodesLeaving",
            'sum by (job) (increase(barnraise_coordinator_node_leaves_total{reason=~"timeout|evicted"}[1h]))'
            " > clamp_min(0.5 * sum by (job) (barnraise_coordinator_nodes), 3)",
            900,
            "ticket",
            "{{ $value | humanize }} nodes left within an hour without saying so",
            "In an hour as many nodes as half of the swarm were cut off, went silent, or were sent away.",
            "Swarm dashboard: leaves by reason, session length. Many at once: the coordinator's own line.",
            "Timeouts together: look at the coordinator's network. Evicted: its log says what they sent.",
        ),
        Alert(
            "BarnraiseMostlyRelayed",
            'sum by (job) (barnraise_coordinator_node_paths{path="relay"})'
            " > 0.5 * (sum by (job) (barnraise_coordinator_nodes) > 3)",
            1800,
            "ticket",
            "{{ $value }} nodes are reached through relays only",
            "Over half of the members go through servers that relay: their bytes cross those lines twice.",
            "Transport dashboard: connection attempts by path and outcome. `barnraise netcheck` at a volunteer.",
            "Open UDP to the servers, or give them public addresses (`--announce`); add spare servers as relays.",
        ),
    )


def _server_alerts(limits: Thresholds) -> tuple[Alert, ...]:
    return (
        Alert(
            "BarnraiseCheckpointFailing",
            'sum by (run, instance) (increase(barnraise_server_checkpoints_total{outcome="failed"}[1h])) > 1',
            0,
            "ticket",
            "{{ $labels.instance }}: {{ $value | humanize }} checkpoints failed within an hour",
            "A server could not write its part of a checkpoint more than once.",
            "Its log says the file and the error; Servers dashboard: free disk.",
            "Make room, or mend the shared folder's mount and rights; of an object store the server's keys and what"
            " they may do.",
        ),
        Alert(
            "BarnraiseDiskFull",
            "barnraise_server_disk_free_bytes < on (instance, job)"
            " (2 * max by (instance, job) (barnraise_server_checkpoint_bytes)"
            f" + {_number(limits.disk_bytes)}) or barnraise_server_disk_free_bytes < {_number(limits.disk_bytes)}",
            60,
            "page",
            "{{ $labels.instance }}: {{ $value | humanize1024 }}B free",
            "The next checkpoint or journal page may not fit. A server whose journal cannot be written ends at once:"
            " it could promise nothing any more.",
            "`df` at that machine; Servers dashboard: journal and checkpoint size.",
            "Make room, or move the state folder to a larger disk while the server is stopped.",
        ),
        Alert(
            "BarnraiseDiskFilling",
            "predict_linear(barnraise_server_disk_free_bytes[3h], 24 * 3600) < 0",
            1800,
            "ticket",
            "{{ $labels.instance }}: the disk is full within a day",
            "At the pace of the last three hours nothing is free in 24 hours.",
            "Checkpoints kept (`checkpoint.keep`), logs, other programs.",
            "Make room before it is a page.",
        ),
        Alert(
            "BarnraiseServerBehind",
            "(max by (run) (barnraise_server_step)) - on (run) group_right barnraise_server_step > 5",
            600,
            "ticket",
            "{{ $labels.instance }}: {{ $value }} steps behind the others",
            "All servers close a step together; one that stays behind is fetching its state, or hangs.",
            "Its log, and what it says it waits for (`barnraise status`).",
            "Restart it: it goes on from its journal.",
        ),
        Alert(
            "BarnraiseUpdatesRefused",
            'sum by (run, instance) (rate(barnraise_server_updates_total{outcome!="applied"}[30m]))'
            " > 0.1 * (sum by (run, instance) (rate(barnraise_server_updates_total[30m])) > 0)",
            900,
            "ticket",
            "{{ $labels.instance }}: {{ $value | humanize }} contributions a second are refused",
            "Over a tenth of the contributions are late, double, doubted or false. They cost their senders"
            " time and the model nothing: a contribution counts whole or not at all.",
            "Servers dashboard: updates by outcome. *stale*, *duplicate*: volunteers too slow for their leases."
            " *doubted* (beyond all that is usual: others do it again) and *false* (an audit has shown it): somebody"
            " computes wrongly; the ledger's log names the sender.",
            "Raise `limits.lease_s`, or ban the sender.",
        ),
        Alert(
            "BarnraiseServerSlow",
            "histogram_quantile(0.99, sum by (run, instance, le)"
            " (rate(barnraise_server_step_duration_seconds_bucket[15m])))"
            " > on (run) group_left clamp_min(0.5 * barnraise_run_step_interval_seconds, 10)",
            900,
            "ticket",
            "{{ $labels.instance }}: {{ $value | humanizeDuration }} to sum and apply a step",
            "Summing and applying takes more than ten seconds and more than half of a step: everybody waits for it.",
            "Is the machine's processor or memory taken by others? It uses up to eight cores, and no more than its"
            " container or service may (`--cpus`, `CPUQuota=`).",
            "Give it cores, or move it to a faster machine.",
        ),
        Alert(
            "BarnraiseJournalSlow",
            "histogram_quantile(0.99, sum by (instance, le)"
            " (rate(barnraise_server_journal_sync_duration_seconds_bucket[15m]))) > 0.5",
            900,
            "ticket",
            "{{ $labels.instance }}: fsync takes {{ $value | humanizeDuration }}",
            "A promise is durable before it is made, so a slow disk slows every answer.",
            "Other writers on the same disk; a network file system under the state folder.",
            "Put the state folder on a local disk; only checkpoints belong on a shared one.",
        ),
    )


def _process_alerts(limits: Thresholds) -> tuple[Alert, ...]:
    return (
        Alert(
            "BarnraiseDaemonDown",
            'up{role=~"coordinator|server"} == 0',
            180,
            "page",
            "{{ $labels.role }} {{ $labels.instance }} does not answer",
            "A coordinator or a server that should run does not answer at /metrics. That thread answers even while the"
            " process is busy, so the process or the machine is gone.",
            "The machine, `systemctl status barnraise-*`, the log's last lines.",
            "Start the same command again; it goes on from its state folder. A machine that is given up: take its"
            " target out (restart the coordinator, or remove its metrics.json).",
        ),
        Alert(
            "BarnraiseNoCoordinator",
            "absent(barnraise_coordinator_leader == 1)",
            300,
            "ticket",
            "no coordinator is seen",
            "Prometheus has no series of a coordinator. Training goes on without it; nobody can join, and nothing is"
            " reported.",
            "Is the coordinator up, and does Prometheus find it (Status, Targets)?",
            "Start it again with its state folder.",
        ),
        Alert(
            "BarnraiseLoopBlocked",
            "histogram_quantile(0.99, sum by (instance, job, le)"
            " (rate(barnraise_event_loop_lag_seconds_bucket[10m]))) > 0.5",
            600,
            "ticket",
            "{{ $labels.instance }}: the loop lags {{ $value | humanizeDuration }}",
            "A daemon's loop is held up for half a second: links are answered late and may be taken for silent.",
            "Is the processor shared with too much else? Swapping?",
            "Give the daemon a core; tell us, if the machine is idle.",
        ),
        Alert(
            "BarnraiseDatabaseSlow",
            "histogram_quantile(0.99, sum by (instance, job, le)"
            ' (rate(barnraise_coordinator_db_query_duration_seconds_bucket{operation="write"}[10m]))) > 1',
            600,
            "ticket",
            "{{ $labels.instance }}: writing to the database takes {{ $value | humanizeDuration }}",
            "What the coordinator says is durable first: joins and step reports wait for this disk.",
            "Swarm dashboard: database time. The disk under the coordinator's state folder.",
            "Move the state folder to a local disk.",
        ),
        Alert(
            "BarnraiseBadPeers",
            "sum by (instance, reason) (increase(barnraise_transport_rejected_messages_total"
            '{reason=~"signature|replay|decode|size|shape|identity|role"}[10m])) > 20',
            0,
            "ticket",
            "{{ $labels.instance }}: {{ $value | humanize }} refusals ({{ $labels.reason }}) in ten minutes",
            "Somebody sends what no honest member sends. Each is refused before it is used.",
            "The daemon's log: `peer refused` has address and detail.",
            "A member: ban it. Strangers: a firewall; callers are bounded in any case.",
        ),
        Alert(
            "BarnraiseErrorsLogged",
            'sum by (instance, job) (increase(barnraise_log_messages_total{level=~"error|critical"}[15m])) > 0',
            0,
            "ticket",
            "{{ $labels.instance }}: {{ $value | humanize }} errors logged",
            "A daemon wrote an error: something that its authors did not expect.",
            "Its log, around that time.",
            "Read it; report what looks like ours.",
        ),
        Alert(
            "BarnraiseClockOff",
            f"abs(barnraise_clock_offset_seconds) > {_number(limits.clock_s)}",
            300,
            "ticket",
            "{{ $labels.instance }}: the clock is {{ $value | humanizeDuration }} off",
            "Beyond five minutes memberships are refused, and the node can link to nobody.",
            "`timedatectl` at that machine, and at the coordinator's: the difference has two ends.",
            "Switch time synchronisation on.",
        ),
        Alert(
            "BarnraiseNodeHot",
            "barnraise_node_device_temperature_celsius > 1.02 * (barnraise_node_device_temperature_limit_celsius > 0)",
            300,
            "ticket",
            "{{ $labels.instance }}: the device is at {{ $value }} degrees, above its owner's limit",
            "The node pauses above the limit, and still it does not cool: something else heats the device.",
            "What else runs there; dust; the Node dashboard's row *Device*.",
            "Free the fan, close the other program, or lower the limit that the node begins to pause at.",
        ),
        Alert(
            "BarnraiseNodeIdleUnwillingly",
            'max by (instance, reason) (barnraise_node_suspended{reason!~"user|user_active|schedule|program"}) == 1',
            3600,
            "ticket",
            "{{ $labels.instance }}: held back for an hour: {{ $labels.reason }}",
            "For the owner of a lent computer: it would work, and something that nobody chose holds it back.",
            "`barnraise status` there; the Node dashboard's row *State*.",
            "By reason: quota (raise it or wait for the month), disk (make room), coordinator (wait).",
        ),
        Alert(
            "BarnraiseNodeIdle",
            "time() - (barnraise_node_last_work_timestamp_seconds > 0) > 3600"
            ' and on (instance) (barnraise_node_state{barnraise_node_state="training"} == 1)'
            " and on () (max(time() - barnraise_run_last_step_timestamp_seconds) < 900)",
            900,
            "ticket",
            "{{ $labels.instance }}: no work for {{ $value | humanizeDuration }}",
            "A node is ready and the run goes on, and nothing was leased to it for an hour.",
            "Its log: what it waits for. Are its links to its stage's servers up (Transport dashboard)?",
            "Restart it; if it stays idle, its stage has more hands than work.",
        ),
    )
