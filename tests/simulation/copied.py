"""Judges buddies: where copies of all that was lost are held, a run goes on from them, and no closed step is lost."""

from __future__ import annotations

from typing import Any

from node.machine.records import ShardStarted, SnapshotWritten, StepCommitted
from protocol.base.ids import NodeId
from protocol.messages import CopyKept, Join, Message, ShardCopy
from protocol.run.plan import Plan
from tests.simulation.host import Host
from tests.simulation.violation import expect
from tests.simulation.world import World

COPIES_OF_A_SERVER = 8
"""Of two shards the versions that may be open at once: with a delay three, and one that is just being closed."""
SURELY_JOINED_S = 2.0
"""A server that runs for so long has told the coordinator what is on its disk."""


class Copied:
    """What buddies have said that they hold, and who could begin anew from its own disk.

    Args:
        on: whether the run wants copies, and has servers to keep them.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._sent: dict[tuple[int, NodeId, int], tuple[int, int, int]] = {}
        """(generation, whose, version) -> stage, shard, and how many pieces there are."""
        self._held: dict[tuple[int, int, int, int], tuple[NodeId, int]] = {}
        """(generation, stage, shard, version) -> who has it whole, and in which of its lives."""
        self._written: dict[tuple[int, NodeId], None] = {}
        """Who has something of these ledgers on its disk."""
        self._begun_from: dict[tuple[int, NodeId], int] = {}
        """Who has nothing of them but the word that it begins from a checkpoint, and which."""

    def said(self, host: Host, peer: NodeId, message: Message) -> None:
        if isinstance(message, Join):
            few = len(message.copies) <= COPIES_OF_A_SERVER
            expect(few, "L3", f"{host.node} still holds {message.copies}")
        if isinstance(message, ShardCopy):
            key = message.ledger_generation, host.node, message.version
            self._sent[key] = message.stage, message.shard, message.pieces
        elif isinstance(message, CopyKept):
            generation, version = message.ledger_generation, message.version
            stage, shard, pieces = self._sent[generation, peer, version]
            if message.piece == pieces - 1:
                self._held[generation, stage, shard, version] = host.node, host.life

    def durable(self, host: Host, record: Any) -> None:
        # What it begins with is in memory alone, unless its disk has it of the ledgers before.
        fetched = isinstance(record, ShardStarted) and record.continues >= 0
        fetched = fetched and (record.continues, host.node) not in self._written
        if isinstance(record, ShardStarted | SnapshotWritten | StepCommitted) and not fetched:
            key = record.ledger_generation, host.node
            self._written[key] = None
            if isinstance(record, SnapshotWritten):
                self._begun_from.pop(key, None)
            elif isinstance(record, ShardStarted) and record.checkpoint_step >= 0 and record.continues < 0:
                self._begun_from[key] = record.checkpoint_step

    def closed(self, plan: Plan, step: int) -> None:
        """A step is closed: every shard's new version lies on two servers."""
        for stage, placed in enumerate(plan.stages) if self._on else ():
            for shard in range(len(placed.servers)):
                held = (plan.ledger_generation, stage, shard, step + 1) in self._held
                expect(held, "B2", f"step {step} is closed, and no buddy has version {step + 1} of {stage}/{shard}")

    def went_back(
        self, world: World, before: Plan, plan: Plan, closed: int, versions: dict[tuple[int, int, int], int]
    ) -> None:
        """Other ledgers begin; `closed` is the newest step that those of `before` have closed, and `versions` what is
        durable by generation, stage and shard."""
        if plan.continues >= 0:
            for stage, placed in enumerate(plan.stages):
                for shard in range(len(placed.servers)):
                    key, version = (before.ledger_generation, stage, shard), plan.restore_step
                    newest = versions.get(key, max(0, before.restore_step))
                    expect(newest >= version, "B3", f"on from version {version}, and {stage}/{shard} is at {newest}")
        lost = [
            (stage, shard)
            for stage, placed in enumerate(before.stages)
            for shard, server in enumerate(placed.servers)
            if plan.stages[stage].servers[shard].node != server.node or not self._is_whole(world, before, server.node)
        ]
        expect(bool(lost) or not self._on, "B4", "other ledgers begin, and nobody has lost anything")
        holders = [self._held.get((before.ledger_generation, *slot, closed + 1)) for slot in lost]
        here = [
            held is not None and (host := world.hosts[held[0]]).machine is not None and host.life == held[1]
            for held in holders
        ]
        # Before any step is closed the seed is as good as a copy of version 0, and either loses the same open steps.
        if (
            self._on
            and closed >= 0
            and all(here)
            and all(held is not None and held[0] in plan.server_nodes() for held in holders)
        ):
            named = ", ".join(f"{stage}/{shard}" for stage, shard in lost) or "all that is lost, which is nothing"
            goes_on = plan.restore_step > closed
            expect(goes_on, "B1", f"back to {plan.restore_step}: buddies have version {closed + 1} of {named}")

    def nobody_has(self, world: World, before: Plan) -> bool:
        """Whether two computers went before a third had what both held: the ledgers of `before` went on from a copy in
        memory, its holder ended before the newcomer had it on its disk, and no server that has joined has it on its."""
        if before.continues < 0:
            return False
        for stage, placed in enumerate(before.stages):
            for shard, server in enumerate(placed.servers):
                held = self._held.get((before.continues, stage, shard, before.restore_step))
                copied = held is not None and world.hosts[held[0]].life == held[1]
                written = (before.ledger_generation, server.node) in self._written
                joined = [each for each in world.hosts.values() if world.now - each.started_at >= SURELY_JOINED_S]
                disks = [each for each in joined if each.machine is not None and not (each.paused or each.hung)]
                if not (copied or written or any(_has_beginning(each, stage, shard, before) for each in disks)):
                    return True
        return False

    def _is_whole(self, world: World, before: Plan, node: NodeId) -> bool:
        host, key = world.hosts[node], (before.ledger_generation, node)
        well = not host.gone and (host.emptied or not host.harmed)
        # Until there is a snapshot, what it has is the checkpoint, and the weather may have taken that.
        begun_from = self._begun_from.get(key, -1)
        can_begin = begun_from == -1 or begun_from in world.shared.whole()
        return well and key in self._written and can_begin

    def disk_lost(self, host: Host) -> None:
        self._written = {key: None for key in self._written if key[1] != host.node}


def _has_beginning(host: Host, stage: int, shard: int, plan: Plan) -> bool:
    """Whether a disk has the version of a shard that the plan's ledgers went on from, as those before them left it."""
    starts = [record for record, _ in host.records if isinstance(record, ShardStarted)]
    return any(
        (start.ledger_generation, start.stage, start.shard) == (plan.continues, stage, shard) for start in starts
    )
