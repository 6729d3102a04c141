"""The coordinator's state as plain values, for `/api/status`, the live view and the gauges. Reads, never changes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from coordinator.live.gray import NAMED_S, seen_by_fellows, stalled_s
from coordinator.live.history import perplexity
from coordinator.live.plan_builder import stage_blocks
from coordinator.live.roster import Member
from protocol.run.changes import changes_hash

if TYPE_CHECKING:
    from coordinator.live.core import CoordinatorMachine

LOSSES_SHOWN = 100
QUIET_S = 5.0
"""For so long without a closed step a run counts as going on; longer where its steps take longer (`STEPS_QUIET`)."""
STEPS_QUIET = 3
LONG_GAPS = 2
"""Of the newest nine times between two steps so many longest ones do not count: a run that stood still a moment ago, or
whose coordinator's clock was set, has no longer steps for it. (In the mean, a clock that went 200 s ahead and a server
that hung right after it left a run without a word for 33 s.) The next longest does: where updates are delayed, steps
close in pairs."""
LEASES_QUIET = 3
AWAY_NAMED = 4
"""Nodes that one sentence names; after a restart of the coordinator all are away for a moment."""


def build_status(machine: CoordinatorMachine, now: float) -> dict[str, Any]:
    """Everything but the address book of volunteers; ids are whole, the reader shortens them."""
    config, history, placement, data = machine.config, machine.history, machine.placement, machine.data
    plan = placement.plan
    newest = history.tail[-1] if history.tail else None
    state, waiting_for = run_state(machine, now)
    waiting_since = machine.waiting_since if waiting_for == machine.waiting_for else now
    return {
        "run": {
            "id": machine.run_id.hex(),
            "name": config.name,
            "state": state,
            "waiting_for": waiting_for,
            "waiting_s": round(now - waiting_since, 3) if waiting_for else 0.0,
            # The number of the newest closed step, counted from 0; -1 before the first. People are told how many.
            "step": history.newest_step,
            "target_steps": placement.running.steps,
            "tokens": history.tokens,
            "loss": newest.loss if newest else None,
            "learning_rate": newest.learning_rate if newest else None,
            "gradient_norm": newest.gradient_norm if newest else None,
            "validation": newest_validation(machine),
            "tokens_per_s": tokens_per_s(machine, now),
            "last_step_wall_s": newest.wall_s if newest else None,
            # Where the model is cut, in the form of RUN.toml: a reference of this very run needs them.
            "stages": placement.running.stages.count,
            "cut": placement.running.stages.cut,
            "rollbacks": history.rollback_count,
            "lost_steps": history.lost_steps,
            "changes": [
                {"key": change.key, "value": change.value, "from_step": change.from_step}
                for change in placement.wishes.changes
            ],
            "trains": changes_hash(config, placement.wishes.changes),
            "vocabulary": data.vocabulary if data else 0,
            "data_hash": data.data_hash if data else "",
            "data_tokens": data.token_count if data else 0,
            "alerts": _alerts(machine),
        },
        "generation": plan.generation if plan else 0,
        "ledger_generation": plan.ledger_generation if plan else 0,
        "restore_step": plan.restore_step if plan else -1,
        "plan": placement.sentence,
        "losses": [{"step": row.step, "loss": row.loss} for row in list(history.tail)[-LOSSES_SHOWN:]],
        "validations": [{"version": v.version, "loss": v.loss} for v in list(history.validations)[-LOSSES_SHOWN:]],
        "stages": build_stages(machine),
        "members": [_member(machine, member, now) for member in machine.roster.all()],
        "away": _away(machine, now),
        "banned": machine.admission.banned_count,
        "events": list(machine.outbox.events),
    }


def newest_validation(machine: CoordinatorMachine) -> dict[str, Any] | None:
    """The loss on text that was kept aside, of the newest version that has one. A version is made by so many steps."""
    if not machine.history.validations:
        return None
    found = machine.history.validations[-1]
    return {
        "version": found.version,
        "loss": found.loss,
        "perplexity": perplexity(found.loss),
        "tokens": found.tokens,
    }


def _alerts(machine: CoordinatorMachine) -> list[str]:
    """What is wrong on nodes that go on working, each with the node's place: for the operator."""
    table = machine.placement.table
    found = []
    for member in machine.roster.all():
        if member.report is not None and member.report.alert:
            slot = table.slot_of(member.peer)
            place = table.name(slot) if slot is not None else member.role
            found.append(f"{place} ({member.peer[:8]}): {member.report.alert}")
    return found


def run_state(machine: CoordinatorMachine, now: float) -> tuple[str, str]:
    """(waiting, training, paused or finished; what it waits for, as a sentence)."""
    placement = machine.placement
    if machine.finished:
        return "finished", ""
    if placement.plan is None or placement.review.kind != "keep":
        return "waiting", placement.review.sentence
    if placement.wishes.paused and placement.plan.paused:
        why = placement.wishes.pause_reason or "by the operator"
        return (
            "paused",
            f"paused{': ' if placement.wishes.pause_reason else ' '}{why}; `barnraise run resume` lets it go on",
        )
    if waiting_for := _missed_servers(machine, now):
        return "waiting", waiting_for
    if placement.wishes.held and (stuck := _stuck(machine, now)):
        return "waiting", stuck
    if placement.wishes.held and placement.wishes.lays_out:
        step = placement.wishes.save
        what = "all open steps to close" if step < 0 else f"every server to save and read checkpoint {step}"
        return "waiting", f"waiting for {what}; then the run goes on in its new layout"
    if placement.wishes.held:
        return "waiting", "waiting at the end of a step for all servers to have what was changed"
    if placement.plan.restore_step >= placement.running.steps:
        decider = placement.table.slots[0]
        return "waiting", f"waiting for {placement.table.name(decider)} to tell how the last steps ended"
    if machine.data is None:
        return "waiting", _unread(machine)
    waiting_for = _stuck(machine, now)
    return ("waiting", waiting_for) if waiting_for else ("training", "")


def _stuck(machine: CoordinatorMachine, now: float) -> str:
    """Why no step is closed, or an empty string."""
    return _lonely_stages(machine, now) or _hanging_servers(machine, now) or _no_step(machine, now)


def _unread(machine: CoordinatorMachine) -> str:
    """Nobody has read the data yet: why, in the words of the server that could not."""
    table = machine.placement.table
    first = [machine.roster.get(node) for (stage, _), node in table.holder.items() if stage == 0]
    for member in sorted((each for each in first if each is not None), key=lambda each: each.number):
        slot = table.slot_of(member.peer)
        if slot is not None and member.welcomed and member.report is not None and member.report.alert:
            return (
                f"{table.name(slot)} ({member.peer[:8]}): {member.report.alert}. It is tried again there every few"
                " seconds; or correct [data] in the run's file and start the coordinator again: nobody has to join anew"
            )
    return "waiting for the servers of stage 0 to read the data"


def _missed_servers(machine: CoordinatorMachine, now: float) -> str:
    """A sentence when servers have left their places and no step closes any more.

    A step needs every server, so one that closes shows that all work and only a link to the coordinator is down.
    """
    placement = machine.placement
    holder = placement.table.holder
    gone = [
        slot
        for slot in sorted(placement.table.gone_since)
        if not seen_by_fellows(machine.roster.servers(), holder[slot], now)
    ]
    if not gone:
        return ""
    alone_since = max(placement.table.gone_since.values())
    if placement.step_stored_at > alone_since and now - placement.step_stored_at < _quiet_max_s(machine):
        return ""
    names = [f"{placement.table.name(slot)} ({placement.table.holder[slot][:8]})" for slot in gone[:AWAY_NAMED]]
    if len(gone) > AWAY_NAMED:
        names.append(f"{len(gone) - AWAY_NAMED} more")
    return f"waiting for {', '.join(names[:-1])}{' and ' if len(names) > 1 else ''}{names[-1]} to come back"


def _hanging_servers(machine: CoordinatorMachine, now: float) -> str:
    """A sentence when servers that are linked do nothing, and no step closes any more."""
    placement = machine.placement
    if not placement.hanging or now - placement.newest_news_at < _quiet_max_s(machine):
        return ""
    named = []
    for slot, node in sorted(placement.table.holder.items()):
        member = machine.roster.get(node)
        if member is not None and member.report is not None and stalled_s(member, now) >= NAMED_S:
            named.append(f"{placement.table.name(slot)} ({node[:8]}): {member.report.waiting_for}")
    if not named:
        return ""
    more = f"; and {len(named) - AWAY_NAMED} more" if len(named) > AWAY_NAMED else ""
    return f"waiting for {'; '.join(named[:AWAY_NAMED])}{more}"


def _no_step(machine: CoordinatorMachine, now: float) -> str:
    """A sentence when no step closes for three leases, whatever holds it up: by then whoever was given its work first
    has lost it to somebody else. It names who waits, and for what."""
    placement = machine.placement
    since = placement.newest_news_at
    if len(machine.history.tail) < 2:  # nobody knows how long a step takes, so work that is done shows that all is well
        since = max(since, placement.worked_at)
    if now - since < max(LEASES_QUIET * machine.placement.running.limits.lease_s, _quiet_max_s(machine)):
        return ""
    waits = []
    for slot, node in sorted(placement.table.holder.items()):
        member = machine.roster.get(node)
        if member is not None and member.report is not None and member.report.waiting_for:
            waits.append(f"{placement.table.name(slot)} ({node[:8]}) waits for {member.report.waiting_for}")
    named = next((wait for wait in waits if " by " in wait), next(iter(waits), ""))
    if not named:
        slot = placement.table.slots[0]
        named = f"{placement.table.name(slot)} ({placement.table.holder[slot][:8]}) does not say why"
    return f"no step has closed for {now - placement.newest_news_at:.0f} s: {named}"


def _lonely_stages(machine: CoordinatorMachine, now: float) -> str:
    """A sentence when stages have nobody who computes for them, which only `stages.collocated = "never"` allows. Those
    who are there and of no use count where no step is closed either."""
    stages = machine.placement.running.stages
    if stages.collocated != "never":
        return ""
    served = {member.stage for member in machine.roster.volunteers()}
    quiet = now - machine.placement.newest_news_at >= _quiet_max_s(machine)
    idle = machine.crew.without_work() if quiet else {}
    lonely = [str(stage) for stage in range(stages.count) if stage not in served or stage in idle]
    if not lonely:
        return ""
    resting = [node[:8] for crew in idle.values() for node in crew]
    more = f" and {len(resting) - AWAY_NAMED} more" if len(resting) > AWAY_NAMED else ""
    less = f"; there, but of no use for the time being: {', '.join(resting[:AWAY_NAMED])}{more}" if resting else ""
    return f"waiting for volunteers for stage {', '.join(lonely)}: servers do not compute (stages.collocated){less}"


def _quiet_max_s(machine: CoordinatorMachine) -> float:
    """How long no step may close before the run stands still, going by how far apart the newest ones closed."""
    rows = machine.history.tail
    if len(rows) < 2:
        return max(QUIET_S, STEPS_QUIET * sum(row.duration_s for row in rows))
    newest = list(rows)[-10:]
    gaps_s = sorted((after.wall_s - before.wall_s for before, after in pairwise(newest)), reverse=True)
    return max(QUIET_S, STEPS_QUIET * gaps_s[min(LONG_GAPS, (len(gaps_s) - 1) // 2)])


def step_interval_s(machine: CoordinatorMachine) -> float:
    """From the end of one step to the next, the mean of the newest ten; 0 before the second, or if the wall clock was
    set back meanwhile."""
    rows = list(machine.history.tail)[-10:]
    return max(0.0, (rows[-1].wall_s - rows[0].wall_s) / (len(rows) - 1)) if len(rows) > 1 else 0.0


def tokens_per_s(machine: CoordinatorMachine, now: float) -> float:
    """Over the newest steps, at most ten: tokens by the time between their ends where known, else by duration.

    Nothing when the newest is so long ago that the run stands still.
    """
    rows = list(machine.history.tail)[-10:]
    if rows and machine.outbox.wall_s(now) - rows[-1].wall_s > _quiet_max_s(machine):
        return 0.0
    duration_s = sum(row.duration_s for row in rows)
    if len(rows) > 1 and rows[-1].wall_s > rows[0].wall_s:
        # With delayed updates steps overlap, so durations would count time twice.
        return round(sum(row.tokens for row in rows[1:]) / (rows[-1].wall_s - rows[0].wall_s), 3)
    return round(sum(row.tokens for row in rows) / duration_s, 3) if duration_s > 0 else 0.0


def build_stages(machine: CoordinatorMachine) -> list[dict[str, Any]]:
    plan = machine.placement.plan
    if plan is None:
        return []
    volunteers = machine.roster.volunteers()
    shown = []
    for index, stage in enumerate(plan.stages):
        crew = [member for member in volunteers if member.stage == index]
        shown.append(
            {
                "stage": index,
                "first_block": min(chunk.first_block for chunk in plan.course.chunks if chunk.stage == index),
                "end_block": max(chunk.end_block for chunk in plan.course.chunks if chunk.stage == index),
                "chunks": [
                    [plan.course.chunks[number].first_block, plan.course.chunks[number].end_block]
                    for number in plan.course.chunks_of(index)
                ],
                "blocks": stage_blocks(machine.config, plan.course, index),
                "servers": [
                    {
                        "id": server.node,
                        "role": server.role,
                        "shard": shard,
                        "addresses": list(server.addresses),
                        "linked": server.node in machine.roster,
                    }
                    for shard, server in enumerate(stage.servers)
                ],
                "volunteers": len(crew),
                "tokens_per_s": sum(member.join.tokens_per_s for member in crew if member.join is not None),
            }
        )
    return shown


def _away(machine: CoordinatorMachine, now: float) -> list[dict[str, Any]]:
    """Servers of the plan without a link: their places are kept for them until the run is finished."""
    table = machine.placement.table
    if machine.finished:
        return []
    return [
        {
            "id": table.holder[slot],
            "role": "server",
            "stage": slot[0],
            "shard": slot[1],
            "place": table.name(slot),
            "name": machine.naming.of(table.holder[slot]),
            "away_s": round(now - since, 3),
        }
        for slot, since in sorted(table.gone_since.items())
    ]


def _member(machine: CoordinatorMachine, member: Member, now: float) -> dict[str, Any]:
    slot = machine.placement.table.slot_of(member.peer) if member.role == "server" else None
    report = member.report
    return {
        "id": member.peer,
        "name": machine.naming.of(member.peer),
        "role": member.role,
        "stage": slot[0] if slot else member.stage,
        "shard": slot[1] if slot else -1,
        "place": machine.placement.table.name(slot) if slot else member.stage_reason,
        "state": member.state,
        "waiting_for": report.waiting_for if report else "",
        "alert": report.alert if report else "",
        "counters": dict(report.counters) if report else {},
        "report_age_s": round(now - member.report_at, 3) if report else None,
        "tokens_per_s": member.join.tokens_per_s if member.join else 0.0,
        # Of what a volunteer's device and line promised, by the ledgers' count against its fellows; 1: nothing known.
        "delivers": round(machine.crew.delivered.share(member.peer), 3),
        "since_s": round(now - member.linked_at, 3),
        "links": [
            {
                "peer": peer,
                "path": heard.figures.path,
                "round_trip_s": heard.figures.round_trip_s if heard.figures.round_trip_s >= 0 else None,
                "loss": heard.figures.loss if heard.figures.loss >= 0 else None,
                "sent_bytes_per_s": heard.figures.sent_bytes_per_s,
                "received_bytes_per_s": heard.figures.received_bytes_per_s,
                "age_s": round(heard.age_s(now), 3),
                "spread": heard.figures.spread,
            }
            for peer, heard in machine.network.links_of(member.peer).items()
        ],
    }
