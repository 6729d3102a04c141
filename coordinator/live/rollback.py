"""The operator's way back: which checkpoints a run can be sent back to, and what becomes of its changes.

A run also goes back by itself, when a shard is lost; then it does the same steps again, with the same changes. An
operator goes back because of what these steps came to, so changes that began in steps that are thrown away go with
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from coordinator.live.history import History, first_step_after
from coordinator.live.outbox import Outbox
from coordinator.live.records import GoBackWish, StepRow
from coordinator.live.roster import Member
from coordinator.live.slots import Review, common_checkpoints
from protocol.messages import Join
from protocol.run.changes import RunChange
from protocol.run.keeping import kept_steps
from protocol.run.run import GuardSection, RunConfig

SPIKE_STEPS = 20
"""Steps before one that its loss is compared with; a spike is judged when there are so many."""


BY_ORDER = "the operator goes back"


def review_of(wish: GoBackWish) -> Review:
    """What the servers' places ask for then."""
    return Review("go_back", wish.cause, restore_step=wish.step, undone=True, voiding=wish.voiding)


def readable_steps(joins: Sequence[Join], config: RunConfig, most: float = math.inf) -> tuple[int, ...]:
    """Checkpoints that every server names, newest first: those that are kept, up to `most`. Older names are of files
    gone."""
    common = common_checkpoints(joins)
    kept = kept_steps(common, config) if common else ()
    return tuple(step for step in reversed(common) if step in kept and step <= most)


def why_not(step: int, readable: Sequence[int]) -> str:
    """A sentence when no checkpoint has the step, or nothing."""
    if step in readable or step == -1:
        return ""
    if not readable:
        return "there is no checkpoint yet that every server can read: the run goes on"
    names = [str(each) for each in sorted(readable)]
    listed = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    one = len(names) == 1
    return (
        f"no checkpoint has step {step}; there {'is one' if one else 'are those'} of step{'' if one else 's'} {listed}"
    )


def unreported(servers: Iterable[Member], generation: int, restore_step: int) -> int:
    """Closed steps after a checkpoint, as the servers of the ledgers of `generation` count them: also those whose
    reports never came, because the decider's link to us was broken."""
    reports = [member.report for member in servers if member.report is not None]
    counted = [r.counters.get("step", -1.0) for r in reports if r.ledger_generation == generation]
    return int(max(counted, default=-1.0)) + 1 - first_step_after(restore_step)


def went_back(history: History, outbox: Outbox, restore_step: int, lost_steps: int, cause: str) -> None:
    """A plan that throws steps away is in force."""
    last = history.newest_step
    history.go_back(restore_step, lost_steps)
    if lost_steps:
        outbox.count("barnraise_run_bad_steps_total", lost_steps, run=history.config.name, reason="rolled_back")
    outbox.log(
        "warning", "run goes back", cause=cause, restore_step=restore_step, lost_steps=lost_steps,
        first_lost=history.newest_step + 1, last_lost=last,
    )  # fmt: skip


def changes_before(changes: Sequence[RunChange], step: int) -> tuple[RunChange, ...]:
    """Those in force in the steps before `step`."""
    return tuple(change for change in changes if 0 <= change.from_step < step)


def guarded(guard: GuardSection, row: StepRow, before: Sequence[StepRow]) -> tuple[str, str]:
    """(what the operator wants done about a step, why): `pause`, `rollback`, or nothing.

    Args:
        before: steps that count, oldest first, without this one.
    """
    if row.skipped and guard.not_finite != "skip":
        return guard.not_finite, f"the gradient of step {row.step + 1} was not finite"
    losses = [each.loss for each in list(before)[-SPIKE_STEPS:] if not each.skipped]
    if not guard.spike or len(losses) < SPIKE_STEPS:
        return "", ""
    usual = sum(losses) / len(losses)
    if row.loss <= guard.spike * usual:
        return "", ""
    return guard.on_spike, f"the loss of step {row.step + 1}, {row.loss:.3f}, is over {guard.spike:g} times {usual:.3f}"
