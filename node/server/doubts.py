"""Contributions that are finite and absurd, or not finite: done again by somebody else before they count.

One gradient of 1e200 makes the whole step's sum infinite, and one that is a thousand times too large takes all of what
clipping leaves; neither may decide a step by itself. What is far from what the stage's other contributions are is put
aside, and its tasks are given to others. When all of them have been done by others, and what came is usual, the first
one was false, and its sender is blamed. A server of the stage is believed at once, usual or not, since honest runs
diverge too; and where one computes (`stages.collocated` other than `never`) it is a server that does such a task, and
no second member's word counts before its: two members may be one person. Where servers compute nothing, a second node
that brings the like is believed: two members who know each other can have one absurd sum counted there.

Contributions hold one task or hundreds. The norm of a sum of n tasks is between the root of n and n times a task's: the
first where their noise is all there is, the second where they agree. So nobody is held to more than either allows.

Inside these bounds a lie passes: finding it takes a recomputation, which is an audit's affair.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from protocol.base.ids import ContributionId, NodeId, TaskId
from protocol.messages import Stored

ABSURD = 10.0
"""Times the usual gradient of so many tasks, or loss of a token (or a tenth of it). Real ones vary by a factor of about
three from microbatch to microbatch; whoever is doubted wrongly costs one recomputation and no blame."""
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
what is doubted: it counts, where servers compute nothing."""


@dataclass(slots=True)
class _Aside:
    """A contribution that was put aside, until others have done its tasks."""

    node: NodeId
    step: int
    norm: float
    left: dict[TaskId, None]
    """Tasks that nobody has done instead."""
    others_norm: float = 0.0
    """Of what came for the others, added up: no sum of the same gradients is longer."""


class Doubts:
    """What one ledger holds usual, and what it has put aside."""

    def __init__(self, loss_tokens: int) -> None:
        self._loss_tokens = loss_tokens
        self._levels: deque[tuple[int, float]] = deque(maxlen=KEPT)
        """(tasks, norm) of contributions that count."""
        self._losses: deque[float] = deque(maxlen=KEPT)
        self._absurd: dict[TaskId, dict[NodeId, tuple[float, int]]] = {}
        """Task -> who brought something absurd with it: its norm, and how often."""
        self._aside: dict[ContributionId, _Aside] = {}

    def look(self, message: Stored, square_norm: float, trusted: bool, servers_judge: bool = False) -> str:
        """Why the contribution must be done again before it counts, or nothing.

        Args:
            square_norm: of the whole contribution, as the shards measured it; 0 where nobody had to.
            trusted: it comes from a server of the stage.
            servers_judge: one of these does what is doubted, and no member's word confirms another's.
        """
        reason = "" if trusted else self._why_absurd(message, square_norm)
        if not reason:
            return ""
        node, norm = message.contribution.node, _norm(message, square_norm)
        known = [self._absurd.setdefault(task, {}) for task in message.tasks]
        alike = any(_alike(norm, other) for of_task in known for n, (other, _) in of_task.items() if n != node)
        count = 1 + min(of_task.get(node, (0.0, 0))[1] for of_task in known)
        if not servers_judge and (alike or count >= REPEATS_MAX):
            return ""
        for of_task in known:
            of_task[node] = norm, count
        left = dict.fromkeys(message.tasks)
        self._aside[message.contribution] = _Aside(node, message.step, norm, left)
        return reason

    def accepted(self, message: Stored, square_norm: float) -> tuple[NodeId, ...]:
        """It counts. Returns those whose results for its tasks have been shown to be false: nobody's by one of size 0,
        which was not measured or has nothing in it."""
        norm, count = _norm(message, square_norm), _count(message)
        false: dict[NodeId, None] = {}
        for task in message.tasks:
            self._absurd.pop(task, None)
        for contribution, aside in list(self._aside.items()):
            done = [task for task in message.tasks if task in aside.left]
            if not done:
                continue
            if aside.node == message.contribution.node or norm == 0.0:
                del self._aside[contribution]  # nobody else does it, or nobody knows what came of it
                continue
            for task in done:
                del aside.left[task]
            aside.others_norm += norm
            if not aside.left:
                del self._aside[contribution]
                if not aside.norm <= ALIKE * aside.others_norm:
                    false[aside.node] = None
        if 0.0 < norm < math.inf:
            self._levels.append((count, norm))
        self._losses.extend(loss / self._loss_tokens for loss in message.losses if math.isfinite(loss))
        return tuple(false)

    def close_step(self, step: int) -> None:
        for task in [task for task in self._absurd if task.step <= step]:
            del self._absurd[task]
        for key in [key for key, aside in self._aside.items() if aside.step <= step]:
            del self._aside[key]

    def _why_absurd(self, message: Stored, square_norm: float) -> str:
        norm, count = _norm(message, square_norm), _count(message)
        usual = GRADIENT_FIRST_MAX * count
        if len(self._levels) >= SAMPLES_MIN:
            usual = ABSURD * median(level * _growth(count / tasks) for tasks, level in self._levels)
        if not norm <= usual:
            return f"its gradient ({norm:.3g}) is beyond all that is usual here ({usual:.3g})"
        usual_loss = median(self._losses) if len(self._losses) >= SAMPLES_MIN else None
        low, high = (0.0, LOSS_FIRST_MAX) if usual_loss is None else (usual_loss / ABSURD, usual_loss * ABSURD)
        for loss in message.losses:
            if not low <= loss / self._loss_tokens <= high:
                return f"its loss ({loss / self._loss_tokens:.3g}) is not between {low:.3g} and {high:.3g}"
        return ""


def _growth(ratio: float) -> float:
    """How much longer the sum of `ratio` times as many gradients can be."""
    return ratio if ratio >= 1.0 else math.sqrt(ratio)


def _count(message: Stored) -> int:
    return max(1, sum(task.op == "B" for task in message.tasks))


def _norm(message: Stored, square_norm: float) -> float:
    """The norm of a contribution's gradient; infinite for what is not a number."""
    norm = math.sqrt(square_norm) if square_norm >= 0.0 else math.inf
    return norm if math.isfinite(sum(message.losses)) else math.inf


def _alike(one: float, other: float) -> bool:
    return one == other or (math.isfinite(one) and one <= ALIKE * other and other <= ALIKE * one)
