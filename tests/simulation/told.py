"""What the coordinator has heard of steps: every one in order, with the reference's loss, but what nobody can tell."""

from __future__ import annotations

from typing import Any

from coordinator.live.records import PlanRow, StepRow
from tests.simulation.arithmetic import Reference
from tests.simulation.violation import expect


class Told:
    """The rows of steps that the coordinator has stored, and those that may be missing among them (T-I10)."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        """The present history."""
        self._thrown: dict[int, StepRow] = {}
        self._next_row = 0
        self.reports_were_lost = False
        """A disk has lost what alone could tell of some step."""
        self._untold_before = 0
        """Reports of earlier steps may be missing: who alone had them does not decide any more."""

    def stored(self, row: StepRow, ledger_generation: int, reference: Reference) -> None:
        """`ledger_generation`: the newest plan's."""
        follows = row.step == self._next_row or (row.step > self._next_row and self._may_be_missing(row.step - 1))
        expect(follows, "T-I10", f"step {row.step} is stored where {self._next_row} should follow")
        self._next_row = row.step
        expect(row.loss == reference.losses[row.step], "T-I10", f"step {row.step} is reported with another loss")
        for found in row.validations:
            right = reference.validations.get(found.version)
            expect(found.loss == right, "T-I10", f"version {found.version} is validated with {found.loss}, not {right}")
        what = f"step {row.step} of generation {row.ledger_generation}, not {ledger_generation}"
        expect(row.ledger_generation == ledger_generation, "T-I10", what)
        self.rows.append(row)
        self._next_row += 1

    def given_up(self, first_missing: int, steps: int) -> None:
        """The coordinator waits for reports from this step on no longer."""
        missing = self._may_be_missing(steps - 1) and first_missing == self._next_row
        expect(missing, "T-I10", f"the reports from step {first_missing} on are given up, and are there")

    def went_back(self, first: int, other_decider: bool) -> None:
        """The run begins again with step `first`."""
        if other_decider:
            self._untold_before = max(self._untold_before, first)  # a checkpoint or a copy is of the shard alone
        self._thrown |= {row.step: row for row in self.rows if row.step >= first}
        self.rows = [row for row in self.rows if row.step < first]
        # A checkpoint that could not be read the time before: what made it counts again.
        known = {row.step for row in self.rows}
        self.rows += [row for step, row in sorted(self._thrown.items()) if step < first and step not in known]
        # Reports that a lost disk has taken with it are made up for by nobody; the checkpoint has their steps.
        self._next_row = 1 + max((row.step for row in self.rows), default=-1)

    def begin_anew(self) -> None:
        """The coordinator comes back with an older copy of its database; `known` says of what it holds."""
        self.rows, self._thrown, self._next_row = [], {}, 0

    def known(self, record: Any) -> None:
        """A record of that copy."""
        if isinstance(record, PlanRow) and record.goes_back:
            self.rows = [row for row in self.rows if row.step < max(0, record.plan.restore_step)]
        elif isinstance(record, StepRow):
            self.rows.append(record)
        self._next_row = 1 + max((row.step for row in self.rows), default=-1)

    def finish(self, steps: int) -> None:
        """The run is over and had so many steps."""
        whole = self._next_row == steps or self._may_be_missing(steps - 1)
        expect(whole, "T-I10", f"the history ends before step {self._next_row}")

    def _may_be_missing(self, step: int) -> bool:
        """Of reports that the coordinator has not stored, up to this one: with the disk of a decider, which alone has
        them, they are gone, and with its place."""
        return self.reports_were_lost or step < self._untold_before
