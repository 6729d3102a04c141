"""Which checkpoints a server can read: what it found, what it was told, and who waits for it to look again."""

from __future__ import annotations

from node.machine.jobs import FindCheckpoints
from node.machine.outbox import Outbox
from protocol.run.run import RunConfig

NAMED_MAX = 16
"""As many as `Join` may name: older ones are nobody's first choice."""


class ReadableCheckpoints:
    """Of one server. `steps` are newest first."""

    def __init__(self, out: Outbox, steps: tuple[int, ...]) -> None:
        self._out = out
        self.steps = steps
        self._told_meanwhile: dict[int, None] = {}
        """Checkpoints that were written since the look began."""
        self._asked_by: list[int] = []
        """Numbers of the coordinator's pings that wait for the end of the look."""

    def add(self, steps: tuple[int, ...]) -> None:
        """These can be read too."""
        self._told_meanwhile.update(dict.fromkeys(steps))
        self.steps = _newest({*self.steps, *steps})

    def undo_after(self, step: int) -> None:
        """Later checkpoints are none any more (`protocol.run.plan.Plan.undone`)."""
        self.steps = tuple(each for each in self.steps if each <= step)
        self._told_meanwhile = {each: None for each in self._told_meanwhile if each <= step}

    def look(self, config: RunConfig, ping_number: int) -> None:
        """Somebody asks what lies there now; all who ask while a look is under way get its answer."""
        if not self._asked_by:
            self._told_meanwhile = {}
            # Parts that every server keeps for itself have no manifest here: what was told of them still counts,
            # as long as the own one is there.
            self._out.compute(FindCheckpoints(config, () if config.checkpoint.shared else self.steps))
        self._asked_by.append(ping_number)

    def found(self, steps: tuple[int, ...] | None) -> list[int]:
        """The look has ended (None: nobody can tell what lies there). Returns the pings to answer, behind the news."""
        if steps is not None:
            self.steps = _newest({*steps, *self._told_meanwhile})
        asked_by, self._asked_by = self._asked_by, []
        return asked_by


def _newest(steps: set[int]) -> tuple[int, ...]:
    return tuple(sorted(steps, reverse=True)[:NAMED_MAX])
