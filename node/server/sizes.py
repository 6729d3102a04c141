"""Activations and their gradients that are absurd: computed again by somebody else before they go on.

A forward's output and a backward's input gradient are used at once, by everybody downstream: one that is finite and
1e37 large makes others' honest work absurd or infinite, and whoever computes it again comes to the same. So what is
far larger than what came for that place in the model before is put aside, and its task is given to somebody else. A
usual result shows that the first was false, and its sender is blamed; the like from a second node shows that the run
is like that. A server of the stage is believed at once, and where one computes, it alone confirms. As for
contributions (`node.server.doubts`), which this follows in everything else.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from node.server.doubts import ABSURD, ALIKE, KEPT, REPEATS_MAX, SAMPLES_MIN
from protocol.base.ids import NodeId, TaskId

VALUE_FIRST_MAX = 1e4
"""Before it is known what is usual: the root mean square of the values. What a model's blocks add up to begins at one
and may grow to hundreds; gradients of a loss that is a sum over tokens stay below that."""


@dataclass(frozen=True, slots=True)
class _Aside:
    size: float
    fence: int
    """Of the lease: the same once more is no second opinion, and no second try."""
    count: int


class Sizes:
    """What results of one kind are like, by their position along the routes, and what was put aside."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._levels: dict[int, deque[float]] = {}
        self._aside: dict[TaskId, dict[NodeId, _Aside]] = {}

    def look(
        self, task: TaskId, node: NodeId, fence: int, size: float, trusted: bool, servers_judge: bool = False
    ) -> str:
        """Why the task must be done again before its result is used, or nothing.

        Args:
            fence: of the lease that it was done with.
            size: root mean square of the result's values, or a little more; 0 where nobody measured, as for a server's.
            trusted: it comes from a server of the stage.
            servers_judge: one of these does what is doubted, and no member's word confirms another's.
        """
        levels = self._levels.get(task.position, ())
        usual = ABSURD * median(levels) if len(levels) >= SAMPLES_MIN else VALUE_FIRST_MAX
        if trusted or size <= usual:
            return ""
        of_task = self._aside.setdefault(task, {})
        alike = any(_alike(size, other.size) for n, other in of_task.items() if n != node)
        before = of_task.get(node)
        count = 1 if before is None else before.count + (before.fence != fence)
        if not servers_judge and (alike or count >= REPEATS_MAX):
            return ""
        of_task[node] = _Aside(size, fence, count)
        return f"{self._what} ({size:.3g}) is beyond all that is usual here ({usual:.3g})"

    def accepted(self, task: TaskId, node: NodeId, size: float) -> tuple[NodeId, ...]:
        """It is used. Returns those whose results for it were false.

        Where some were put aside (`is_doubted`) the true size has to be known: beside 0 everybody's would seem false.
        """
        if 0.0 < size < math.inf:
            self._levels.setdefault(task.position, deque(maxlen=KEPT)).append(size)
        aside = self._aside.pop(task, {})
        return tuple(n for n, other in aside.items() if n != node and not _alike(size, other.size))

    def is_doubted(self, task: TaskId) -> bool:
        """Whether results for it were put aside."""
        return task in self._aside

    def close_step(self, step: int) -> None:
        """Nobody does its tasks any more."""
        for task in [task for task in self._aside if task.step <= step]:
            del self._aside[task]


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isfinite(one) and one <= ALIKE * other and other <= ALIKE * one)
