"""The coordinator's metrics: families as data, and the gauges that follow from the machine's state.

Counters and histograms are fed by the machine's `Count` effects; gauges are set from its state once a second, so a
scrape never touches the machine from another thread. Names are an interface: rename one only for one release of both.
"""

from __future__ import annotations

import math

from coordinator.live.core import CoordinatorMachine
from coordinator.live.history import perplexity
from coordinator.live.stage_choice import ASSIGNMENT_LABELS
from coordinator.live.status import run_state, step_interval_s
from protocol.drive.link import PATHS
from protocol.drive.metrics import DIRECTIONS, Family, Metrics
from protocol.run.run import STAGES_MAX, RunConfig

NODE_STATES = ("idle", "joining", "syncing", "training", "paused", "draining")
PLACE_STATES = ("filled", "away", "open")
RUN_STATES = ("waiting", "training", "paused", "finished", "failed")
DB_OPERATIONS = ("open", "write", "read")
HTTP_ROUTES = (
    "/", "/page", "/api", "/api/sd", "/api/status", "/api/network", "/api/steps", "/api/ban", "/api/unban",
    "/api/invites", "/api/invite", "/api/uninvite", "/api/set", "/api/replan", "/api/pause", "/api/rollback",
    "/api/trace", "other",
)  # fmt: skip
HTTP_CODES = ("200", "304", "400", "401", "403", "404", "405", "429", "500", "503")

_QUICK_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_STEP_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0)
_STAY_S = (10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 86400.0, 3 * 86400.0, 10 * 86400.0)


def coordinator_families(config: RunConfig) -> tuple[Family, ...]:
    """Every family of a coordinator; the run's name, and how many stages its model can be cut into, are known, so all
    children exist from the start (of stages that the run has, see `refresh`)."""
    run = {"run": (config.name,)}
    stage = {**run, "stage": tuple(str(index) for index in range(min(STAGES_MAX, config.block_count)))}
    return (
        Family("barnraise_coordinator_leader", "gauge", "1 on the leading coordinator."),
        Family("barnraise_coordinator_nodes", "gauge", "Linked nodes by state.", {"state": NODE_STATES}),
        Family("barnraise_coordinator_node_paths", "gauge", "Nodes by how they are reached.", {"path": PATHS}),
        Family(
            "barnraise_coordinator_node_joins_total",
            "counter",
            "Join requests by outcome.",
            {"outcome": ("accepted", "refused")},
        ),
        Family(
            "barnraise_coordinator_node_leaves_total",
            "counter",
            "Departures by reason.",
            {"reason": ("graceful", "timeout", "evicted", "banned")},
        ),
        Family("barnraise_coordinator_node_session_seconds", "histogram", "How long nodes stay.", buckets=_STAY_S),
        Family("barnraise_coordinator_heartbeat_delay_seconds", "histogram", "How late nodes answer a ping."),
        Family("barnraise_coordinator_stage_nodes", "gauge", "Live volunteers serving a stage.", stage),
        Family(
            "barnraise_coordinator_stage_places",
            "gauge",
            "Servers' places of a stage: filled, away (its server has no link), or open (nobody was ever there).",
            {**stage, "state": PLACE_STATES},
        ),
        Family(
            "barnraise_coordinator_stage_queue_items",
            "gauge",
            "Tasks of a stage that could start and wait for somebody with a free slot, as its servers report.",
            stage,
        ),
        Family(
            "barnraise_coordinator_stage_microbatches_total",
            "counter",
            "Backwards done for a stage, as members report: one for each microbatch, more where work was done twice.",
            stage,
        ),
        Family(
            "barnraise_coordinator_assignments_total",
            "counter",
            "Placements made, by reason.",
            {**run, "reason": ASSIGNMENT_LABELS},
        ),
        Family("barnraise_coordinator_nodes_banned", "gauge", "Nodes refused for good."),
        Family("barnraise_coordinator_relay_sessions", "gauge", "Links that go through servers of the run now."),
        Family(
            "barnraise_coordinator_relay_bytes_total",
            "counter",
            "Bytes that servers carried for others, as they report it.",
            {"direction": DIRECTIONS},
        ),
        Family(
            "barnraise_coordinator_db_query_duration_seconds",
            "histogram",
            "Database time.",
            {"operation": DB_OPERATIONS},
            _QUICK_S,
        ),
        Family(
            "barnraise_coordinator_http_requests_total",
            "counter",
            "API requests.",
            {"route": HTTP_ROUTES, "code": HTTP_CODES},
        ),
        Family("barnraise_coordinator_admin_refused_total", "counter", "Orders without the right admin token."),
        Family(
            "barnraise_coordinator_http_request_duration_seconds",
            "histogram",
            "API time.",
            {"route": HTTP_ROUTES},
            _QUICK_S,
        ),
        Family(
            "barnraise_run_info",
            "gauge",
            "What is being trained.",
            {**run, "model": None, "optimizer": None, "schedule": None, "dataset": None},
        ),
        Family("barnraise_run_state", "gauge", "1 for the state the run is in.", {**run, "state": RUN_STATES}),
        Family(
            "barnraise_run_step",
            "gauge",
            "Number of the newest finished step, from 0; -1: none.",
            run,
        ),
        Family("barnraise_run_target_steps", "gauge", "Steps planned.", run),
        Family("barnraise_run_tokens_total", "counter", "Tokens trained on.", run),
        Family("barnraise_run_loss", "gauge", "Loss in nats per token.", {**run, "split": ("train",)}),
        Family("barnraise_validation_loss", "gauge", "Nats per token on text kept aside; NaN before the first.", run),
        Family("barnraise_validation_perplexity", "gauge", "Its exponential: equally likely next tokens.", run),
        Family("barnraise_validation_version", "gauge", "Steps that made the version validated last; -1: none.", run),
        Family("barnraise_run_learning_rate", "gauge", "Learning rate of the newest step.", run),
        Family("barnraise_run_gradient_norm", "gauge", "Global gradient norm before clipping.", run),
        Family("barnraise_run_batch_tokens", "gauge", "Tokens in a global batch.", run),
        Family("barnraise_run_step_duration_seconds", "histogram", "Wall time of a global step.", run, _STEP_S),
        Family(
            "barnraise_run_step_interval_seconds",
            "gauge",
            "From one closed step to the next, the mean of the newest ten; steps may overlap. 0 before the second.",
            run,
        ),
        Family(
            "barnraise_run_bad_steps_total",
            "counter",
            "Steps skipped or rolled back.",
            {**run, "reason": ("skipped", "rolled_back")},
        ),
        Family(
            "barnraise_run_microbatches_total",
            "counter",
            "Microbatches at a stage: accepted in closed steps, leased anew after a loss, or computed twice.",
            {**run, "outcome": ("accepted", "reissued", "recomputed")},
        ),
        Family(
            "barnraise_run_bubble_ratio",
            "gauge",
            "Share of the time between two reports in which members that compute did not.",
            run,
        ),
        Family(
            "barnraise_run_checkpoint_every_steps",
            "gauge",
            "Steps from one checkpoint to the next; 0: none is written.",
            run,
        ),
        Family("barnraise_run_last_step_timestamp_seconds", "gauge", "When the last step finished.", run),
        Family("barnraise_run_data_epoch", "gauge", "Passes over the data.", run),
    )


def first_values(metrics: Metrics, machine: CoordinatorMachine) -> None:
    """What does not change while the process lives, and the counters that go on from the database."""
    config = machine.config
    run = config.name
    model = config.model
    metrics.record("barnraise_coordinator_leader", 1)
    metrics.record(
        "barnraise_run_info",
        1,
        run=run,
        model=f"llama {model.layers}x{model.hidden}",
        optimizer="adamw",
        schedule="1f1b",
        dataset=config.data.source,
    )
    metrics.record("barnraise_run_tokens_total", machine.history.tokens, run=run)
    metrics.record("barnraise_run_bad_steps_total", machine.history.lost_steps, run=run, reason="rolled_back")


def refresh(metrics: Metrics, machine: CoordinatorMachine, now: float) -> None:
    """Sets every gauge from the machine's state."""
    run = machine.config.name
    metrics.record("barnraise_run_target_steps", machine.placement.running.steps, run=run)
    tokens = machine.history.batches.tokens(machine.history.newest_step + 1)
    metrics.record("barnraise_run_batch_tokens", tokens, run=run)
    every_steps = machine.placement.running.checkpoint.every_steps
    metrics.record("barnraise_run_checkpoint_every_steps", every_steps, run=run)
    members = machine.roster.all()
    states = [member.state if member.state in NODE_STATES else "joining" for member in members]
    for state in NODE_STATES:
        metrics.record("barnraise_coordinator_nodes", states.count(state), state=state)
    reached = [{heard.figures.path for heard in machine.network.links_of(member.peer).values()} for member in members]
    for path in PATHS:
        metrics.record("barnraise_coordinator_node_paths", sum(path in paths for paths in reached), path=path)
    volunteers = machine.roster.volunteers()
    stages = range(machine.placement.running.stages.count)
    metrics.show_only("stage", [str(stage) for stage in stages])  # a replan may have made them more, or fewer
    for stage in stages:
        serving = sum(member.stage == stage for member in volunteers)
        metrics.record("barnraise_coordinator_stage_nodes", serving, run=run, stage=str(stage))
    _refresh_places(metrics, machine)
    idle = machine.reported.idle_share()
    if idle is not None:
        metrics.record("barnraise_run_bubble_ratio", idle, run=run)
    relayed = sum(member.report.counters.get("relay_sessions", 0.0) for member in members if member.report is not None)
    metrics.record("barnraise_coordinator_relay_sessions", relayed)
    metrics.record("barnraise_coordinator_nodes_banned", machine.admission.banned_count)
    present, _ = run_state(machine, now)
    for state in RUN_STATES:
        metrics.record("barnraise_run_state", state == present, run=run, state=state)
    history = machine.history
    metrics.record("barnraise_run_step", history.newest_step, run=run)
    if machine.data is not None and machine.data.token_count > 0:
        metrics.record("barnraise_run_data_epoch", history.tokens // machine.data.token_count, run=run)
    metrics.record("barnraise_run_step_interval_seconds", step_interval_s(machine), run=run)
    validation = history.validations[-1] if history.validations else None
    loss = math.nan if validation is None else validation.loss
    metrics.record("barnraise_validation_loss", loss, run=run)
    metrics.record("barnraise_validation_perplexity", perplexity(loss), run=run)
    metrics.record("barnraise_validation_version", -1 if validation is None else validation.version, run=run)
    if history.tail:
        newest = history.tail[-1]
        metrics.record("barnraise_run_loss", newest.loss, run=run, split="train")
        metrics.record("barnraise_run_learning_rate", newest.learning_rate, run=run)
        metrics.record("barnraise_run_gradient_norm", newest.gradient_norm, run=run)
        metrics.record("barnraise_run_last_step_timestamp_seconds", newest.wall_s, run=run)


def _refresh_places(metrics: Metrics, machine: CoordinatorMachine) -> None:
    """Who stands where, and what waits there."""
    run, table = machine.config.name, machine.placement.table
    stages = machine.placement.running.stages
    for stage in range(stages.count):
        queue, filled, away = 0.0, 0, 0
        for shard in range(stages.front_servers + stages.back_servers):
            holder = table.holder.get((stage, shard))
            member = machine.roster.get(holder) if holder is not None else None
            filled += member is not None
            away += holder is not None and member is None
            if member is not None and member.report is not None:
                queue += member.report.counters.get("queue", 0.0)
        places = {"filled": filled, "away": away, "open": stages.front_servers + stages.back_servers - filled - away}
        for state, count in places.items():
            metrics.record("barnraise_coordinator_stage_places", count, run=run, stage=str(stage), state=state)
        metrics.record("barnraise_coordinator_stage_queue_items", queue, run=run, stage=str(stage))
