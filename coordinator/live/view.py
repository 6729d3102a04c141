"""The coordinator's state as the live page shows it: small, and fit for strangers. Reads, never changes.

`overview` is what changes every second, `members` the list of those who take part. Ids are cut to eight letters and
addresses are left out, so that the same words can stand on an address that everybody may read; only the operator's own
page gets whole ids, to ban by.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from coordinator.live.roster import Member
from coordinator.live.slots import Slot
from coordinator.live.status import build_stages, newest_validation, run_state, step_interval_s, tokens_per_s
from protocol.base.ids import NodeId

if TYPE_CHECKING:
    from coordinator.live.core import CoordinatorMachine

STEPS_SHOWN = 30
EVENTS_SHOWN = 40
ID_LETTERS = 8
WORDS_MAX = 300
"""Letters of one sentence: a peer's reason may be longer than anybody wants to read."""
PLAN_WORDS_MAX = 1500
"""Letters of a plan's sentence: the blocks of 16 stages, and then what the planner has to say of it."""
_WHOLE_ID = re.compile(r"\b([a-z2-7]{8})[a-z2-7]{44}\b")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-fA-F:.%]+\](?::\d+)?")
_SAID = ("detail", "reason", "role")
"""Fields of an event that people read; others are for the log."""


def overview(machine: CoordinatorMachine, now: float) -> dict[str, Any]:
    """Run, stages, plan, checkpoints, newest steps and events: some 10 KB."""
    config, history, placement = machine.config, machine.history, machine.placement
    state, waiting_for = run_state(machine, now)
    since = machine.waiting_since if waiting_for == machine.waiting_for else now
    newest = history.tail[-1] if history.tail else None
    interval_s = step_interval_s(machine)
    left = placement.running.steps - 1 - history.newest_step
    servers, volunteers = machine.roster.servers(), machine.roster.volunteers()
    return {
        "wall_s": round(machine.outbox.wall_s(now), 3),
        "run": {
            "name": config.name,
            "state": state,
            "waiting_for": public(waiting_for),
            "waiting_s": round(now - since, 1) if waiting_for else 0.0,
            "step": history.newest_step,
            "target_steps": placement.running.steps,
            "tokens": history.tokens,
            "loss": newest.loss if newest else None,
            "validation": newest_validation(machine),
            "gradient_norm": newest.gradient_norm if newest else None,
            "learning_rate": newest.learning_rate if newest else None,
            "tokens_per_s": tokens_per_s(machine, now),
            "left_s": round(left * interval_s, 1) if interval_s and left > 0 else None,
            "goodput": machine.reported.goodput(),
            "idle": machine.reported.idle_share(),
            "last_step_wall_s": newest.wall_s if newest else None,
            "rollbacks": history.rollback_count,
            "lost_steps": history.lost_steps,
            "model": f"{config.model.layers} layer{'s' * (config.model.layers != 1)} of {config.model.hidden}",
            "data": config.data.source.rpartition("/")[2],
        },
        "plan": {
            "generation": placement.plan.generation if placement.plan else 0,
            "restore_step": placement.plan.restore_step if placement.plan else -1,
            "sentence": public(placement.sentence, PLAN_WORDS_MAX),
        },
        "checkpoints": _checkpoints(machine, servers),
        "stages": _stages(machine),
        "counts": {"servers": len(servers), "volunteers": len(volunteers), "banned": machine.admission.banned_count},
        "steps": [
            [row.step, row.loss, row.tokens, row.duration_s, row.wall_s, row.skipped]
            for row in list(history.tail)[-STEPS_SHOWN:]
        ],
        "events": [_event(event) for event in list(machine.outbox.events)[-EVENTS_SHOWN:]],
    }


def members(machine: CoordinatorMachine, now: float, *, whole_ids: bool) -> list[dict[str, Any]]:
    """Who is linked, and servers of the plan that are not: about 200 bytes each."""
    table = machine.placement.table
    found = [_member(machine, member, now, whole_ids) for member in machine.roster.all()]
    if not machine.finished:
        for slot, since in sorted(table.gone_since.items()):
            holder = table.holder[slot]
            shown = holder if whole_ids else holder[:ID_LETTERS]
            found.append(
                {
                    "id": shown, "name": _placed(machine, holder, slot), "role": "server", "stage": slot[0],
                    "state": "away", "waits": "", "since_s": round(now - since), "paths": "", "trip_s": None, "work": 0,
                }
            )  # fmt: skip
    return found


def public(text: str, most: int = WORDS_MAX) -> str:
    """A sentence without whole ids and addresses, and not longer than anybody reads."""
    short = _ADDRESS.sub("(address)", _WHOLE_ID.sub(r"\1", text))
    return short if len(short) <= most else f"{short[: most - 1]}…"


def _member(machine: CoordinatorMachine, member: Member, now: float, whole_ids: bool) -> dict[str, Any]:
    slot = machine.placement.table.slot_of(member.peer) if member.role == "server" else None
    links = [heard.figures for heard in machine.network.links_of(member.peer).values()]
    trips = [figures.round_trip_s for figures in links if figures.round_trip_s >= 0]
    report = member.report
    return {
        "id": member.peer if whole_ids else member.peer[:ID_LETTERS],
        "name": _placed(machine, member.peer, slot) if slot else _spoken_name(machine, member),
        "role": member.role,
        "stage": slot[0] if slot else member.stage,
        "state": member.state,
        "waits": public(report.waiting_for) if report else "",
        "since_s": round(now - member.linked_at),
        "paths": ", ".join(sorted({figures.path for figures in links})),
        "trip_s": min(trips) if trips else None,
        "work": int(report.counters.get("tasks_backward", 0.0)) if report else 0,
    }


def _placed(machine: CoordinatorMachine, node: NodeId, slot: Slot) -> str:
    """A server by its place, behind the operator's name for it."""
    given, place = machine.naming.of(node), machine.placement.table.name(slot)
    return f"{given}, {place}" if given else place


def _spoken_name(machine: CoordinatorMachine, member: Member) -> str:
    """The operator's name for it; or its public one with the id's first letters, since anybody may take any name."""
    if given := machine.naming.of(member.peer):
        return given
    if member.join is not None and member.join.name:
        return f"{member.join.name} ({member.peer[:ID_LETTERS]})"
    return f"{member.role} {member.peer[:ID_LETTERS]}"


def _stages(machine: CoordinatorMachine) -> list[dict[str, Any]]:
    """The layer axis: which blocks a stage holds, who stands there, and what waits there."""
    found = []
    for stage in build_stages(machine):
        servers = []
        for server in stage["servers"]:
            member = machine.roster.get(server["id"])
            report = member.report if member is not None else None
            servers.append(
                {
                    "id": server["id"][:ID_LETTERS],
                    "role": server["role"],
                    "linked": server["linked"],
                    "waits": public(report.waiting_for) if report else "",
                    "queue": report.counters.get("queue", 0.0) if report else 0.0,
                }
            )
        found.append(
            {
                "stage": stage["stage"],
                "first": stage["first_block"],
                "end": stage["end_block"],
                "blocks": stage["blocks"],
                "servers": servers,
                "volunteers": stage["volunteers"],
                "queue": sum(server["queue"] for server in servers),
            }
        )
    return found


def _checkpoints(machine: CoordinatorMachine, servers: list[Member]) -> dict[str, Any]:
    """Checkpoints that servers have named as readable, and how many of those that have a place. What is older than the
    run keeps is only a name."""
    named: dict[int, int] = {}
    for member in servers:
        for step in member.join.checkpoints if member.join is not None else ():
            named[step] = named.get(step, 0) + 1
    return {
        "every_steps": machine.placement.running.checkpoint.every_steps,
        "servers": max(len(servers), len(machine.placement.table.slots)),
        "named": sorted(named.items(), reverse=True)[: min(8, machine.config.checkpoint.keep)],
    }


def _event(event: dict[str, Any]) -> dict[str, Any]:
    words = [public(str(event[name])) for name in _SAID if event.get(name) not in (None, "")]
    words += [f"{name} {event[name]}" for name in ("stage", "step") if isinstance(event.get(name), int)]
    who = str(event["node"])[:ID_LETTERS] if "node" in event else ""
    return {"wall_s": event["wall_s"], "level": event["level"], "event": event["event"], "who": who, "words": words}
