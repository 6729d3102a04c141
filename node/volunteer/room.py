"""How much work a device takes: the graphs that fit, what happens when memory runs out, and when it rests.

A device that is out of memory drops its graphs (servers hold everything that is needed to make them again), takes one
graph less from then on, and rests for a while that doubles with every failure in a row. A device that cannot be set up
tries again after the same rests. So no failure leaves it idle for ever, and none makes it fail in a loop.
"""

from __future__ import annotations

REST_S = 2.0
"""After the first failure: about what an owner's other program takes to load into a device's memory, or to leave."""
REST_MOST_S = 300.0
"""After many: a game that is played for an hour costs a dozen tries."""


def is_out_of_memory(reason: str) -> bool:
    """Whether a job failed for want of memory, by the words of its error (torch's own, and ours)."""
    return "out of memory" in reason.lower()


class Room:
    """Bounds on what one device is asked to hold. Pure: time is handed in."""

    def __init__(self) -> None:
        self.reset()
        self._failures = 0
        """In a row."""

    def reset(self) -> None:
        """Nothing is known of the device: it is being set up."""
        self._graphs_max: int | None = None
        self._counted_max: int | None = None
        self.rest_until = 0.0
        self.reason = ""
        """Why the device rests, or rested last; empty once a job has succeeded."""

    def set_up(self, graphs_max: int) -> None:
        """The device says how many graphs fit by its count."""
        self._graphs_max = self._counted_max = graphs_max

    @property
    def graphs_max(self) -> int | None:
        """Graphs that the device may be asked to hold; None until it is set up."""
        return self._graphs_max

    def rests(self, now: float) -> bool:
        return now < self.rest_until

    def succeeded(self) -> None:
        """A task went through."""
        self._failures, self.reason = 0, ""

    def failed(self, reason: str, graphs: int, now: float) -> float:
        """A job failed for want of memory (or the set-up did) while `graphs` were held; returns how long to rest."""
        if self._graphs_max is not None and is_out_of_memory(reason):
            self._graphs_max = max(1, min(self._graphs_max, graphs) - 1)
        rest_s = min(REST_S * 2.0 ** min(self._failures, 20), REST_MOST_S)
        self._failures += 1
        self.rest_until, self.reason = now + rest_s, reason
        return rest_s

    def check(self) -> None:
        assert self._graphs_max is None or self._graphs_max >= 1, "a device that takes no graph would be idle for ever"
