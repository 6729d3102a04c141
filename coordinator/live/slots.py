"""The places of servers: which node answers for which shard, and when a run must go back to a checkpoint.

A slot is (stage, shard); a node keeps its slot across broken links and restarts, because the shard's parameters and
moments lie on its disk. Everything here is pure bookkeeping: no messages, no clock of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.live.gray import stalled_s
from coordinator.live.records import Voiding
from coordinator.live.roster import Member
from protocol.base.ids import NodeId
from protocol.messages import Join
from protocol.run.buddies import buddy_place
from protocol.run.plan import Plan, ServerPlan
from protocol.run.run import LimitsSection, StagesSection

Slot = tuple[int, int]
"""(stage, shard); shards of a stage are its front servers first, then its back servers."""


def slot_name(slot: Slot, stages: StagesSection) -> str:
    """`stage 1 back 0`, for people."""
    stage, shard = slot
    if stages.back_servers == 0:
        return f"stage {stage} server {shard}"
    if shard < stages.front_servers:
        return f"stage {stage} front {shard}"
    return f"stage {stage} back {shard - stages.front_servers}"


def holds_state(
    member: Member, slot: Slot, ledger_generation: int, newest_step: int, was_told_long_ago: bool = False
) -> bool:
    """Whether the disk of a server that has joined has the shard of `slot` as the present ledgers left it.

    A step is reported only after every shard has made version step + 1 durable, so an older one is a disk that lost
    something or was restored from a copy.
    """
    join = join_of(member)
    if not was_told_long_ago:
        newest_step = member.must_know(ledger_generation, newest_step)
    return (
        (join.stage, join.shard) == slot
        and join.held_generation == ledger_generation
        and join.version >= max(0, newest_step + 1)
    )


class SlotTable:
    """Which node each slot belongs to, whether or not it is linked at the moment."""

    def __init__(self, stages: StagesSection, plan: Plan | None = None) -> None:
        self.stages = stages
        shard_count = self.shard_count = stages.front_servers + stages.back_servers
        self.slots: tuple[Slot, ...] = tuple(
            (stage, shard) for stage in range(stages.count) for shard in range(shard_count)
        )
        self.holder: dict[Slot, NodeId] = {}
        self._slot_of: dict[NodeId, Slot] = {}
        """The same the other way round: asked of every member that is looked at."""
        self.gone_since: dict[Slot, float] = {}
        """Slots in the plan whose holder has no link, and since when."""
        self.alike: tuple[int, ...] = ()
        """Ledgers before the present ones that began with the same version of the same others, and came no further:
        what servers have of it by their names is as good. After a restart nobody knows of any."""
        if plan is not None:
            for slot in self.slots:
                self.bind(slot, plan.stages[slot[0]].servers[slot[1]].node)

    def slot_of(self, node: NodeId) -> Slot | None:
        """The slot that belongs to `node`."""
        return self._slot_of.get(node)

    def bind(self, slot: Slot, node: NodeId) -> None:
        if slot in self.holder:
            self._slot_of.pop(self.holder[slot], None)
        self.holder[slot] = node
        self._slot_of[node] = slot
        self.gone_since.pop(slot, None)

    def release(self, slot: Slot) -> None:
        if slot in self.holder:
            self._slot_of.pop(self.holder.pop(slot), None)
        self.gone_since.pop(slot, None)

    def begin(self, before: Plan | None, plan: Plan) -> None:
        """A plan comes into force after another."""
        if before is None or before.ledger_generation == plan.ledger_generation:
            return
        same = (before.continues, before.restore_step) == (plan.continues, plan.restore_step)
        self.alike = (*self.alike, before.ledger_generation) if same and plan.continues >= 0 else ()

    def has_shard(self, member: Member, slot: Slot, plan: Plan | None, newest_step: int) -> bool:
        """Whether a server's disk has what the shard of `slot` is now: where the plan's ledgers have closed nothing,
        what they began with is as good."""
        if plan is None or member.join is None:
            return False
        begins = newest_step < plan.restore_step and _holds_beginning(member.join, slot, plan, self.alike)
        return begins or holds_state(member, slot, plan.ledger_generation, newest_step, was_told_long_ago=True)

    def spare_for(
        self, slot: Slot, spares: Sequence[Member], plan: Plan | None, newest_step: int, now: float
    ) -> NodeId | None:
        """Who takes a place that is empty, or whose holder is here without what it had: then only who has that."""
        for member in spares:
            if self.has_shard(member, slot, plan, newest_step) and not stalled_s(member, now):
                return member.peer
        return spares[0].peer if spares and slot not in self.holder else None

    def empty(self) -> list[Slot]:
        """Slots that belong to nobody, in order."""
        return [slot for slot in self.slots if slot not in self.holder]

    def name(self, slot: Slot) -> str:
        return slot_name(slot, self.stages)

    def names(self, slots: Sequence[Slot], most: int = 4) -> str:
        """With their holders, of the first ones: for a sentence."""
        named = [f"{self.name(slot)} ({self.holder[slot][:8]})" for slot in slots[:most]]
        return ", ".join(named) + (f" and {len(slots) - most} more" if len(slots) > most else "")

    def servers(self, linked: Mapping[NodeId, Member], plan: Plan | None) -> tuple[tuple[ServerPlan, ...], ...]:
        """What the plan's stages would be now; a holder without a link keeps the addresses of the plan."""
        placed: list[list[ServerPlan]] = [[] for _ in range(self.stages.count)]
        for stage, shard in self.slots:
            node = self.holder[(stage, shard)]
            member = linked.get(node)
            if member is not None and member.join is not None:
                addresses = member.addresses
            else:
                assert plan is not None, "a plan needs every first holder linked"
                addresses = plan.addresses_of(node)
            role: Literal["front", "back", "both"] = "front" if shard < self.stages.front_servers else "back"
            if self.stages.back_servers == 0:
                role = "both"
            placed[stage].append(ServerPlan(node=node, role=role, addresses=addresses))
        return tuple(tuple(servers) for servers in placed)

    def check(self) -> None:
        """Raises if an invariant is broken."""
        holders = list(self.holder.values())
        assert len(set(holders)) == len(holders), "a node holds two slots"
        assert self._slot_of == {node: slot for slot, node in self.holder.items()}, "who holds what, does not agree"
        assert all(slot in self.slots for slot in self.holder), "a slot outside the run is held"
        assert all(slot in self.holder for slot in self.gone_since), "an empty slot is waited for"


@dataclass(frozen=True, slots=True)
class Review:
    """What the servers' places ask for now."""

    kind: Literal["wait", "keep", "issue", "go_back"]
    sentence: str
    restore_step: int = -1
    """For `go_back`: the checkpoint that every server can read, or -1 for the seed."""
    undone: bool = False
    """For `go_back`: what was trained since comes out otherwise, so later checkpoints are none."""
    voiding: Voiding | None = None
    """For `go_back`: whose work is undone."""
    lost: tuple[Slot, ...] = ()
    """Slots whose holder is linked but has no usable state; they must not be sent the present plan."""
    continues: int = -1
    """For `go_back`: the ledgers whose version `restore_step` servers still hold, those of lost slots by their buddies;
    -1: it is a checkpoint's."""
    unread: bool = False
    """For `wait`: the run could go back, were a checkpoint that some read not hidden from others."""


COPIED_SHARE = 0.25
"""Of the time in which a server may come back, where its buddy has all that it has committed: to give its place away
costs open steps then, and no closed one. 30 of the usual 120 s are three starts of a server."""
NOT_BACK = Review("keep", "")
"""What a plan comes of that goes on with the same ledgers, or begins the first."""


def review(
    table: SlotTable,
    linked: Mapping[NodeId, Member],
    plan: Plan | None,
    given: Mapping[Slot, bool],
    newest_step: int,
) -> Review:
    """Compares the slots with the plan in force.

    Args:
        linked: welcomed servers by node.
        given: slots whose holder was ever sent the present ledger generation; if it was not, it cannot have lost
            anything and starts where the plan says.
        newest_step: newest closed step of the present ledger generation, -1 for none.
    """
    empty = table.empty()
    absent = [slot for slot, node in table.holder.items() if node not in linked]
    lost = () if plan is None else _lost_slots(table, linked, plan, given, newest_step)
    if empty:
        names = ", ".join(table.name(slot) for slot in empty)
        return Review("wait", f"waiting for {_count(len(empty), 'more server')}: {names}", lost=lost)
    if plan is None or lost:
        if absent:
            names = ", ".join(table.name(slot) for slot in sorted(absent))
            return Review("wait", f"waiting for {_count(len(absent), 'server')} to come back: {names}", lost=lost)
        if plan is None:
            return Review("issue", "all servers are here")
        joins = [join_of(linked[table.holder[slot]]) for slot in table.slots]
        restore_step = common_checkpoint(joins, undone_after(plan, newest_step))
        names = ", ".join(table.name(slot) for slot in lost)
        sentence, version = f"the state of {names} is lost", copied_version(table, linked, plan, lost)
        if version > max(restore_step, newest_step):
            sentence += f", and {_holders(table, linked, plan, lost, version)} version {version} of it"
            return Review("go_back", sentence, version, lost=lost, continues=plan.ledger_generation)
        if plan.restore_step > max(restore_step, newest_step) and _can_begin_again(table, linked, plan):
            sentence += f", and all have version {plan.restore_step}, with which these ledgers began"
            return Review("go_back", sentence, plan.restore_step, lost=lost, continues=plan.continues)
        return Review("go_back", sentence, restore_step=restore_step, lost=lost)
    if table.servers(linked, plan) != tuple(stage.servers for stage in plan.stages):
        return Review("issue", "a server changed its address or took over a disk")
    if absent:
        names = ", ".join(table.name(slot) for slot in sorted(absent))
        return Review("keep", f"no link to {names}")
    return Review("keep", "")


def _lost_slots(
    table: SlotTable, linked: Mapping[NodeId, Member], plan: Plan, given: Mapping[Slot, bool], newest_step: int
) -> tuple[Slot, ...]:
    lost = []
    for slot in table.slots:
        member = linked.get(table.holder.get(slot, NodeId("")))
        if member is None:
            continue
        join = join_of(member)
        holds = join.stage, join.shard, join.held_generation, join.version
        if holds == (*slot, plan.ledger_generation, -1) and newest_step < plan.restore_step:
            # It fetches what these ledgers begin with, from a buddy that may be gone.
            if not _can_begin(table, linked, slot, plan, table.alike):
                lost.append(slot)
            continue
        if member.told_ledger == plan.ledger_generation:
            continue
        starts_fresh = not given.get(slot, False) and _can_begin(table, linked, slot, plan, table.alike)
        if not starts_fresh and not holds_state(member, slot, plan.ledger_generation, newest_step):
            lost.append(slot)
    return tuple(lost)


def _can_begin(table: SlotTable, linked: Mapping[NodeId, Member], slot: Slot, plan: Plan, alike: Sequence[int]) -> bool:
    """Whether the holder of a slot finds what the plan's ledgers begin with."""
    join, step = join_of(linked[table.holder[slot]]), plan.restore_step
    if plan.continues < 0:
        return step == -1 or step in join.checkpoints
    generations = (plan.continues, *alike, plan.ledger_generation)
    copied = any(step in copies_of(table, linked, slot, generation) for generation in generations)
    return copied or _holds_beginning(join, slot, plan, alike)


def _can_begin_again(table: SlotTable, linked: Mapping[NodeId, Member], plan: Plan) -> bool:
    """Whether every holder has, or finds, the version of other ledgers that the plan's began with: these have closed
    nothing, and others go on from there once more."""
    alike = (*table.alike, plan.ledger_generation)
    return plan.continues >= 0 and all(_can_begin(table, linked, slot, plan, alike) for slot in table.slots)


def _holds_beginning(join: Join, slot: Slot, plan: Plan, alike: Sequence[int]) -> bool:
    """Whether a server's disk has the shard of `slot` as the ledgers left it that the plan's go on from."""
    there = (join.stage, join.shard) == slot and join.held_generation in (plan.continues, *alike)
    return plan.continues >= 0 and there and join.version >= plan.restore_step


def copies_of(table: SlotTable, linked: Mapping[NodeId, Member], slot: Slot, generation: int) -> tuple[int, ...]:
    """Versions of the ledgers of `generation` of which the buddy of a slot says that it has the slot's shard whole; or
    the holder itself, which has given up the state of these ledgers but for that."""
    buddy = buddy_place(*slot, [table.shard_count] * table.stages.count)
    versions: dict[int, None] = {}
    for place in (slot, *(() if buddy is None else (buddy,))):
        versions |= dict.fromkeys(copies_held(table, linked, place, slot, generation))
    return tuple(versions)


def copies_held(
    table: SlotTable, linked: Mapping[NodeId, Member], place: Slot, slot: Slot, generation: int
) -> tuple[int, ...]:
    """Versions of the shard of `slot` that the holder of `place` says it has whole."""
    member = linked.get(table.holder.get(place, NodeId("")))
    if member is None or member.join is None:
        return ()
    return tuple(version for *of, version, ledgers in member.join.copies if (*of, ledgers) == (*slot, generation))


def gone_s(
    table: SlotTable,
    linked: Mapping[NodeId, Member],
    slot: Slot,
    plan: Plan | None,
    newest_step: int,
    limits: LimitsSection,
) -> float:
    """How long the holder of a slot may be away before a spare has its place."""
    versions = () if plan is None else copies_of(table, linked, slot, plan.ledger_generation)
    return limits.server_gone_s * (COPIED_SHARE if any(version > newest_step for version in versions) else 1.0)


def copied_version(table: SlotTable, linked: Mapping[NodeId, Member], plan: Plan, lost: Sequence[Slot]) -> int:
    """The newest version that the present ledgers have made and every shard can still show, or -1: whoever is not lost
    by itself, and who is by its buddy. Each shard then has all that came before, so nothing of it is mixed."""
    found: set[int] | None = None
    newest = math.inf
    for slot in table.slots:
        if slot in lost:
            versions = set(copies_of(table, linked, slot, plan.ledger_generation))
            found = versions if found is None else found & versions
            continue
        join = join_of(linked[table.holder[slot]])
        if (join.stage, join.shard, join.held_generation) != (*slot, plan.ledger_generation):
            return -1
        newest = min(newest, join.version)
    return max((version for version in found or () if version <= newest), default=-1)


def _holders(table: SlotTable, linked: Mapping[NodeId, Member], plan: Plan, lost: Sequence[Slot], version: int) -> str:
    """Who has what is lost, as the subject of a sentence: buddies, or the holders themselves."""
    places: list[Slot | None] = []
    for slot in lost:
        by_itself = version in copies_held(table, linked, slot, slot, plan.ledger_generation)
        places.append(slot if by_itself else buddy_place(*slot, [table.shard_count] * table.stages.count))
    names = list(dict.fromkeys(table.name(place) for place in places if place is not None))
    return f"{' and '.join(names)} still {'has' if len(names) == 1 else 'have'}"


def common_checkpoints(joins: Sequence[Join], most: float = math.inf) -> list[int]:
    """Checkpoint steps that every server names as readable, up to `most`, oldest first."""
    named = joins[0].checkpoints
    return sorted({step for step in named if step <= most and all(step in join.checkpoints for join in joins)})


def common_checkpoint(joins: Sequence[Join], most: float = math.inf) -> int:
    """The newest of these, or -1."""
    return max(common_checkpoints(joins, most), default=-1)


def undone_after(plan: Plan, newest_step: int) -> float:
    """Checkpoints of later steps are none, whoever still names them: what led to them is undone, and the ledgers since
    have come no further. A server takes such files away when it begins under the plan."""
    return max(plan.restore_step, newest_step + 1) if plan.undone else math.inf


def join_of(member: Member) -> Join:
    assert member.join is not None, "a welcomed member has joined"
    return member.join


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
