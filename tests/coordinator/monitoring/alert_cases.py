"""A healthy run as Prometheus would have seen it for over three hours, and what differs in it where an alert must fire.

Series are in promtool's notation: `0+4x200` begins at 0 and grows by 4 each minute; the clock starts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MINUTES = 204
COORDINATOR = 'job="barnraise", instance="c:1", role="coordinator"'
SERVERS = tuple(f'job="barnraise", instance="s:{number}", role="server"' for number in (1, 2))
VOLUNTEER = 'job="barnraise", instance="v:1", role="volunteer"'
RUN = 'run="tiny"'


def flat(value: float) -> str:
    return f"{value:g}x{MINUTES}"


def growing(by: float) -> str:
    return f"0+{by:g}x{MINUTES}"


def until(minute: int, by: float) -> str:
    """Grows so long, and then no more."""
    return f"0+{by:g}x{minute} {by * minute:g}x{MINUTES - minute - 1}"


def gone(value: float, minute: int) -> str:
    """There so long, and then no more."""
    return f"{value:g}x{minute} _x{MINUTES - minute - 1}"


def turning(minute: int, before: float, after: float) -> str:
    return f"{before:g}x{minute} {after:g}x{MINUTES - minute - 1}"


def histogram(name: str, labels: str, quick: float, slow: float, edge: float = 0.5) -> dict[str, str]:
    """`quick` observations a minute below `edge`, and `slow` ones far above it."""
    return {
        f'{name}_bucket{{{labels}, le="{edge:g}"}}': growing(quick),
        f'{name}_bucket{{{labels}, le="{40 * edge:g}"}}': growing(quick + slow),
        f'{name}_bucket{{{labels}, le="+Inf"}}': growing(quick + slow),
    }


def healthy() -> dict[str, str]:
    """Every series that a rule reads: two stages, two servers, eight volunteers of whom one is scraped."""
    c = f"{COORDINATOR}, {RUN}"
    found = {
        f"up{{{COORDINATOR}}}": flat(1),
        f"process_start_time_seconds{{{COORDINATOR}}}": flat(1),
        f"barnraise_coordinator_leader{{{COORDINATOR}}}": flat(1),
        f"barnraise_run_step{{{c}}}": growing(4),
        f"barnraise_run_target_steps{{{c}}}": flat(100_000),
        f"barnraise_run_last_step_timestamp_seconds{{{c}}}": growing(60),
        f"barnraise_run_step_interval_seconds{{{c}}}": flat(15),
        f"barnraise_run_tokens_total{{{c}}}": growing(8000),
        f'barnraise_run_loss{{{c}, split="train"}}': flat(4),
        f'barnraise_run_bad_steps_total{{{c}, reason="skipped"}}': flat(0),
        f"barnraise_run_checkpoint_every_steps{{{c}}}": flat(100),
        f'barnraise_coordinator_nodes{{{COORDINATOR}, state="training"}}': flat(10),
        f'barnraise_coordinator_node_leaves_total{{{COORDINATOR}, reason="timeout"}}': until(MINUTES - 1, 0.05),
        f'barnraise_coordinator_node_paths{{{COORDINATOR}, path="relay"}}': flat(2),
        f'barnraise_transport_rejected_messages_total{{{COORDINATOR}, reason="decode"}}': growing(0.5),
        f'barnraise_log_messages_total{{{COORDINATOR}, level="error"}}': flat(3),
        f"barnraise_clock_offset_seconds{{{VOLUNTEER}}}": flat(-20),
        f'barnraise_node_suspended{{{VOLUNTEER}, reason="quota"}}': flat(0),
        f"barnraise_node_device_temperature_celsius{{{VOLUNTEER}}}": flat(70),
        f"barnraise_node_device_temperature_limit_celsius{{{VOLUNTEER}}}": flat(83),
        f'barnraise_node_suspended{{{VOLUNTEER}, reason="user"}}': flat(1),
        f"barnraise_node_last_work_timestamp_seconds{{{VOLUNTEER}}}": growing(60),
        f'barnraise_node_state{{{VOLUNTEER}, barnraise_node_state="training"}}': flat(1),
        **histogram("barnraise_event_loop_lag_seconds", COORDINATOR, 240, 0),
        **histogram(
            "barnraise_coordinator_db_query_duration_seconds", f'{COORDINATOR}, operation="write"', 240, 0, edge=1
        ),
    }
    for state in ("waiting", "training", "finished"):
        found[f'barnraise_run_state{{{c}, state="{state}"}}'] = flat(state == "training")
    for outcome, by in (("accepted", 64), ("reissued", 1), ("recomputed", 1)):
        found[f'barnraise_run_microbatches_total{{{c}, outcome="{outcome}"}}'] = growing(by)
    for stage in ("0", "1"):
        at = f'{c}, stage="{stage}"'
        found[f"barnraise_coordinator_stage_nodes{{{at}}}"] = flat(4)
        found[f"barnraise_coordinator_stage_queue_items{{{at}}}"] = "0 3" + f" 0x{MINUTES}"
        found[f"barnraise_coordinator_stage_microbatches_total{{{at}}}"] = growing(33)
        for state, count in (("filled", 2), ("away", 0), ("open", 0)):
            found[f'barnraise_coordinator_stage_places{{{at}, state="{state}"}}'] = flat(count)
    for server in SERVERS:
        s = f"{server}, {RUN}"
        found |= {
            f"up{{{server}}}": flat(1),
            f"process_start_time_seconds{{{server}}}": flat(1),
            f"barnraise_server_step{{{s}}}": growing(4),
            f"barnraise_server_checkpoint_last_success_timestamp_seconds{{{s}}}": growing(60),
            f'barnraise_server_checkpoints_total{{{s}, outcome="failed"}}': flat(1),
            f"barnraise_server_checkpoint_bytes{{{s}}}": flat(1e9),
            f"barnraise_server_disk_free_bytes{{{server}}}": f"5e+11-1e+07x{MINUTES}",
            f'barnraise_server_updates_total{{{s}, outcome="applied"}}': growing(64),
            f'barnraise_server_updates_total{{{s}, outcome="stale"}}': growing(1),
            **histogram("barnraise_server_step_duration_seconds", s, 4, 0, edge=10),
            **histogram("barnraise_server_journal_sync_duration_seconds", server, 240, 0),
        }
    return found


@dataclass(frozen=True)
class Case:
    """What differs from the healthy run (None: the series is missing), and which alerts fire at its end."""

    title: str
    differs: dict[str, str | None]
    fires: frozenset[str] = field(default_factory=frozenset)


def cases() -> list[Case]:
    """At least one that fires for every alert, with all that must fire beside it; and near misses that must not."""
    c = f"{COORDINATOR}, {RUN}"
    s = f"{SERVERS[0]}, {RUN}"
    step = f"barnraise_run_last_step_timestamp_seconds{{{c}}}"
    waits = {
        f'barnraise_run_state{{{c}, state="waiting"}}': flat(1),
        f'barnraise_run_state{{{c}, state="training"}}': flat(0),
    }
    over = {
        f'barnraise_run_state{{{c}, state="finished"}}': flat(1),
        f'barnraise_run_state{{{c}, state="training"}}': flat(0),
    }
    stands = {
        step: until(170, 60),
        f"barnraise_run_step{{{c}}}": until(170, 4),
    }
    checkpoints = "barnraise_server_checkpoint_last_success_timestamp_seconds"
    none_yet = {f"{checkpoints}{{{server}, {RUN}}}": flat(0) for server in SERVERS}
    no_nodes = {f'barnraise_coordinator_stage_nodes{{{c}, stage="1"}}': flat(0)}
    no_work = {f'barnraise_coordinator_stage_microbatches_total{{{c}, stage="1"}}': until(150, 33)}

    def case(title: str, differs: Mapping[str, str | None], *fires: str) -> Case:
        return Case(title, dict(differs), frozenset(f"Barnraise{name}" for name in fires))

    return [
        case("a healthy run", {}),
        case("no step for half an hour while training", stands, "RunStalled"),
        case("the same while it is said to wait", {**stands, **waits}, "RunStalled"),
        case("no step, and the run is finished", {**stands, **over}),
        case("a run that has not begun waits for its first servers", {step: flat(0), **waits}),
        case(
            "steps of half an hour each: twenty minutes without one are nothing",
            {step: until(180, 60), f"barnraise_run_step_interval_seconds{{{c}}}": flat(1800)},
        ),
        case(
            "a step was skipped",
            {f'barnraise_run_bad_steps_total{{{c}, reason="skipped"}}': turning(195, 0, 1)},
            "RunNotFinite",
        ),
        case("the loss is infinite", {f'barnraise_run_loss{{{c}, split="train"}}': "Inf " * MINUTES}, "RunNotFinite"),
        case("the loss is NaN", {f'barnraise_run_loss{{{c}, split="train"}}': "NaN " * MINUTES}, "RunNotFinite"),
        case(
            "a step was skipped an hour ago",
            {f'barnraise_run_bad_steps_total{{{c}, reason="skipped"}}': turning(130, 0, 1)},
        ),
        case("the loss doubles", {f'barnraise_run_loss{{{c}, split="train"}}': turning(187, 4, 9)}, "LossSpike"),
        case("the loss begins with the first step", {f'barnraise_run_loss{{{c}, split="train"}}': turning(187, 0, 5)}),
        case("the loss rises by a quarter", {f'barnraise_run_loss{{{c}, split="train"}}': turning(187, 4, 5)}),
        case(
            "a third of the tokens of an hour ago",
            {f"barnraise_run_tokens_total{{{c}}}": f"0+9000x160 1440000+3000x{MINUTES - 161}"},
            "ThroughputDropped",
        ),
        case(
            "two thirds of the tokens of an hour ago",
            {f"barnraise_run_tokens_total{{{c}}}": f"0+9000x160 1440000+6000x{MINUTES - 161}"},
        ),
        case(
            "a fifth is leased anew",
            {f'barnraise_run_microbatches_total{{{c}, outcome="reissued"}}': growing(13)},
            "WorkRepeated",
        ),
        case(
            "servers write no checkpoint any more",
            {f"{checkpoints}{{{server}, {RUN}}}": until(5, 60) for server in SERVERS},
            "CheckpointOld",
        ),
        case("no checkpoint since the processes began", none_yet, "CheckpointOld"),
        case(
            "no checkpoint yet, and the servers are young",
            {**none_yet, **{f"process_start_time_seconds{{{server}}}": flat(9000) for server in SERVERS}},
        ),
        case("no checkpoints are wanted", {**none_yet, f"barnraise_run_checkpoint_every_steps{{{c}}}": flat(0)}),
        case("nobody computes for a stage", {**no_nodes, **no_work}, "StageEmpty"),
        case("the same while the run is said to wait for volunteers", {**no_nodes, **no_work, **waits}, "StageEmpty"),
        case("nobody has come yet to a run that has not begun", {**no_nodes, **no_work, **waits, step: flat(0)}),
        case("a stage without volunteers whose servers compute", no_nodes),
        case(
            "one volunteer, and work waits",
            {
                f'barnraise_coordinator_stage_nodes{{{c}, stage="1"}}': flat(1),
                f'barnraise_coordinator_stage_queue_items{{{c}, stage="1"}}': flat(5),
            },
            "StageStarved",
        ),
        case(
            "many volunteers, and work waits", {f'barnraise_coordinator_stage_queue_items{{{c}, stage="1"}}': flat(5)}
        ),
        case(
            "a server is away",
            {f'barnraise_coordinator_stage_places{{{c}, stage="1", state="away"}}': turning(190, 0, 1)},
            "ServerGone",
        ),
        case(
            "a server was away for three minutes",
            {f'barnraise_coordinator_stage_places{{{c}, stage="1", state="away"}}': turning(197, 0, 1)},
        ),
        case(
            "everybody has left a finished run",
            {**over, f'barnraise_coordinator_stage_places{{{c}, stage="1", state="away"}}': flat(2)},
        ),
        case(
            "places without a server",
            {**waits, step: flat(0), f'barnraise_coordinator_stage_places{{{c}, stage="1", state="open"}}': flat(2)},
            "PlacesOpen",
        ),
        case(
            "half of the swarm is cut off",
            {f'barnraise_coordinator_node_leaves_total{{{COORDINATOR}, reason="timeout"}}': growing(0.5)},
            "NodesLeaving",
        ),
        case(
            "six of ten are relayed",
            {f'barnraise_coordinator_node_paths{{{COORDINATOR}, path="relay"}}': flat(6)},
            "MostlyRelayed",
        ),
        case(
            "checkpoints fail",
            {f'barnraise_server_checkpoints_total{{{s}, outcome="failed"}}': growing(0.1)},
            "CheckpointFailing",
        ),
        case("the disk is full", {f"barnraise_server_disk_free_bytes{{{SERVERS[0]}}}": flat(1e9)}, "DiskFull"),
        case(
            "the disk holds no two checkpoints",
            {f"barnraise_server_disk_free_bytes{{{SERVERS[0]}}}": flat(3e9)},
            "DiskFull",
        ),
        case(
            "the disk fills within hours",
            {f"barnraise_server_disk_free_bytes{{{SERVERS[0]}}}": f"5e+11-1e+09x{MINUTES}"},
            "DiskFilling",
        ),
        case("a server stays behind", {f"barnraise_server_step{{{s}}}": until(150, 4)}, "ServerBehind"),
        case(
            "a fifth of the updates is stale",
            {f'barnraise_server_updates_total{{{s}, outcome="stale"}}': growing(16)},
            "UpdatesRefused",
        ),
        case(
            "a server sums for a minute",
            histogram("barnraise_server_step_duration_seconds", s, 0, 4, edge=10),
            "ServerSlow",
        ),
        case(
            "fsync takes seconds",
            histogram("barnraise_server_journal_sync_duration_seconds", SERVERS[0], 0, 240),
            "JournalSlow",
        ),
        case("a server does not answer", {f"up{{{SERVERS[0]}}}": turning(190, 1, 0)}, "DaemonDown"),
        case("a volunteer does not answer", {f"up{{{VOLUNTEER}}}": flat(0)}),
        case(
            "the coordinator is gone, and with it all that it tells",
            {name: None for name in healthy() if COORDINATOR in name},
            "NoCoordinator",
        ),
        case("the loop is held", histogram("barnraise_event_loop_lag_seconds", COORDINATOR, 120, 120), "LoopBlocked"),
        case(
            "the database is slow",
            histogram(
                "barnraise_coordinator_db_query_duration_seconds", f'{COORDINATOR}, operation="write"', 0, 240, edge=1
            ),
            "DatabaseSlow",
        ),
        case(
            "somebody sends rubbish",
            {f'barnraise_transport_rejected_messages_total{{{COORDINATOR}, reason="decode"}}': growing(5)},
            "BadPeers",
        ),
        case(
            "an error is logged",
            {f'barnraise_log_messages_total{{{COORDINATOR}, level="error"}}': turning(195, 3, 4)},
            "ErrorsLogged",
        ),
        case(
            "a clock is three minutes behind",
            {f"barnraise_clock_offset_seconds{{{VOLUNTEER}}}": flat(-180)},
            "ClockOff",
        ),
        case(
            "the quota holds a node back",
            {f'barnraise_node_suspended{{{VOLUNTEER}, reason="quota"}}': flat(1)},
            "NodeIdleUnwillingly",
        ),
        case("a device is too hot", {f"barnraise_node_device_temperature_celsius{{{VOLUNTEER}}}": flat(90)}, "NodeHot"),
        case(
            "a node gets no work",
            {f"barnraise_node_last_work_timestamp_seconds{{{VOLUNTEER}}}": until(90, 60)},
            "NodeIdle",
        ),
    ]
