"""How long a pool waits for a result, and for a sum of weight gradients, before it gives the work to somebody else.

Both follow what the workers need (`Conduct.patience_s`), but never below what the bytes take on a slow line. Those who
answer first are the nearest, and servers that compute have no line at all: with 1.1 B parameters on 24 home lines their
answers once set both clocks to two seconds. Every lease ran out, tasks were done twice, sums that overlapped were
refused whole, and no step closed in 3,000 s.
"""

from __future__ import annotations

from node.server.conduct import Conduct

SAME = 0.8
"""A clock that would change by less than a fifth is left as it is."""

LEAVING_S = 90.0
"""Who gives leases back and means to leave is gone by then: a volunteer that drains takes a minute at most, or, where
it is moved to another stage, as long as two uploads do."""


class Patience:
    """Args:
    result_s: seconds from a grant after which a task without its result goes to somebody else, at most.
    gradient_s: the same without progress of a worker's weight gradients, in the tail of a step.
    transfer_s: what a lease's tensors take on a slow line, behind those of the worker's other leases.
    """

    def __init__(self, result_s: float, gradient_s: float, transfer_s: float) -> None:
        self._result_max_s, self._gradient_max_s = result_s, gradient_s
        self._transfer_s, self._upload_s = transfer_s, 0.0
        self.result_s, self.gradient_s = result_s, gradient_s
        self.leaving_s = LEAVING_S

    def allow_upload(self, seconds: float) -> None:
        """A whole contribution may take so long on a slow line: who sends one has that much more time, and so has a
        result that stands behind it."""
        self._upload_s = seconds
        self._gradient_max_s = self.gradient_s = self._gradient_max_s + seconds
        self.leaving_s = LEAVING_S + 2 * seconds

    def late_result_s(self, failed: int) -> float:
        """For work that so many have failed with: perhaps it is the work that takes long."""
        return min(self._result_max_s, self.result_s * 2.0 ** min(16, failed))

    def learn(self, conduct: Conduct) -> tuple[bool, bool]:
        """Follows what the workers need, now and then; returns whether the clock of results has changed, and that of
        weight gradients."""
        result_s = max(self._transfer_s + self._upload_s, conduct.patience_s("result", self._result_max_s))
        result_s = min(self._result_max_s, result_s)
        gradient_s = max(self._upload_s, conduct.patience_s("gradient", self._gradient_max_s))
        results = not SAME * self.result_s < result_s < self.result_s / SAME
        gradients = not SAME * self.gradient_s < gradient_s < self.gradient_s / SAME
        self.result_s = result_s if results else self.result_s
        self.gradient_s = gradient_s if gradients else self.gradient_s
        return results, gradients
