"""Contributions that are finite and absurd, or not finite: done again by somebody else before they count.

One gradient of 1e200 makes the whole step's sum infinite, and one that is a thousand times too large takes all of what
clipping leaves; neither may decide a step by itself. What is far from what the stage's other contributions are is put
aside, and its tasks are given to others. Whoever brings a usual result for them has shown that the first one was
false, and its sender is blamed. If a second node brings the like, then that is what the run computes, since honest
runs diverge too: it counts, and nobody is blamed. A server of the stage is believed at once.

Inside these bounds a lie passes: finding it takes a recomputation, which is an audit's affair.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median

from protocol.base.ids import NodeId, TaskId
from protocol.messages import Stored

ABSURD = 10.0
"""Times the usual gradient of a task, or loss of a token (or a tenth of it). Real ones vary by a factor of about three
from microbatch to microbatch; whoever is doubted wrongly costs one recomputation and no blame."""
ALIKE = 4.0
"""Two absurd results within this factor confirm each other: copies of one computation differ in their last bits."""
SAMPLES_MIN = 8
"""Before so many are known, only what no model gives is absurd: …"""
GRADIENT_FIRST_MAX = 1e4
"""… a global norm of ten thousand (a model that begins has one of 1 to 100), and …"""
LOSS_FIRST_MAX = 1e3
"""… a thousand nats a token (one that begins has ln(vocabulary), 5 to 12)."""
KEPT = 64
"""Newest accepted ones that say what is usual: a few steps, so that it follows the run."""
REPEATS_MAX = 2
"""A node that brings an absurd result a second time is the only one that does this work, since others come first for
what is doubted: it counts."""


class Doubts:
    """What one ledger holds usual, and what it has put aside."""

    def __init__(self, loss_tokens: int) -> None:
        self._loss_tokens = loss_tokens
        self._levels: deque[float] = deque(maxlen=KEPT)
        self._losses: deque[float] = deque(maxlen=KEPT)
        self._aside: dict[TaskId, dict[NodeId, tuple[float, int]]] = {}
        """Task -> whose absurd results were put aside: their size, and how often."""

    def look(self, message: Stored, square_norm: float, trusted: bool) -> str:
        """Why the contribution must be done again before it counts, or nothing.

        Args:
            square_norm: of the whole contribution, as the shards measured it; 0 where nobody had to.
            trusted: it comes from a server of the stage.
        """
        reason = "" if trusted else self._absurd(message, square_norm)
        if not reason:
            return ""
        node, size = message.contribution.node, _size(message, square_norm)
        known = [self._aside.setdefault(task, {}) for task in message.tasks]
        if any(_alike(size, other) for of_task in known for n, (other, _) in of_task.items() if n != node):
            return ""
        count = 1 + min(of_task.get(node, (0.0, 0))[1] for of_task in known)
        if count >= REPEATS_MAX:
            return ""
        for of_task in known:
            of_task[node] = size, count
        return reason

    def accepted(self, message: Stored, square_norm: float) -> tuple[NodeId, ...]:
        """It counts. Returns those whose results for its tasks it has shown to be false."""
        size = _size(message, square_norm)
        false: dict[NodeId, None] = {}
        for task in message.tasks:
            for node, (other, _) in self._aside.pop(task, {}).items():
                if node != message.contribution.node and not _alike(size, other):
                    false[node] = None
        if 0.0 < size < math.inf:
            self._levels.append(size)
        self._losses.extend(loss / self._loss_tokens for loss in message.losses if math.isfinite(loss))
        return tuple(false)

    def close_step(self, step: int) -> None:
        for task in [task for task in self._aside if task.step <= step]:
            del self._aside[task]

    def _absurd(self, message: Stored, square_norm: float) -> str:
        size = _size(message, square_norm)
        most = ABSURD * median(self._levels) if len(self._levels) >= SAMPLES_MIN else GRADIENT_FIRST_MAX
        if not size <= most:
            return f"its gradient ({size:.3g}) is beyond all that is usual here ({most:.3g})"
        usual = median(self._losses) if len(self._losses) >= SAMPLES_MIN else None
        low, high = (0.0, LOSS_FIRST_MAX) if usual is None else (usual / ABSURD, usual * ABSURD)
        for loss in message.losses:
            if not low <= loss / self._loss_tokens <= high:
                return f"its loss ({loss / self._loss_tokens:.3g}) is not between {low:.3g} and {high:.3g}"
        return ""


def _size(message: Stored, square_norm: float) -> float:
    """The norm of a task's gradient; infinite for what is not a number."""
    backwards: Collection[TaskId] = [task for task in message.tasks if task.op == "B"]
    size = math.sqrt(square_norm) / max(1, len(backwards)) if square_norm >= 0.0 else math.inf
    return size if math.isfinite(sum(message.losses)) else math.inf


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isfinite(one) and one <= ALIKE * other and other <= ALIKE * one)
