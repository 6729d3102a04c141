"""Before steps are thrown away every server looks which checkpoints it can read, after the loss was known.

    a loss ─▶ all places look ─▶ all have answered ─▶ they name the same ─▶ the run goes back
                     ▲                                  └─ one cannot read what another can: it waits, all look again

Going back throws steps away, as far as the newest checkpoint that all have named. A server that waited as a spare was
told of none, and one whose link is cut without a sign may have named a newer one that never arrived; the answer comes
after all that it said, or its link ends and it joins anew.

Where all servers write to one place (`checkpoint.shared`) all see the same there. Who sees less looks elsewhere: the
folder is not mounted on a spare, or it may not read it. The run must not go back to its seed for that. A spare that can
read it takes the place of one that cannot; else the run waits until its folder is there, or for the operator's word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from coordinator.live.gray import is_well
from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member
from coordinator.live.slots import Review, Slot, SlotTable
from protocol.base.ids import NodeId

LOOK_AGAIN_S = 5.0
"""Between two looks of who sees less. A checkpoint that was written or deleted between the looks of two servers is seen
by both the next time; a person who mounts a folder waits no longer than that."""


class LookFirst:
    """Asks, and waits. One question at a time."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._asked_at: float | None = None
        self._less = ""
        """Who sees less, by the last look."""

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for the answers."""
        return self._asked_at is not None

    def forget(self) -> None:
        """Nobody needs the answers any more."""
        self._asked_at, self._less = None, ""

    def ask(self, verdict: Review, linked: Mapping[NodeId, Member], now: float, table: SlotTable) -> Review:
        """The verdict, once every holder of a place has looked and answered; until then to wait for who has not."""
        if self._asked_at is None:
            self._asked_at = now
        silent = self._send(self._asked_at, linked, now, table)
        if not silent:
            self._asked_at = None
            return verdict
        sentence = f"{verdict.sentence}; waiting for {table.names(silent)} to say which checkpoints can be read"
        return Review("wait", sentence, lost=verdict.lost)

    def ask_all_alike(
        self, verdict: Review, linked: Mapping[NodeId, Member], now: float, table: SlotTable, folder: str, most: float
    ) -> Review:
        """The same where all write to one place, `folder`: to wait as long as a server sees less there than another.

        Args:
            verdict: to go back to the newest checkpoint that all have named.
            most: checkpoints of later steps are none.
        """
        asked_at = now if self._asked_at is None else self._asked_at
        asked = self.ask(verdict, linked, now, table)
        if asked.kind == "wait":
            return replace(asked, sentence=self._less, unread=True) if self._less else asked
        newest, blind = seen_by_some(table, linked, most)
        if newest <= verdict.restore_step:
            self._less = ""
            return verdict
        readers = [slot for slot in table.slots if slot not in blind]
        self._less = (
            f"{verdict.sentence}, and {table.names(blind)} cannot read checkpoint {newest} in {folder}, which "
            f"{table.names(readers, 1)} can: it is one folder for all servers, so it is not mounted or not open to all"
        )
        self._give_to_reader(newest, blind, asked_at, verdict, linked, now, table)
        self._asked_at = asked_at if now - asked_at < LOOK_AGAIN_S else now
        return Review("wait", self._less, lost=verdict.lost, unread=True)

    def _send(self, asked_at: float, linked: Mapping[NodeId, Member], now: float, table: SlotTable) -> list[Slot]:
        """Asks who was not asked yet; returns the places whose holders have not answered."""
        for member in [linked[table.holder[slot]] for slot in table.slots]:
            if member.look_sent_at < asked_at:
                self._outbox.send(member.peer, member.next_look(now))
        return [slot for slot in table.slots if linked[table.holder[slot]].looked_at < asked_at]

    def _give_to_reader(
        self,
        step: int,
        blind: list[Slot],
        asked_at: float,
        verdict: Review,
        linked: Mapping[NodeId, Member],
        now: float,
        table: SlotTable,
    ) -> None:
        """Gives a place whose state is lost, and whose holder cannot read the checkpoint, to a spare that can."""
        spares = [member for peer, member in linked.items() if table.slot_of(peer) is None and is_well(member, now)]
        for member in spares:
            if member.look_sent_at < asked_at:
                self._outbox.send(member.peer, member.next_look(now))
        can = [member for member in spares if member.join is not None and step in member.join.checkpoints]
        for slot, member in zip((slot for slot in blind if slot in verdict.lost), can, strict=False):
            before = table.holder[slot]
            table.release(slot)
            table.bind(slot, member.peer)
            self._outbox.log(
                "warning", "spare takes a place", node=member.peer, slot=table.name(slot),
                detail=f"{before[:8]} cannot read checkpoint {step}",
            )  # fmt: skip


def seen_by_some(table: SlotTable, linked: Mapping[NodeId, Member], most: float = math.inf) -> tuple[int, list[Slot]]:
    """The newest checkpoint up to step `most` that a holder of a place names, or -1; and the places whose do not."""
    named = {slot: _named(linked[table.holder[slot]]) for slot in table.slots}
    newest = max((step for steps in named.values() for step in steps if step <= most), default=-1)
    return newest, [slot for slot, steps in named.items() if newest not in steps]


def _named(member: Member) -> tuple[int, ...]:
    return () if member.join is None else member.join.checkpoints
