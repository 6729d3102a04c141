"""What the demo breaks on purpose, and when: kills by SIGKILL, at steps that the command line names."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from node.demo.options import DemoOptions


@dataclass(slots=True)
class Plan:
    """Which kills are due. Ask after every look at the run; a due kill stays due until it was done."""

    options: DemoOptions
    rng: random.Random
    volunteer_kills: int = 0
    """Volunteers killed by `--chaos` so far."""
    done: dict[str, None] = field(default_factory=dict)

    def volunteer_due(self, step: int) -> bool:
        """Whether a volunteer should die now: one for every full `--chaos` steps that are closed."""
        return self.options.chaos > 0 and self.volunteer_kills < step // self.options.chaos

    def spared_all(self, step: int) -> bool:
        """Whether a volunteer should have died until `step` steps were closed, and none has."""
        return self.volunteer_kills == 0 and self.volunteer_due(step)

    def due(self, what: str, at: int | None, step: int) -> bool:
        """Whether a single kill is due; true only once."""
        if at is None or step < at or what in self.done:
            return False
        self.done[what] = None
        return True
