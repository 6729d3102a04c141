"""Who takes a place that is empty, or whose holder is gone or hangs for too long: a server that waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.live.gray import Arbitration, is_well, seen_by_fellows, stalled_s
from coordinator.live.outbox import Outbox
from coordinator.live.roster import Member, Roster
from coordinator.live.slots import Slot, SlotTable, gone_s
from protocol.base.ids import NodeId
from protocol.run.plan import Plan
from protocol.run.run import LimitsSection


@dataclass(frozen=True)
class Situation:
    """The places, and what is known of the run.

    Args:
        newest: the newest closed step of the plan's ledgers.
        lost: places whose holder is there without the state.
        step_stored_at: when the newest step was stored: while steps close, holders work.
        news_at: when a step closed, by all that is heard.
    """

    table: SlotTable
    plan: Plan | None
    newest: int
    limits: LimitsSection
    lost: Sequence[Slot]
    step_stored_at: float
    news_at: float


class Spares:
    """Changes the table that it is shown."""

    def __init__(self, roster: Roster, outbox: Outbox) -> None:
        self._roster, self._outbox = roster, outbox
        self._seen_at: dict[Slot, float] = {}
        """When somebody was last linked with a holder that has no link to us."""
        self._arbitration = Arbitration()

    def called(self, found: Situation, now: float) -> Iterator[Slot]:
        """Gives places to servers that wait, and yields these places."""
        table = found.table
        linked = {member.peer: member for member in self._roster.servers()}
        spares = [peer for peer in linked if table.slot_of(peer) is None and _may_come(linked[peer], now)]
        for slot in table.slots:
            if not spares:
                return
            node = table.holder.get(slot)
            limit_s = gone_s(table, linked, slot, found.plan, found.newest, found.limits)
            if node is not None and self._hangs(node, linked, limit_s, found, now):
                self._outbox.log(
                    "warning", "server given up", node=node, slot=table.name(slot),
                    detail="it hangs while its fellows wait", stalled_s=round(stalled_s(linked[node], now), 1),
                )  # fmt: skip
                table.release(slot)
            gone_since = table.gone_since.get(slot)
            if gone_since is not None and seen_by_fellows(self._roster.servers(), table.holder[slot], now):
                self._seen_at[slot] = now
            # While steps close, the holder works, and only its link to us is down.
            alive_at = max(found.step_stored_at, self._seen_at.get(slot, float("-inf")))
            if gone_since is not None and now - max(gone_since, alive_at) >= limit_s:
                node, away_s = table.holder[slot], round(now - gone_since, 1)
                self._outbox.log("warning", "server given up", node=node, slot=table.name(slot), gone_s=away_s)
                table.release(slot)
            lacks = slot not in table.holder or slot in found.lost
            here = [linked[peer] for peer in spares] if lacks else []
            spare = table.spare_for(slot, here, found.plan, found.newest, now)
            if spare is not None:
                spares.remove(spare)
                table.bind(slot, spare)
                self._outbox.log("info", "spare takes a place", node=spare, slot=table.name(slot))
                yield slot

    def _hangs(
        self, node: NodeId, linked: Mapping[NodeId, Member], gone_s: float, found: Situation, now: float
    ) -> bool:
        """Whether a server that is linked loses its place, because nothing ends there and elsewhere it would."""
        holders = dict.fromkeys(found.table.holder.values())
        fellows = [linked[peer] for peer in holders if peer != node and peer in linked]
        others = [*fellows, *(member for peer, member in linked.items() if peer not in holders)]
        given_up = self._arbitration.is_given_up(
            linked.get(node), others, len(fellows), now - found.news_at, gone_s, now
        )
        for member in self._arbitration.to_ask(node, others):
            self._outbox.send(member.peer, member.next_look(now))
        return given_up


def _may_come(member: Member, now: float) -> bool:
    """Whether a server that waits is well, and was not told to go: its place would stand empty soon again."""
    return is_well(member, now) and (member.report is None or member.report.state != "draining")
