"""Another layout as an operator orders it, of which no planner has to say anything."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.run.changes import RunChange, layout_change, wanted_layout
from protocol.run.run import RunConfig


def make_layout(config: RunConfig, changes: Sequence[RunChange], settings: Sequence[str]) -> RunChange:
    """What `run replan KEY=VALUE…` comes to. Raises `BadInputError` as it does."""
    return layout_change(config, changes, wanted_layout(config, changes, settings))
