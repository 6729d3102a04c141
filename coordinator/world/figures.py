"""What came out of a simulated run, as plain values: the JSON object of `barnraise simulate`, which the table shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from coordinator.world.predicted import best_steps, predicted
from coordinator.world.swarm import Moment, Swarm
from protocol.world.world import Host

HOUR_S = 3600.0
WAITS_SHOWN = 8


def figures_of(swarm: Swarm, seed: int) -> dict[str, Any]:
    """Everything in seconds, bytes and shares; equal runs and seeds give equal values."""
    config, network, now = swarm.config, swarm.network, swarm.world.now
    seconds = [later.at_s - step.at_s for step, later in zip(swarm.steps, swarm.steps[1:], strict=False)]
    per_hour = 0.0
    if seconds:
        per_hour = HOUR_S * len(seconds) / sum(seconds)
    elif swarm.steps:
        per_hour = HOUR_S / swarm.steps[0].at_s
    plan = predicted(swarm)
    best = best_steps(swarm, swarm.churn, now) if swarm.departures or _comes_late(swarm) else None
    return {
        "run": config.name,
        "seed": seed,
        "servers": network.servers,
        "volunteers": len(swarm.volunteers),
        "simulated_s": now,
        "steps": len(swarm.steps),
        "first_step_s": swarm.steps[0].at_s if swarm.steps else None,
        "step_s": median(seconds) if seconds else None,
        "steps_per_hour": per_hour,
        "tokens_per_s": per_hour * config.step_tokens / HOUR_S,
        "predicted": None
        if plan is None
        else {
            "step_s": plan.step_s,
            "stages": [{"pace_s": pace.pace_s, "binds": pace.binds} for pace in plan.paces],
        },
        "stages": [_stage(swarm, stage) for stage in range(config.stages.count)],
        "run_waits": _shares(Counter(moment.run_waits or "nothing" for moment in swarm.moments)),
        "volunteer_bytes": _bytes(swarm),
        "most_waiting_bytes": max((host.uplink.most_bytes for host in swarm.volunteers.values()), default=0.0),
        "tasks": _tasks(swarm),
        "churn": {
            "departures": swarm.departures,
            "best_steps": best,
            "of_best": len(swarm.steps) / best if best else None,
        },
        "warnings": [
            {"role": role, "event": event, "count": count, "first": swarm.said[role, event]}
            for (role, event), count in swarm.warnings.most_common()
        ],
        "inputs": swarm.world.inputs,
    }


def _comes_late(swarm: Swarm) -> bool:
    return any(change.at_s > 0.0 for change in swarm.churn.changes)


def _shares(counts: Counter[str]) -> dict[str, float]:
    """The commonest, as shares of all."""
    total = sum(counts.values())
    return {what: count / total for what, count in counts.most_common(WAITS_SHOWN)} if total else {}


def _stage(swarm: Swarm, stage: int) -> dict[str, Any]:
    """What the volunteers of a stage did, as shares of the moments at which they were asked."""
    doing: Counter[str] = Counter()
    for moment in swarm.moments:
        doing.update(moment.by_stage[stage])
    return {"volunteers": crew_of(swarm.moments, stage), "doing": _shares(doing)}


def crew_of(moments: Sequence[Moment], stage: int) -> float:
    """Volunteers of the stage that were asked, in the mean over all moments."""
    return sum(moment.by_stage[stage].total() for moment in moments) / len(moments) if moments else 0.0


def _bytes(swarm: Swarm) -> dict[str, Any]:
    """What one volunteer's line carries in an hour of being there, in the mean, and what of."""
    now = swarm.world.now
    hours = sum(_present_s(host, now) for host in swarm.volunteers.values()) / HOUR_S
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    for host in swarm.volunteers.values():
        up.update(host.sent)
        down.update(host.received)
    return {
        "up_per_hour": up.total() / hours if hours else 0.0,
        "down_per_hour": down.total() / hours if hours else 0.0,
        "up": _shares(up),
        "down": _shares(down),
    }


def _present_s(host: Host, now: float) -> float:
    return host.present_s + (now - host.started_at if host.machine is not None else 0.0)


def _tasks(swarm: Swarm) -> dict[str, Any]:
    """Forwards, backwards and ends of routes of the closed steps: how many devices did, and how many it takes."""
    plan = swarm.machine.placement.plan
    done = needed = 0
    if plan is not None:
        for step in swarm.steps:
            done += swarm.members.executed[step.number]
            lengths = [plan.length(step.number, number) for number in range(swarm.config.batch.microbatches)]
            needed += sum(2 * length - 1 for length in lengths)
    return {"executed": done, "needed": needed, "share": done / needed if needed else None}
