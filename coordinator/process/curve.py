"""The loss over all steps in a bounded number of pieces, kept up with the database by its new rows alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.process.database import Database

Piece = tuple[int, float | None, float | None, float | None, float]
"""First step, mean loss, smallest, largest, tokens a second."""
ROWS_MAX = 2_000
"""Steps in memory at once, 1 MB, which the process never gives back: a database on another computer sends all that a
query finds."""
LOSS_MAX = 1e300
"""A loss beyond this is not finite; what was no number is in the database as infinity."""


@dataclass(slots=True)
class _Sums:
    """What one piece holds of its steps."""

    first: int
    steps: int = 0
    losses: int = 0
    loss_sum: float = 0.0
    loss_least: float = inf
    loss_most: float = -inf
    tokens: int = 0
    duration_s: float = 0.0
    begun_s: float = inf
    ended_s: float = -inf

    def add(self, other: _Sums) -> None:
        self.first = min(self.first, other.first)
        self.steps += other.steps
        self.losses += other.losses
        self.loss_sum += other.loss_sum
        self.loss_least = min(self.loss_least, other.loss_least)
        self.loss_most = max(self.loss_most, other.loss_most)
        self.tokens += other.tokens
        self.duration_s += other.duration_s
        self.begun_s = min(self.begun_s, other.begun_s)
        self.ended_s = max(self.ended_s, other.ended_s)

    def piece(self, before_s: float) -> Piece:
        """What is drawn of it. `before_s`: when the step before was reported, -inf where there was none.

        Steps overlap, so the time that each was open would be counted several times: a step took what lies between
        two reports.
        """
        took_s = self.ended_s - before_s
        if not 0.0 < took_s < inf:
            took_s = self.ended_s - self.begun_s + self.duration_s / self.steps
        speed = self.tokens / max(took_s, 1e-3)
        if not self.losses:
            return self.first, None, None, None, speed
        return self.first, self.loss_sum / self.losses, self.loss_least, self.loss_most, speed


class Curve:
    """At most `points` pieces of a power of two of steps; two become one when they would be more.

    Of a table whose rows only come, and never change: whoever changes old ones begins a new curve.
    """

    def __init__(self, points: int) -> None:
        self.points = points
        self._shift = 0
        """A piece has 2^shift steps."""
        self._pieces: dict[int, _Sums] = {}
        self._row = 0
        """The newest that was read."""

    def read(self, db: Database) -> list[Piece]:
        """Takes the steps that have come since the last time; all pieces, in order."""
        while rows := db.execute(
            "SELECT rowid, step, loss, tokens, duration_s, wall_s FROM steps WHERE rowid > ? AND thrown_away = 0"
            " ORDER BY rowid LIMIT ?",
            (self._row, ROWS_MAX),
        ).fetchall():
            self._add(rows)
        found, before_s = [], -inf
        for number in sorted(self._pieces):
            found.append(self._pieces[number].piece(before_s))
            before_s = self._pieces[number].ended_s
        return found

    def _add(self, rows: list[tuple[int, int, float, int, float, float]]) -> None:
        for self._row, step, loss, tokens, duration_s, wall_s in rows:
            while step >> self._shift >= self.points:
                self._halve()
            sums = _Sums(step, 1, tokens=tokens, duration_s=duration_s, begun_s=wall_s, ended_s=wall_s)
            if abs(loss) < LOSS_MAX:
                sums.losses, sums.loss_sum, sums.loss_least, sums.loss_most = 1, loss, loss, loss
            self._take(sums)

    def _take(self, sums: _Sums) -> None:
        number = sums.first >> self._shift
        if number in self._pieces:
            self._pieces[number].add(sums)
        else:
            self._pieces[number] = sums

    def _halve(self) -> None:
        before, self._pieces = self._pieces, {}
        self._shift += 1
        for sums in before.values():
            self._take(sums)
