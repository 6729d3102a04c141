"""Changes that all servers must know before a step opens: which step that is, and when the run may go on.

    ordered ─▶ a plan that is held ─▶ all open steps closed, all servers have it ─▶ the next step is theirs
            ─▶ a plan that is held and says so ─▶ all servers have it ─▶ a plan that is not held

Stage 0 opens no step of a held plan, so the newest step that it has closed is the boundary. It costs the run what is
left of the open steps and three plans; whoever is not linked is waited for, as for every step. Nothing of it is kept
but the plan: a coordinator that comes back reads there how far it was.

A stage 0 that has started anew under the held plan does not open again what its life before may have opened. Others
may have such a step open, with data and tasks of before: the changes count from behind it, and it is done first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from protocol.messages import NodeReport
from protocol.run.changes import LAYOUT, RunChange, in_order
from protocol.run.plan import Plan


def all_have(plan: Plan, reports: Sequence[NodeReport | None]) -> bool:
    """Whether every server has said that it goes by this plan; `reports` are the newest of its servers."""
    return all(
        report is not None
        and report.ledger_generation == plan.ledger_generation
        and report.counters.get("generation", -1.0) >= plan.generation
        for report in reports
    )


def boundary(reports: Sequence[NodeReport | None]) -> int | None:
    """The first step that is not open anywhere; None before that can be said."""
    deciders = [report for report in reports if report is not None and "opened" in report.counters]
    if len(deciders) == 1 and (reached := deciders[0].counters.get("reached", -1.0)) > deciders[0].counters["opened"]:
        return int(reached) + 1
    return closed_up_to(reports)


def closed_up_to(reports: Sequence[NodeReport | None]) -> int | None:
    """The first step that stage 0 has not opened, once all others are closed everywhere; None before that."""
    counters = [report.counters for report in reports if report is not None]
    closed = {counted.get("step", -1.0) for counted in counters}
    opened = {counted["opened"] for counted in counters if "opened" in counted}
    return int(opened.pop()) + 1 if len(opened) == 1 and closed == opened else None


def begun_at(changes: Sequence[RunChange], step: int) -> tuple[tuple[RunChange, ...], tuple[RunChange, ...]]:
    """(the list with this step for all that had none up to the last pending one, changes that come too late).

    No step is decided meanwhile, so those before a pending one count from the same step on. A run that has gone back
    does steps again with what had changed in them, at the same steps: what is ordered then counts from the last of
    these on, or the older change would undo the newer one. Only a layout begins with its ledgers, which is now. A run
    that has done as many steps as it now is to have would end without its last checkpoint.
    """
    first = max([step, *(change.from_step for change in changes)])
    late = tuple(
        change for change in changes if change.is_pending and change.key == "steps" and int(change.value) <= first
    )
    kept = [change for change in changes if change not in late]
    last = max((number for number, change in enumerate(kept) if change.is_pending), default=-1)
    found = [
        msgspec.structs.replace(change, from_step=step if change.key == LAYOUT else first)
        if number <= last and change.from_step < 0
        else change
        for number, change in enumerate(kept)
    ]
    return in_order(found), late
