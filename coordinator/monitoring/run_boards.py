"""The dashboards of a run and of its swarm: for the researcher, and for the operator."""

from __future__ import annotations

from coordinator.monitoring.panels import (
    JOB,
    OF_ALL,
    OF_RUN,
    RATE,
    RUN,
    Dashboard,
    Panel,
    Query,
    Row,
    heat,
    one,
    quantiles,
    rates,
    sums,
)


def run() -> Dashboard:
    """For whoever wants to know whether the model learns, and how fast."""
    step = f"barnraise_run_step{{{OF_RUN}}}"
    return Dashboard(
        "barnraise-run",
        "Barnraise / Run",
        "Does the model learn, how fast, and what holds it up?",
        (JOB, RUN),
        (
            Row(
                "Now",
                (
                    Panel(
                        "State",
                        "What the coordinator calls the run.",
                        "stat",
                        "none",
                        one(f"barnraise_run_state{{{OF_RUN}}} == 1", "{{state}}"),
                        3,
                    ),
                    Panel(
                        "Steps done",
                        "Closed steps that count, of those planned.",
                        "stat",
                        "none",
                        (Query(f"{step} + 1", "done"), Query(f"barnraise_run_target_steps{{{OF_RUN}}}", "planned")),
                        4,
                    ),
                    Panel(
                        "Loss",
                        "Of the newest step, in nats per token.",
                        "stat",
                        "none",
                        one(f'barnraise_run_loss{{{OF_RUN}, split="train"}}', "loss"),
                        3,
                    ),
                    Panel(
                        "Tokens/s",
                        "Of closed steps, over five minutes.",
                        "stat",
                        "none",
                        one(f"barnraise:run_tokens:rate5m{{{OF_RUN}}}", "tokens/s"),
                        3,
                    ),
                    Panel(
                        "Time left",
                        "Steps left, at the pace of the newest ten.",
                        "stat",
                        "s",
                        one(f"barnraise:run_remaining_seconds{{{OF_RUN}}}", "left"),
                        4,
                    ),
                    Panel(
                        "Goodput",
                        "Share of the last hour's work that counted.",
                        "stat",
                        "percentunit",
                        one(f"barnraise:run_goodput:ratio1h{{{OF_RUN}}}", "goodput"),
                        3,
                    ),
                    Panel(
                        "Since last step",
                        "Grows where the run stands still.",
                        "stat",
                        "s",
                        one(f"time() - (barnraise_run_last_step_timestamp_seconds{{{OF_RUN}}} > 0)", "since"),
                        4,
                    ),
                ),
            ),
            Row(
                "Learning",
                (
                    Panel(
                        "Loss",
                        "Nats per token; a rise that stays is a divergence.",
                        "timeseries",
                        "none",
                        (
                            *one(f"barnraise_run_loss{{{OF_RUN}}}", "{{split}}"),
                            *one(f"barnraise_validation_loss{{{OF_RUN}}}", "validation"),
                        ),
                        12,
                    ),
                    Panel(
                        "Gradient norm",
                        "Of the whole model, before clipping.",
                        "timeseries",
                        "none",
                        one(f"barnraise_run_gradient_norm{{{OF_RUN}}}", "norm"),
                        6,
                    ),
                    Panel(
                        "Learning rate",
                        "Of the newest step.",
                        "timeseries",
                        "none",
                        one(f"barnraise_run_learning_rate{{{OF_RUN}}}", "rate"),
                        6,
                    ),
                    Panel(
                        "Validation perplexity",
                        "Of text that is not trained on: among how many next tokens the model is as unsure.",
                        "timeseries",
                        "none",
                        one(f"barnraise_validation_perplexity{{{OF_RUN}}}", "perplexity"),
                        12,
                    ),
                    Panel(
                        "Validated version",
                        "Steps that made the newest version that is validated; -1: none yet.",
                        "timeseries",
                        "none",
                        one(f"barnraise_validation_version{{{OF_RUN}}}", "version"),
                        12,
                    ),
                    Panel(
                        "Bad steps",
                        "Skipped since not finite, or thrown away by going back to a checkpoint.",
                        "timeseries",
                        "none",
                        one(f"sum by (reason) (increase(barnraise_run_bad_steps_total{{{OF_RUN}}}[1h]))", "{{reason}}"),
                        12,
                    ),
                    Panel(
                        "Tokens and epochs",
                        "Tokens trained on, and passes over the data.",
                        "timeseries",
                        "none",
                        (
                            Query(f"barnraise_run_tokens_total{{{OF_RUN}}}", "tokens"),
                            Query(f"barnraise_run_data_epoch{{{OF_RUN}}}", "epoch"),
                        ),
                        12,
                    ),
                ),
            ),
            Row(
                "Speed",
                (
                    Panel(
                        "Tokens/s",
                        "Of closed steps.",
                        "timeseries",
                        "none",
                        one(f"rate(barnraise_run_tokens_total{{{OF_RUN}}}[{RATE}])", "tokens/s"),
                    ),
                    Panel(
                        "Step duration",
                        "From its opening to its closing; steps may overlap.",
                        "timeseries",
                        "s",
                        quantiles("barnraise_run_step_duration_seconds", OF_RUN),
                    ),
                    Panel(
                        "Step durations",
                        "How they spread: a second band is one slow member.",
                        "heatmap",
                        "s",
                        heat("barnraise_run_step_duration_seconds", OF_RUN),
                    ),
                    Panel(
                        "Idle share",
                        "Of the time of those who compute: the pipeline's bubble.",
                        "timeseries",
                        "percentunit",
                        one(f"barnraise_run_bubble_ratio{{{OF_RUN}}}", "idle"),
                    ),
                    Panel(
                        "Work by fate",
                        "Accepted, leased anew after a loss, computed twice.",
                        "timeseries",
                        "cps",
                        rates("barnraise_run_microbatches_total", OF_RUN, "outcome"),
                    ),
                    Panel(
                        "Batch",
                        "Tokens in one step, steps planned, steps between checkpoints.",
                        "table",
                        "none",
                        (
                            Query(f"barnraise_run_batch_tokens{{{OF_RUN}}}", "tokens in a step"),
                            Query(f"barnraise_run_target_steps{{{OF_RUN}}}", "steps planned"),
                            Query(f"barnraise_run_checkpoint_every_steps{{{OF_RUN}}}", "steps between checkpoints"),
                        ),
                    ),
                ),
            ),
            Row(
                "Pipeline",
                (
                    Panel(
                        "Queue by stage",
                        "Tasks that wait for a free volunteer; the longest is the slowest stage.",
                        "bargauge",
                        "none",
                        one(
                            f"sort_desc(sum by (stage) (barnraise_coordinator_stage_queue_items{{{OF_RUN}}}))",
                            "stage {{stage}}",
                        ),
                    ),
                    Panel(
                        "Volunteers by stage",
                        "Who serves each stage.",
                        "bargauge",
                        "none",
                        one(f"sum by (stage) (barnraise_coordinator_stage_nodes{{{OF_RUN}}})", "stage {{stage}}"),
                    ),
                    Panel(
                        "Places by state",
                        "Servers of the plan: filled, away, open.",
                        "bargauge",
                        "none",
                        sums("barnraise_coordinator_stage_places", OF_RUN, "stage, state"),
                    ),
                    Panel(
                        "Microbatches by stage",
                        "Backwards a second; the lowest line is the pace of all.",
                        "timeseries",
                        "cps",
                        rates("barnraise_coordinator_stage_microbatches_total", OF_RUN, "stage"),
                        12,
                    ),
                    Panel(
                        "Queues over time",
                        "A queue that grows names the stage that holds up the rest.",
                        "timeseries",
                        "none",
                        sums("barnraise_coordinator_stage_queue_items", OF_RUN, "stage"),
                        12,
                    ),
                ),
            ),
        ),
    )


def swarm() -> Dashboard:
    """For the operator: who is there, who comes and goes, and is the coordinator well?"""
    name = "barnraise_coordinator_"
    return Dashboard(
        "barnraise-swarm",
        "Barnraise / Swarm",
        "Who is there, who comes and goes, and is the coordinator well?",
        (JOB,),
        (
            Row(
                "Members",
                (
                    Panel(
                        "Nodes by state",
                        "Linked servers and volunteers.",
                        "timeseries",
                        "none",
                        sums(f"{name}nodes", OF_ALL, "state"),
                        8,
                        stacked=True,
                    ),
                    Panel(
                        "Joins and refusals",
                        "By the hour.",
                        "timeseries",
                        "none",
                        one(f"sum by (outcome) (increase({name}node_joins_total{{{OF_ALL}}}[1h]))", "{{outcome}}"),
                    ),
                    Panel(
                        "Leaves by reason",
                        "By the hour. timeout: cut or silent; evicted: we hung up.",
                        "timeseries",
                        "none",
                        one(f"sum by (reason) (increase({name}node_leaves_total{{{OF_ALL}}}[1h]))", "{{reason}}"),
                    ),
                    Panel(
                        "Session length",
                        "How long nodes that left had stayed.",
                        "heatmap",
                        "s",
                        heat(f"{name}node_session_seconds", OF_ALL),
                    ),
                    Panel(
                        "Volunteers by stage",
                        "After joins and moves.",
                        "timeseries",
                        "none",
                        sums(f"{name}stage_nodes", OF_ALL, "stage"),
                        8,
                        stacked=True,
                    ),
                    Panel(
                        "Placements",
                        "Stages given, by reason.",
                        "timeseries",
                        "none",
                        one(f"sum by (reason) (increase({name}assignments_total{{{OF_ALL}}}[1h]))", "{{reason}}"),
                    ),
                ),
            ),
            Row(
                "Reach",
                (
                    Panel(
                        "Nodes by path",
                        "How they are reached; one may have several.",
                        "timeseries",
                        "none",
                        sums(f"{name}node_paths", OF_ALL, "path"),
                    ),
                    Panel(
                        "Relayed links",
                        "That go through servers of the run now.",
                        "timeseries",
                        "none",
                        one(f"sum({name}relay_sessions{{{OF_ALL}}})", "links"),
                    ),
                    Panel(
                        "Relayed bytes",
                        "As servers report them.",
                        "timeseries",
                        "Bps",
                        rates(f"{name}relay_bytes_total", OF_ALL, "direction"),
                    ),
                    Panel(
                        "Heartbeat delay",
                        "How late nodes answer a ping.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}heartbeat_delay_seconds", OF_ALL),
                    ),
                    Panel(
                        "Banned",
                        "Nodes refused for good.",
                        "stat",
                        "none",
                        one(f"sum({name}nodes_banned{{{OF_ALL}}})", "banned"),
                        4,
                    ),
                    Panel(
                        "Coordinators",
                        "One leads; none: training goes on, nobody can join.",
                        "stat",
                        "none",
                        one(f"sum({name}leader{{{OF_ALL}}})", "leading"),
                        4,
                    ),
                    Panel(
                        "Builds",
                        "Versions in use: a rolling restart is over when one line is left.",
                        "table",
                        "none",
                        one(
                            f"count by (version, protocol, python) (barnraise_build_info{{{OF_ALL}}})",
                            "{{version}} protocol {{protocol}} python {{python}}",
                        ),
                        8,
                    ),
                ),
            ),
            Row(
                "Coordinator",
                (
                    Panel(
                        "Database",
                        "Time of one operation; what is said is durable first.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}db_query_duration_seconds", OF_ALL, "operation"),
                    ),
                    Panel(
                        "API requests",
                        "By route and answer.",
                        "timeseries",
                        "reqps",
                        rates(f"{name}http_requests_total", OF_ALL, "route, code"),
                    ),
                    Panel(
                        "Orders refused",
                        "Without the right admin token, by the hour: somebody guesses, or has an old links.json.",
                        "timeseries",
                        "none",
                        one(f"sum(increase({name}admin_refused_total{{{OF_ALL}}}[1h]))", "refused"),
                    ),
                    Panel(
                        "API time",
                        "Of a request.",
                        "timeseries",
                        "s",
                        quantiles(f"{name}http_request_duration_seconds", OF_ALL, "route"),
                    ),
                    Panel(
                        "Errors",
                        "Logged as error or critical, and handled, by part.",
                        "timeseries",
                        "none",
                        (
                            Query(
                                "sum by (level) (increase(barnraise_log_messages_total"
                                f'{{{OF_ALL}, level=~"error|critical|warning"}}[1h]))',
                                "{{level}}",
                            ),
                            Query(
                                f"sum by (component) (increase(barnraise_errors_total{{{OF_ALL}}}[1h]))",
                                "{{component}}",
                            ),
                        ),
                    ),
                    Panel(
                        "Loop lag",
                        "How late each daemon's loop wakes a task, 99th percentile.",
                        "timeseries",
                        "s",
                        one(
                            "histogram_quantile(0.99, sum by (instance, le)"
                            f" (rate(barnraise_event_loop_lag_seconds_bucket{{{OF_ALL}}}[{RATE}])))",
                            "{{instance}}",
                        ),
                    ),
                    Panel(
                        "Clocks",
                        "Each node's clock against the coordinator's.",
                        "timeseries",
                        "s",
                        one(f"barnraise_clock_offset_seconds{{{OF_ALL}}}", "{{instance}}"),
                    ),
                    Panel(
                        "Memory",
                        "Resident, of every daemon.",
                        "timeseries",
                        "bytes",
                        one(f"process_resident_memory_bytes{{{OF_ALL}}}", "{{instance}}"),
                        12,
                    ),
                    Panel(
                        "Processor",
                        "Cores in use, of every daemon.",
                        "timeseries",
                        "none",
                        one(f"rate(process_cpu_seconds_total{{{OF_ALL}}}[{RATE}])", "{{instance}}"),
                        12,
                    ),
                ),
            ),
        ),
    )
