"""The dashboards of single daemons: servers, lent computers, links."""

from __future__ import annotations

from coordinator.monitoring.panels import (
    JOB,
    OF_ALL,
    OF_ONE,
    RATE,
    Dashboard,
    Panel,
    Query,
    Row,
    heat,
    instances,
    one,
    quantiles,
    rates,
    sums,
)


def servers() -> Dashboard:
    """The parameter servers: steps, promises, disks."""
    name = "barnraise_server_"
    return Dashboard(
        "barnraise-servers",
        "Barnraise / Servers",
        "The parameter servers: steps, promises, disks.",
        (JOB, instances("barnraise_server_step")),
        (
            Row(
                "State",
                (
                    Panel(
                        "Role",
                        "leader: holds its stage's ledger.",
                        "table",
                        "none",
                        one(f"{name}role{{{OF_ONE}}} == 1", "{{instance}} {{barnraise_server_role}}"),
                        6,
                    ),
                    Panel(
                        "Step",
                        "Newest version of each server's shard; a line below the others is behind.",
                        "timeseries",
                        "none",
                        one(f"{name}step{{{OF_ONE}}}", "{{instance}}"),
                        9,
                    ),
                    Panel(
                        "Tasks",
                        "Unfinished: without input, free, leased.",
                        "timeseries",
                        "none",
                        sums(f"{name}tasks", OF_ONE, "state"),
                        9,
                        stacked=True,
                    ),
                    Panel(
                        "Volunteers",
                        "That each server hands tasks to.",
                        "timeseries",
                        "none",
                        one(f"{name}volunteers{{{OF_ONE}}}", "{{instance}}"),
                    ),
                    Panel(
                        "Leases given again",
                        "After a loss, or too late.",
                        "timeseries",
                        "cps",
                        rates(f"{name}reissued_tasks_total", OF_ONE, "instance"),
                    ),
                    Panel(
                        "Held in memory",
                        "Weights and optimizer state.",
                        "timeseries",
                        "bytes",
                        (
                            Query(f"sum({name}parameter_bytes{{{OF_ONE}}})", "weights"),
                            Query(f"sum({name}optimizer_state_bytes{{{OF_ONE}}})", "optimizer state"),
                            Query(f"sum(process_resident_memory_bytes{{{OF_ONE}}})", "resident"),
                        ),
                    ),
                    Panel(
                        "Parameters",
                        "Of all shards together.",
                        "stat",
                        "none",
                        one(f"sum({name}parameters{{{OF_ONE}}})", "parameters"),
                        4,
                    ),
                ),
            ),
            Row(
                "Updates",
                (
                    Panel(
                        "Updates by outcome",
                        "Contributions, by what became of them.",
                        "timeseries",
                        "cps",
                        rates(f"{name}updates_total", OF_ONE, "outcome"),
                    ),
                    Panel(
                        "Audits by outcome",
                        "Contributions that were computed again. *again*: another result, so a second opinion is asked"
                        " for; *missed*: no auditor was free.",
                        "timeseries",
                        "cps",
                        rates(f"{name}audits_total", OF_ONE, "outcome"),
                    ),
                    Panel(
                        "Merged into a step",
                        "Contributions of each step.",
                        "heatmap",
                        "none",
                        heat(f"{name}step_contributions", OF_ONE),
                    ),
                    Panel(
                        "Sum and apply",
                        "Time that a step's aggregation takes.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}step_duration_seconds", OF_ONE),
                    ),
                ),
            ),
            Row(
                "Disk",
                (
                    Panel(
                        "Checkpoint age",
                        "Since the newest part was written.",
                        "timeseries",
                        "s",
                        one(
                            f"time() - ({name}checkpoint_last_success_timestamp_seconds{{{OF_ONE}}} > 0)",
                            "{{instance}}",
                        ),
                    ),
                    Panel(
                        "Checkpoints by outcome",
                        "By the hour.",
                        "timeseries",
                        "none",
                        one(f"sum by (outcome) (increase({name}checkpoints_total{{{OF_ONE}}}[1h]))", "{{outcome}}"),
                    ),
                    Panel(
                        "Checkpoint duration",
                        "To write one part.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}checkpoint_duration_seconds", OF_ONE),
                    ),
                    Panel(
                        "Checkpoint and journal",
                        "Bytes of the newest part, and of the journal.",
                        "timeseries",
                        "bytes",
                        (
                            Query(f"{name}checkpoint_bytes{{{OF_ONE}}}", "checkpoint {{instance}}"),
                            Query(f"{name}journal_bytes{{{OF_ONE}}}", "journal {{instance}}"),
                        ),
                    ),
                    Panel(
                        "Free disk",
                        "Where the state folder lies.",
                        "timeseries",
                        "bytes",
                        one(f"{name}disk_free_bytes{{{OF_ONE}}}", "{{instance}}"),
                    ),
                    Panel(
                        "fsync",
                        "A promise is durable before it is made.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}journal_sync_duration_seconds", OF_ONE),
                    ),
                ),
            ),
            Row(
                "Relay",
                (
                    Panel(
                        "Relayed links",
                        "Of others, through each server now.",
                        "timeseries",
                        "none",
                        one(f"{name}relay_sessions{{{OF_ONE}}}", "{{instance}}"),
                    ),
                    Panel(
                        "Relayed bytes",
                        "Carried for others.",
                        "timeseries",
                        "Bps",
                        rates(f"{name}relay_bytes_total", OF_ONE, "instance"),
                    ),
                    Panel(
                        "Relay refusals",
                        "By the hour, by reason.",
                        "timeseries",
                        "none",
                        one(f"sum by (reason) (increase({name}relay_refused_total{{{OF_ONE}}}[1h]))", "{{reason}}"),
                    ),
                ),
            ),
        ),
    )


def node() -> Dashboard:
    """For the owner of a lent computer: what it does, and what it costs."""
    name = "barnraise_node_"
    return Dashboard(
        "barnraise-node",
        "Barnraise / Node",
        "What a computer does for the run, and what that costs its owner.",
        (JOB, instances("barnraise_node_state")),
        (
            Row(
                "State",
                (
                    Panel(
                        "State",
                        "What the node does now.",
                        "table",
                        "none",
                        one(f"{name}state{{{OF_ONE}}} == 1", "{{instance}} {{barnraise_node_state}}"),
                        6,
                    ),
                    Panel(
                        "Held back",
                        "Every reason that holds it back now; none is good.",
                        "table",
                        "none",
                        one(f"sum by (reason) ({name}suspended{{{OF_ONE}}})", "{{reason}}"),
                        6,
                    ),
                    Panel(
                        "Held back, by reason",
                        "Share of the time.",
                        "timeseries",
                        "percentunit",
                        rates(f"{name}suspended_seconds_total", OF_ONE, "reason"),
                        6,
                    ),
                    Panel(
                        "Last word and last work",
                        "Seconds since the coordinator spoke, and since work was done.",
                        "timeseries",
                        "s",
                        (
                            Query(
                                f"time() - ({name}last_heartbeat_timestamp_seconds{{{OF_ONE}}} > 0)",
                                "word {{instance}}",
                            ),
                            Query(f"time() - ({name}last_work_timestamp_seconds{{{OF_ONE}}} > 0)", "work {{instance}}"),
                        ),
                        6,
                    ),
                ),
            ),
            Row(
                "Device",
                (
                    Panel(
                        "Heat",
                        "The working device and its owner's limit; 0 where there is no sensor or no limit.",
                        "timeseries",
                        "celsius",
                        (
                            Query(f"{name}device_temperature_celsius{{{OF_ONE}}}", "device {{instance}}"),
                            Query(f"{name}device_temperature_limit_celsius{{{OF_ONE}}}", "limit {{instance}}"),
                        ),
                        12,
                    ),
                    Panel(
                        "Power",
                        "What the working device draws; 0 where there is no sensor.",
                        "timeseries",
                        "watt",
                        one(f"{name}device_power_watts{{{OF_ONE}}}", "{{instance}}"),
                        12,
                    ),
                ),
            ),
            Row(
                "Work",
                (
                    Panel(
                        "Tokens/s",
                        "Whose backward this computer did.",
                        "timeseries",
                        "none",
                        rates(f"{name}tokens_total", OF_ONE, "instance"),
                    ),
                    Panel(
                        "Operations",
                        "Finished, a second.",
                        "timeseries",
                        "cps",
                        rates(f"{name}microbatches_total", OF_ONE, "operation"),
                    ),
                    Panel(
                        "Results by outcome",
                        "As the swarm judged them.",
                        "timeseries",
                        "cps",
                        rates(f"{name}work_results_total", OF_ONE, "outcome"),
                    ),
                    Panel(
                        "Where the time goes",
                        "Shares of wall time; they sum to one for each node.",
                        "timeseries",
                        "percentunit",
                        one(f"avg by (phase) (rate({name}phase_seconds_total{{{OF_ONE}}}[{RATE}]))", "{{phase}}"),
                        8,
                        stacked=True,
                    ),
                    Panel(
                        "Operation time",
                        "Of one pipeline operation.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}operation_duration_seconds", OF_ONE, "operation"),
                    ),
                    Panel(
                        "Queues",
                        "Leases, results not yet sent, jobs for each lane.",
                        "timeseries",
                        "none",
                        sums(f"{name}queue_items", OF_ONE, "queue"),
                    ),
                ),
            ),
            Row(
                "Device",
                (
                    Panel(
                        "Temperature against limit",
                        "Of the device, and where the owner's limit pauses it; nothing where nobody can say.",
                        "timeseries",
                        "celsius",
                        (
                            Query(f"{name}device_temperature_celsius{{{OF_ONE}}}", "{{instance}}"),
                            Query(f"{name}device_temperature_limit_celsius{{{OF_ONE}}}", "limit {{instance}}"),
                        ),
                        12,
                    ),
                    Panel(
                        "Power",
                        "That the device draws.",
                        "timeseries",
                        "watt",
                        one(f"{name}device_power_watts{{{OF_ONE}}}", "{{instance}}"),
                        12,
                    ),
                ),
            ),
            Row(
                "Line",
                (
                    Panel(
                        "Traffic against limit",
                        "Bytes a second both ways; a limit of 0 is none.",
                        "timeseries",
                        "Bps",
                        (
                            Query(
                                f"sum by (direction) (rate(barnraise_transport_bytes_total{{{OF_ONE}}}[{RATE}]))",
                                "{{direction}}",
                            ),
                            Query(
                                f"max by (direction) ({name}bandwidth_limit_bytes_per_second{{{OF_ONE}}})",
                                "limit {{direction}}",
                            ),
                        ),
                        12,
                    ),
                    Panel(
                        "Quota left",
                        "Of this month; 0 where there is none.",
                        "timeseries",
                        "bytes",
                        one(f"{name}transfer_quota_remaining_bytes{{{OF_ONE}}}", "{{instance}}"),
                        6,
                    ),
                    Panel(
                        "Port forwarded",
                        "1 while the home router forwards a port.",
                        "timeseries",
                        "none",
                        one(f"{name}port_forwarded{{{OF_ONE}}}", "{{instance}}"),
                        6,
                    ),
                ),
            ),
        ),
    )


def transport() -> Dashboard:
    """Links and what crosses them."""
    name = "barnraise_transport_"
    return Dashboard(
        "barnraise-transport",
        "Barnraise / Transport",
        "Links, paths, and what crosses them.",
        (JOB, instances("barnraise_build_info")),
        (
            Row(
                "Traffic",
                (
                    Panel(
                        "Bytes by kind",
                        "Received and sent by the daemons chosen above.",
                        "timeseries",
                        "Bps",
                        rates(f"{name}bytes_total", OF_ONE, "direction, kind"),
                        12,
                        stacked=True,
                    ),
                    Panel(
                        "Messages by kind",
                        "A second.",
                        "timeseries",
                        "cps",
                        rates(f"{name}messages_total", OF_ONE, "direction, kind"),
                        12,
                    ),
                    Panel(
                        "Form against fp32",
                        "Bytes sent of each form, over what they were in fp32; below 1 saves.",
                        "timeseries",
                        "percentunit",
                        one(
                            f"sum by (codec) (rate(barnraise_codec_output_bytes_total{{{OF_ONE}}}[{RATE}]))"
                            f" / (sum by (codec) (rate(barnraise_codec_input_bytes_total{{{OF_ONE}}}[{RATE}])) > 0)",
                            "{{codec}}",
                        ),
                        12,
                    ),
                    Panel(
                        "Bytes per token",
                        "Moved by all, for each token of a closed step.",
                        "timeseries",
                        "bytes",
                        one(
                            f'sum(rate({name}bytes_total{{{OF_ALL}, direction="tx"}}[{RATE}]))'
                            f" / sum(rate(barnraise_run_tokens_total{{{OF_ALL}}}[{RATE}]))",
                            "bytes a token",
                        ),
                        12,
                    ),
                    Panel(
                        "Memory of links",
                        "Tensor bytes announced and not digested. At the limit whoever holds most is cut off.",
                        "timeseries",
                        "bytes",
                        (
                            Query(f"{name}incoming_bytes{{{OF_ONE}}}", "{{instance}}"),
                            Query(f"{name}incoming_limit_bytes{{{OF_ONE}}}", "limit {{instance}}"),
                        ),
                        24,
                    ),
                ),
            ),
            Row(
                "Links",
                (
                    Panel(
                        "Open links by path",
                        "tcp, quic, channel, relay.",
                        "timeseries",
                        "none",
                        sums(f"{name}connections", OF_ONE, "path"),
                        8,
                        stacked=True,
                    ),
                    Panel(
                        "Attempts",
                        "By path and outcome, by the hour.",
                        "timeseries",
                        "none",
                        one(
                            f"sum by (path, outcome) (increase({name}connects_total{{{OF_ONE}}}[1h]))",
                            "{{path}} {{outcome}}",
                        ),
                    ),
                    Panel(
                        "Time to connect",
                        "By path.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}connect_duration_seconds", OF_ONE, "path"),
                    ),
                    Panel(
                        "Round trip",
                        "By path.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}round_trip_seconds", OF_ONE, "path"),
                        12,
                    ),
                    Panel(
                        "Refused",
                        "Messages and callers refused before use, by the hour.",
                        "timeseries",
                        "none",
                        one(f"sum by (reason) (increase({name}rejected_messages_total{{{OF_ONE}}}[1h]))", "{{reason}}"),
                        12,
                    ),
                ),
            ),
        ),
    )
