"""Mutants of sums on the grid: what is measured, by which version, and which grid goes with what. `mutants.py` hunts
them."""

from __future__ import annotations

from typing import Any

import msgspec

from node.machine.jobs import Measure
from node.server.serving import Serving
from node.server.shard import ShardRole
from node.volunteer.versions import Versions
from tests.simulation.mutant_registry import LINE, mutant
from tests.simulation.scene import Scene

GRID = {"gradients": "gi"}
LATE = Scene(
    only=("slow_host", "slow_disk"), gap_s=(0.1, 0.3),
    run={**LINE, **GRID, "lease_s": 1.0, "microbatches": 8, "volunteers": 4, "linger_s": 0.25, "contribution_tasks": 1},
)  # fmt: skip
"""Two bring the same, the second when the step is nearly over, and a disk takes its time with it."""
ABSURD = Scene(only=("liar",), gap_s=(0.1, 0.3), run={**LINE, **GRID, "volunteers": 2}, lies=("absurd",))
"""Volunteers that do nothing worse, and so are given work."""


@mutant(ShardRole, "_measure", scene=LATE)
def a_part_is_measured_when_it_is_durable(original: Any) -> Any:
    """Its step may be closed by then, and the version that it is measured by gone."""

    def measure(self: Any, part: Any) -> None:
        self._write(part)
        kept: dict[Any, Any] = self.__dict__.setdefault("_kept_records", {})

        def stored(record: Any) -> None:
            known = self._parts.get((record.contribution, record.step))
            if known is not None:
                kept[record.contribution] = record
                original(self, known)

        def measured(job: Any, square_norm: float) -> None:
            known = self._parts.get((job.contribution, job.step))
            if known is not None and not known.measured:
                known.message, known.measured = msgspec.structs.replace(known.message, square_norm=square_norm), True
                ShardRole.stored(self, kept.pop(job.contribution))

        self.stored, self.measured = stored, measured

    return measure


@mutant(ShardRole, "on_contribute", scene=ABSURD)
def a_part_on_the_grid_is_believed_unmeasured(original: Any) -> Any:
    """Whole numbers that are as large as they can be count like any others."""

    def on_contribute(self: Any, peer: Any, message: Any) -> Any:
        self._measure = lambda part: self._write(part)
        return original(self, peer, message)

    return on_contribute


@mutant(ShardRole, "_measure", scene=Scene(run=GRID))
def a_part_is_measured_by_the_newest_version(original: Any) -> Any:
    """Which may be the one after that which the part was made on, and not be here."""

    def measure(self: Any, part: Any) -> None:
        part.measured = False
        message = part.message
        self._out.compute(Measure(message.contribution, message.step, message.version + 1, message.tensors[0]))

    return measure


@mutant(Serving, "_send", scene=Scene(run=GRID))
def what_changed_is_served_with_the_grid_of_the_version_before(original: Any) -> Any:
    """A grid belongs to its version alone."""

    def send(self: Any, peer: Any, version: int, tensors: Any, base: int = -1) -> None:
        before = self._changes.get(version - 1)
        if base >= 0 and before is not None and before.tensors:
            tensors = (*tensors[:-1], before.tensors[-1])
        original(self, peer, version, tensors, base)

    return send


@mutant(Versions, "_load", scene=Scene(run={**GRID, **LINE, "fronts": 2}))
def the_parts_of_a_grid_are_put_together_as_they_came(original: Any) -> Any:
    """Not in the order of the shards."""

    def load(self: Any, number: int, version: Any) -> None:
        version.grids = dict(enumerate(version.grids.values()))
        original(self, number, version)

    return load
