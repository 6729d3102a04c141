"""Whether a member's errors, each within the audits' tolerance, all point to one side.

Rounding of another kind of device points anywhere: averaged over many audits it goes away. Who adds the same small
vector to every gradient, or makes each a little longer, stays. An auditor sends the signed difference of each sum of
gradients as a few numbers (`RESIDUAL_PARTS`): along the gradient itself, and in directions that only the stage's
servers and auditors know, so that nobody can lean where they do not look.

A member that leans in one window has all that it brings audited, and is out when it leans in the next, too: two
windows share no audit, as two opinions share no device. Where more than half of the others that are known lean, the
auditor does, or a kind of device that most have: nobody is blamed. Liars who are that many are beyond this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from protocol.run.audits import RESIDUAL_PARTS

WINDOW = 100
"""Audits that are averaged: honest errors fall to a tenth."""
FLOOR_SHARE = 0.25
"""Of the tolerance: a smaller lean is left alone. Half a tolerance is found with this to spare."""
COHERENT = 36.0
"""|sum|² over the sum of squares: 1 on average where errors are independent, `WINDOW` where all are one vector. Were
all of an honest member's errors on one line, this is six standard deviations: once in 10⁹ windows. With a lean of half
a tolerance it is 100 without and 50 beside honest errors of the same size."""

Lean = Literal["", "once", "out"]


@dataclass(slots=True)
class Leaning:
    """Of one member in one stage."""

    count: int = 0
    sums: tuple[float, ...] = (0.0,) * RESIDUAL_PARTS
    squares: float = 0.0
    along_squares: float = 0.0
    """Of the first of them, along the gradients themselves: rounding errors of many elements hardly show there, so
    who makes all gradients longer is seen beside errors that are far larger than that."""
    windows: int = 0
    """In a row, so far, in which it leaned."""
    leaned: bool | None = None
    """In the newest whole window; None: there is none yet."""
    mean: float = 0.0
    """Of that window, relative to a gradient's length."""

    def add(self, residual: tuple[float, ...], tolerance: float) -> bool:
        """One more audit that passed; whether that ends a window. What nobody honest sends is left out."""
        square = sum(part * part for part in residual)
        # A sketch of the difference can be longer than it, twice in each of the two; and on a grid the difference of
        # honest sums is larger than that of the gradients, which is what the tolerance is about.
        if len(residual) != RESIDUAL_PARTS or not square <= (8 * tolerance) ** 2:
            return False
        self.count += 1
        self.sums = tuple(a + b for a, b in zip(self.sums, residual, strict=True))
        self.squares += square
        self.along_squares += residual[0] * residual[0]
        if self.count < WINDOW:
            return False
        total = math.sqrt(sum(part * part for part in self.sums))
        self.mean = total / self.count
        self.leaned = any(
            size > FLOOR_SHARE * tolerance * self.count and size * size > COHERENT * squares > 0.0
            for size, squares in ((total, self.squares), (abs(self.sums[0]), self.along_squares))
        )
        self.count, self.sums, self.squares, self.along_squares = 0, (0.0,) * RESIDUAL_PARTS, 0.0, 0.0
        return True

    def judge(self, others: Iterable[Leaning]) -> Lean:
        """What the window that has just ended means, beside those of the others."""
        known = [other.leaned for other in others if other is not self and other.leaned is not None]
        if not self.leaned or 2 * sum(known) > len(known):
            self.windows = 0
            return ""
        self.windows += 1
        return "out" if self.windows > 1 else "once"
