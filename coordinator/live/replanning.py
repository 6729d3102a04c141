"""A running job in another layout: who sits where, and why it cannot be. `seating.py` does it.

    ordered ─▶ the plan is held ─▶ all open steps closed ─▶ a plan with `save`: everybody writes a checkpoint there
            ─▶ every old server names it, every new one says that it can read it ─▶ new ledgers, in the new layout

Nobody computes from the first of these plans to the last; no step is thrown away. Until the last one is durable the run
is as it was: a server that dies comes back to its place, and a coordinator that comes back reads in its plan how far it
was. Where the new layout has too few servers when it is due, or one that cannot read the checkpoint, it is given up and
the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.live.roster import Member
from coordinator.live.slots import Slot, SlotTable
from coordinator.live.wishes import Wishes
from protocol.base.ids import NodeId
from protocol.run.changes import changed
from protocol.run.plan import Plan
from protocol.run.run import RunConfig, StagesSection


def seated(stages: StagesSection, before: SlotTable, linked: Mapping[NodeId, Member]) -> SlotTable | None:
    """A place for each of the new layout, among those that are linked; None where they are too few.

    Who can stay where it is does, so the data is read where it was read; then come the others of the plan, then spares.
    """
    table = SlotTable(stages)
    for slot in table.slots:
        if (node := before.holder.get(slot)) in linked and node is not None:
            table.bind(slot, node)
    seated_already = dict.fromkeys(table.holder.values())
    order = [*(before.holder[slot] for slot in before.slots if slot in before.holder), *linked]
    waiting = [node for node in dict.fromkeys(order) if node in linked and node not in seated_already]
    for slot, node in zip(table.empty(), waiting, strict=False):
        table.bind(slot, node)
    return None if table.empty() else table


def too_few(stages: StagesSection, servers: int) -> str:
    """A sentence when so many servers cannot fill the layout, or nothing."""
    wanted = stages.count * (stages.front_servers + stages.back_servers)
    if servers >= wanted:
        return ""
    return (
        f"stages.count: {stages.count} stages of {stages.front_servers} front and {stages.back_servers} back servers"
        f" take {wanted} servers, and {servers} are here: start {wanted - servers} more"
    )


def due(
    plan: Plan, config: RunConfig, wishes: Wishes, before: SlotTable, linked: Mapping[NodeId, Member]
) -> SlotTable | None:
    """Who is to sit where in the ordered layout, once all that is before it is done and told; None: not yet. Gives the
    layout up where servers are too few for it by now."""
    if not wishes.lays_out or plan.save < 0 or not wishes.are_in(plan):
        return None
    decider = linked.get(plan.decider)
    told = decider is not None and decider.report is not None and not decider.report.counters.get("unreported", 1.0)
    if not told or lacking(before, linked, plan.save):
        return None
    stages = changed(config, wishes.changes).stages
    table = seated(stages, before, linked)
    if table is None:
        wishes.give_up_layout(too_few(stages, len(linked)))
    return table


def lacking(table: SlotTable, linked: Mapping[NodeId, Member], step: int) -> Sequence[NodeId]:
    """Servers of these places that have not said that they can read a checkpoint."""
    joins = {node: linked[node].join for node in _holders(table, linked)}
    return [node for node, join in joins.items() if join is None or step not in join.checkpoints]


def _holders(table: SlotTable, linked: Mapping[NodeId, Member]) -> list[NodeId]:
    return [table.holder[slot] for slot in table.slots if table.holder.get(slot) in linked]


def why_no_layout(
    config: RunConfig, wanted: RunConfig, table: SlotTable, linked: Mapping[NodeId, Member], lays_out: bool
) -> str:
    """A sentence when the run cannot be laid out as wanted, before anybody is held; or nothing.

    Args:
        lays_out: whether another layout is on its way.
    """
    absent: list[Slot] = [slot for slot in table.slots if table.holder.get(slot) not in linked]
    if not config.checkpoint.shared:
        return (
            "checkpoint.folder: each server keeps its parts to itself, and none could read another's; `run branch`"
            " begins a run with a folder that all servers share, and such a one can be laid out anew"
        )
    if lays_out:
        return "stages: another layout is on its way; `barnraise status` tells when it has begun"
    if absent:
        return f"stages: not while servers are missed: {', '.join(table.name(slot) for slot in absent)}"
    return too_few(wanted.stages, len(linked))
