"""The plan on a node's own disk: training goes on without the coordinator, also through a restart.

Whatever the coordinator says is durable before the machine hears of it, so no restart goes back to an older plan than
one that it has acted on. A node that starts gives the coordinator a few seconds, or as many dials where its computer
answers that nobody is there; if no link to it comes about, it goes by what it kept. While the coordinator is linked,
its word alone counts: it may know that this disk has lost something. Only one that does not let us in for a while knows
less than we do: its database is old or lost, and it waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from node.machine.records import Record
from node.server.recovery import newest_start, recovery
from protocol.messages import PlanChanged, Welcome
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

COORDINATOR_S = 5.0
"""A coordinator that is there is linked within this time: a dial and a handshake take less than a second, and a second
attempt follows after one."""

DIALS = 3
"""Attempts that came to nothing are enough to know sooner that it is not there: at a computer that is up, where its
port is closed, they take half a second with the waits between them (`wanted.BACKOFF_S`), and a stage of whose servers
one has restarted stands meanwhile. An attempt without an answer takes longer than `COORDINATOR_S`."""

WELCOME_S = 10.0
"""A coordinator that knows our plan lets us in as soon as its disk has a row more (milliseconds; a slow disk a second
or two), and one that has stopped is hung up on sooner (`limits.silent_s`, 6 s)."""


class KeptPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node needs to go on by itself."""

    config: RunConfig
    vocabulary: int
    plan: Plan
    stage: int
    reason: str

    def after(self, news: PlanChanged | Welcome) -> KeptPlan:
        """With what the coordinator says now; an older plan changes nothing."""
        if isinstance(news, Welcome):
            return msgspec.structs.replace(self, vocabulary=news.vocabulary)
        if news.plan.generation < self.plan.generation:
            return self
        return msgspec.structs.replace(self, plan=news.plan, stage=news.stage, reason=news.reason)


class Resumption:
    """When a node that has started goes by its kept plan."""

    def __init__(self, kept: KeptPlan | None, records: Sequence[Record]) -> None:
        self._kept = kept
        self._records = records
        self.at: float | None = None
        self._failed_dials = 0

    def without_coordinator(self, now: float) -> None:
        """There is no link to the coordinator (any more)."""
        if self._kept is not None:
            self.at = now + COORDINATOR_S
            self._failed_dials = 0

    def dial_failed(self, now: float) -> None:
        """An attempt to reach it has come to nothing."""
        self._failed_dials += 1
        if self.at is not None and self._failed_dials >= DIALS:
            self.at = min(self.at, now)

    def coordinator_here(self, now: float) -> None:
        """It is linked, and has not let us in yet."""
        if self._kept is not None:
            self.at = now + WELCOME_S

    def welcome(self) -> None:
        """It has: the plan comes from it."""
        self.at = None

    def take(self, serves: bool) -> KeptPlan | None:
        """The plan to go by now. A server that never began its ledgers there waits for the coordinator, which knows
        what the others have."""
        kept, self._kept, self.at = self._kept, None, None
        if kept is None or not serves:
            return kept
        generation, delay = kept.plan.ledger_generation, kept.config.batch.delay
        newest = newest_start(self._records)
        began = newest is not None and newest.ledger_generation == generation
        return kept if began and recovery(self._records, generation, delay, None) is not None else None

    def forget(self) -> None:
        """The coordinator has told its plan."""
        self._kept, self.at = None, None
