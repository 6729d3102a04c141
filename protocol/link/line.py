"""What the links of one node share: its line up. Results of older steps leave first, and before the sum of weight
gradients that belongs to them.

A sum fills a home line for half a minute, and nobody needs a part of it. A result is needed at once, by the next stage
on its way. Where both took turns, and each link had its share of the line, the last results of a step left beside the
sums for two servers, and beside results of the next step, in three to four times their own time, in every stage on the
way back; and the same sums are through at the same moment behind them, since the line carries the same bytes. (Eight
stages, 200 volunteers with 20 Mbit/s up: the first step closed after 165 s, not 192, and later ones came in 90 s, not
93; 24 volunteers: the first after 398 s, not 429.)

Of later steps no result goes before a sum: they would keep it back for as long as there are any, and the step after
that waits for it. Nor does the sum go before those: the pipeline would be empty meanwhile (the same 200 took 94 s a
step, and 32 with differences up 220 s, not 156).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from protocol.link.codec import is_long
from protocol.messages import Audited, Contribute, Lease, Message

MOVING_S = 5.0
"""Results count for so long after something of them left by their link: one that hangs, or a peer that takes nothing,
keeps nothing back that goes to another. A chunk of 64 KiB that has a tenth of 1 Mbit/s takes as long."""

TRICKLE_S = 3.0
"""What has begun and is held back sends a chunk so often, 0.17 Mbit/s: a peer cuts off whoever brings less than
16 KiB in ten seconds of what it began (`PROGRESS_S`), and 16 results of 4 MB take half a minute of a home line."""


def result_step(message: Message) -> int:
    """The step of a message with tensors that others wait for, or what it is about; -1: of any other, which shares the
    line with all. What is audited belongs to steps that are closed, some of them."""
    if is_long(message) or isinstance(message, Audited):
        return -1
    if isinstance(message, Lease):
        return message.tasks[0].step
    task = getattr(message, "task", None)
    return -1 if task is None else int(task.step)


def goes_after(message: Message) -> int:
    """Results of steps up to this one leave before it; -1: it waits for none."""
    return message.step if isinstance(message, Contribute) else result_step(message) - 1


class Waiting:
    """What one link has of results that have not left."""

    __slots__ = ("_line", "moved_at", "steps")

    def __init__(self, line: Line) -> None:
        self._line = line
        self.steps: Counter[int] = Counter()
        self.moved_at = 0.0
        """When something of one left last, or the first of them came, by the clock of the link's owner."""

    def add(self, step: int, now: float) -> None:
        if not self.steps:
            self._line.links[self] = None
            self.moved_at = now
        self.steps[step] += 1

    def through(self, step: int) -> None:
        self.steps[step] -= 1
        if not self.steps[step]:
            del self.steps[step]
            self._over()

    def others_let(self, after: int, now: float) -> bool:
        """Whether what goes after results of steps up to `after` may leave here now, for all that other links have."""
        return self._line.lets(self, after, now)

    def clear(self) -> None:
        """The link takes nothing any more, or nothing that it has will leave."""
        self.steps.clear()
        self._over()

    def _over(self) -> None:
        if not self.steps:
            self._line.links.pop(self, None)
        self._line.freed()


class Line:
    """Of one volunteer, whose uplink is what its links wait for. A server's links wait for the lines at their other
    ends, each for its own: none holds another one back.

    Args:
        on_free: called when something that was held back may go, perhaps: links with nothing else to send look again.
    """

    def __init__(self, on_free: Callable[[], None] = lambda: None) -> None:
        self.links: dict[Waiting, None] = {}
        """Those that have results."""
        self._on_free = on_free
        self._holds = False

    def lets(self, link: Waiting, after: int, now: float) -> bool:
        """As `Waiting.others_let`, for one of them."""
        for waiting in self.links:
            if waiting is not link and now - waiting.moved_at < MOVING_S and min(waiting.steps) <= after:
                self._holds = True
                return False
        return True

    def freed(self) -> None:
        """Results of a step have left, or will not."""
        if self._holds:
            self._holds = False
            self._on_free()
