"""Before steps are thrown away every server looks which checkpoints it can read, after the loss was known.

    a loss ─▶ all places look ─▶ all have answered ─▶ all see the folder ─▶ the run goes back
                     ▲                                  └─ one sees nothing of it: it waits, all look again

Going back throws steps away, as far as the newest checkpoint that all have named. A server that waited as a spare was
told of none, and one whose link is cut without a sign may have named a newer one that never arrived; the answer comes
after all that it said, or its link ends and it joins anew.

Where all servers write to one place (`checkpoint.shared`) all see the same there, but for what one has found damaged
(`node/compute/doubts.py`). Who names nothing of what the others name looks elsewhere: the folder is not mounted on a
spare, or it may not read it. The run must not go back to its seed for that. A spare that sees it takes the place of one
that does not; else the run waits until its folder is there, or for the operator's word.
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
        self._about = ""
        """What the open question is asked for: answers to one say nothing to another, of a later moment."""
        self._asked_at: float | None = None
        self._blind = ""
        """Who does not see the folder, by the last look."""

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for the answers."""
        return self._asked_at is not None

    def forget(self) -> None:
        """Nobody needs the answers any more."""
        self._asked_at, self._blind = None, ""

    def ask(
        self, verdict: Review, linked: Mapping[NodeId, Member], now: float, table: SlotTable, about: str = "a loss"
    ) -> Review:
        """The verdict, once every holder of a place has looked and answered; until then to wait for who has not."""
        if about != self._about:
            self.forget()
            self._about = about
        if self._asked_at is None:
            self._asked_at = now
        for member in [linked[table.holder[slot]] for slot in table.slots]:
            if member.look_sent_at < self._asked_at:
                self._outbox.send(member.peer, member.next_look(now))
        silent = [slot for slot in table.slots if linked[table.holder[slot]].looked_at < self._asked_at]
        if not silent:
            self._asked_at = None
            return verdict
        sentence = f"{verdict.sentence}; waiting for {table.names(silent)} to say which checkpoints can be read"
        return Review("wait", sentence, lost=verdict.lost)

    def ask_in_one_place(
        self, verdict: Review, linked: Mapping[NodeId, Member], now: float, table: SlotTable, folder: str, most: float
    ) -> Review:
        """The same where all write to one place, `folder`: to wait as long as a server sees nothing of it.

        Args:
            verdict: a shard is lost, so to go back to the newest checkpoint that all have named.
            most: checkpoints of later steps are none.
        """
        asked_at = now if self._asked_at is None else self._asked_at
        asked = self.ask(verdict, linked, now, table)
        if asked.kind == "wait":
            return replace(asked, unread=True) if self._blind else asked
        newest, readers, blind = who_sees(table, linked, asked_at, most)
        if newest <= verdict.restore_step or not blind:
            self._blind = ""
            return verdict
        others = f" and {len(readers) - 1} more" if len(readers) > 1 else ""
        self._blind = (
            f"{verdict.sentence}, and {table.names(blind)} cannot see checkpoint {newest} in {folder}, which "
            f"{readers[0].peer[:8]}{others} can: it is one folder for all servers, so it is not mounted there, or not "
            f"open to all"
        )
        self._give_to_reader(newest, blind, asked_at, verdict, linked, now, table)
        self._asked_at = asked_at if now - asked_at < LOOK_AGAIN_S else now
        return Review("wait", self._blind, lost=verdict.lost, unread=True)

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
        """Gives a place whose state is lost, and whose holder does not see the checkpoint, to a spare that has just
        seen it."""
        spares = [member for peer, member in linked.items() if table.slot_of(peer) is None and is_well(member, now)]
        for member in spares:
            if member.look_sent_at < asked_at:
                self._outbox.send(member.peer, member.next_look(now))
        can = [member for member in spares if member.looked_at >= asked_at and step in _named(member)]
        for slot, member in zip((slot for slot in blind if slot in verdict.lost), can, strict=False):
            before = table.holder[slot]
            table.release(slot)
            table.bind(slot, member.peer)
            self._outbox.log(
                "warning", "spare takes a place", node=member.peer, slot=table.name(slot),
                detail=f"{before[:8]} cannot see checkpoint {step}",
            )  # fmt: skip


def who_sees(
    table: SlotTable, linked: Mapping[NodeId, Member], asked_at: float, most: float = math.inf
) -> tuple[int, list[Member], list[Slot]]:
    """The newest checkpoint up to step `most` that a server names which has looked since `asked_at`, or -1; who names
    it; and the places whose holders name nothing of what these do. (A spare that hangs names what was there long ago.)
    """
    looked = [member for member in linked.values() if member.looked_at >= asked_at]
    newest = max((step for member in looked for step in _named(member) if step <= most), default=-1)
    readers = [member for member in looked if newest in _named(member)]
    seen = {step for member in readers for step in _named(member) if step <= most}
    return newest, readers, [slot for slot in table.slots if seen.isdisjoint(_named(linked[table.holder[slot]]))]


def _named(member: Member) -> tuple[int, ...]:
    return () if member.join is None else member.join.checkpoints
