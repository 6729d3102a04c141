"""Which rows a tracker still has to get, across restarts and after going back to a checkpoint.

A step that was thrown away comes again under other ledgers. So what a tracker has is remembered as *segments*: from
which step on its rows are of which ledger generation. Where that differs from what counts now, it begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from coordinator.live.history import perplexity
from coordinator.live.records import StepRow
from coordinator.tracking.trackers import Row
from protocol.run.batches import Batches
from protocol.run.run import RunConfig

Segments = tuple[tuple[int, int], ...]
"""(first step, ledger generation), rising; each lasts until the next one begins."""
SEGMENTS_MAX = 4096
"""Times that a run goes back while one tracker follows it: once in ten minutes for a month."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """How far one tracker is."""

    next: int = 0
    """The first step that it does not have."""
    segments: Segments = ()

    def after(self, rows: Sequence[StepRow]) -> Place:
        """With these rows, which follow."""
        segments = self.segments
        for row in rows:
            if not segments or segments[-1][1] != row.ledger_generation:
                segments = (*segments, (row.step, row.ledger_generation))
        return Place(next=rows[-1].step + 1 if rows else self.next, segments=segments[-SEGMENTS_MAX:])

    def where_it_holds(self, counting: Segments) -> Place:
        """What of it still counts, where `counting` says which ledgers' steps do."""
        edges = sorted({0, *(first for first, _ in self.segments), *(first for first, _ in counting)})
        for edge in edges:
            if edge < self.next and _generation_at(self.segments, edge) != _generation_at(counting, edge):
                return Place(next=edge, segments=tuple(each for each in self.segments if each[0] < edge))
        return self


def _generation_at(segments: Segments, step: int) -> int:
    return next((generation for first, generation in reversed(segments) if first <= step), -1)


def row_for_trackers(row: StepRow, batches: Batches) -> Row:
    """The numbers of a step by the names that all trackers use."""
    return Row(
        step=row.step,
        wall_s=row.wall_s,
        scalars={
            "loss": _bounded(row.loss),
            "gradient_norm": _bounded(row.gradient_norm),
            "clip_factor": row.clip_factor,
            "learning_rate": row.learning_rate,
            "tokens": float(batches.tokens_before(row.step + 1)),
            "duration_s": row.duration_s,
            "skipped": float(row.skipped),
        },
        validations=tuple(
            (found.version, {"loss": _bounded(found.loss), "perplexity": perplexity(found.loss)})
            for found in row.validations
        ),
    )


def _bounded(value: float) -> float:
    return math.inf if math.isnan(value) else value


def flat(config: RunConfig) -> dict[str, str]:
    """The run's keys and values, `optimizer.learning_rate` and so on."""
    found: dict[str, str] = {}
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": str(inner) for key, inner in value.items()}
        else:
            found[name] = str(value)
    return found
