"""The grid of `gi` over a stage's vector: where its blocks begin, and sums of tasks' gradients on it.

Blocks of 256 parameters begin anew with every sub-layer block of the model, so they are the same however the model is
cut into stages; and shards are cut where blocks begin, so a block is never shared. Everything here is a pure function
of (gradient, task, averages): a volunteer, a shard and the reference get the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.compute.forms import grid
from node.compute.layout import StageLayout, block_weights
from protocol.base.forms import BLOCK, GRID_BLOCK
from protocol.run.run import RunConfig


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements `begin` to `end` (exclusive) of a vector, which belong to one sub-layer block of the model."""

    begin: int
    end: int
    place: int
    """The model's number of the first of them: rounding depends on it."""
    block: int
    """The number of the first grid block among the vector's."""

    @property
    def blocks(self) -> slice:
        return slice(self.block, self.block + grid.block_count(self.end - self.begin))


class StageGrid:
    """The grid blocks of a stage's vector, or of a shard of it.

    Args:
        parameters: of the whole model.
        tasks: of a step, each of which may add up to `grid.most(tasks)` without an overflow of int32.
    """

    def __init__(self, parts: tuple[_Part, ...], parameters: int, tasks: int, seed: int) -> None:
        self._parts = parts
        self._runs = tuple(_joined(parts))
        self._parameters = parameters
        self._tasks = tasks
        self._seed = seed
        self.element_count = parts[-1].end if parts else 0
        self.block_count = parts[-1].blocks.stop if parts else 0

    @classmethod
    def of(cls, layout: StageLayout) -> StageGrid:
        config = layout.config
        places = _places(config, layout.vocabulary)
        parts: list[_Part] = []
        for number, begin, end in layout.block_ranges():
            block = parts[-1].blocks.stop if parts else 0
            parts.append(_Part(begin, end, places[number], block))
        return cls(tuple(parts), places[-1], config.batch.microbatches, config.seed)

    def cut(self, begin: int, end: int) -> StageGrid:
        """The grid of elements `begin` to `end` (exclusive), which must be edges."""
        parts: list[_Part] = []
        for part in self._parts:
            first, last = max(part.begin, begin), min(part.end, end)
            if first < last:
                assert (first - part.begin) % GRID_BLOCK == 0, "a shard is cut inside a grid block"
                block = parts[-1].blocks.stop if parts else 0
                parts.append(_Part(first - begin, last - begin, part.place + first - part.begin, block))
        return StageGrid(tuple(parts), self._parameters, self._tasks, self._seed)

    # ---- steps of the grid ----

    def first_averages(self) -> Tensor:
        """[block_count] fp64: of version 0."""
        return torch.cat([grid.first_averages(part.end - part.begin, self._parameters) for part in self._parts])

    def steps(self, averages: Tensor) -> Tensor:
        """[block_count] int8: the grid of the steps that run on a version with these averages."""
        return grid.exponents(averages, self._tasks)

    def next_averages(self, averages: Tensor, total: Tensor, used: Tensor) -> Tensor:
        """Of the version after one with `averages`, made from the sum `total` (int32) on the grid `used`."""
        return torch.cat(
            [
                grid.next_averages(
                    averages[part.blocks], total[part.begin : part.end], used[part.blocks], self._parameters
                )
                for part in self._parts
            ]
        )

    # ---- sums ----

    def square_norm_most(self, bits: npt.NDArray[np.int64], steps: Tensor) -> float:
        """What the square norm of a packed sum cannot exceed, and of Gaussian values is a quarter to a thirtieth of.

        Args:
            bits: [64 integers each] how wide they are (`packed.widest`).
            steps: [block_count] int8, the grid.

        Sixty-four integers that lie across an edge between two steps of the grid count by the larger one.
        """
        if not bits.size:
            return 0.0
        begins = np.array([part.begin for part in self._parts])
        numbers = np.array([part.block for part in self._parts])
        first = np.arange(0, self.element_count, BLOCK)
        last = np.minimum(first + BLOCK, self.element_count) - 1
        exponents = steps.numpy().astype(np.float64)

        def step_at(places: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            part = np.searchsorted(begins, places, side="right") - 1
            found: npt.NDArray[np.float64] = exponents[numbers[part] + (places - begins[part]) // GRID_BLOCK]
            return found

        highest = np.maximum(step_at(first), step_at(last)) + bits - 1
        return float((BLOCK * np.exp2(2.0 * highest))[bits > 0].sum())

    def keys(self, step: int, microbatch: int) -> list[Tensor]:
        """Those of the task's hash: 20 ms of a processor for a billion parameters."""
        key = grid.task_key(self._seed, step, microbatch)
        return [grid.keys_of(key, part.place, part.end - part.begin) for part in self._runs]

    def add(
        self,
        total: Tensor,
        gradient: Tensor,
        steps: Tensor,
        step: int,
        microbatch: int,
        edges: Tensor | None = None,
        keys: Sequence[Tensor] | None = None,
    ) -> None:
        """Rounds one task's gradient to the grid and adds it to `total` [element_count] int32, in place.

        A gradient that is not finite makes the sum one that stands for NaN, whatever else comes to it. `edges`
        [2, element_count] are those of `grid.add_to_grid`, `keys` those of the task, where somebody has made them.
        """
        if keys is None:  # before anything that waits for the device, which may still be at the gradient
            keys = self.keys(step, microbatch)
        if grid.is_spoilt(total):
            return
        if not grid.is_finite(gradient):
            grid.spoil(total)
            return
        for part, pages in zip(self._runs, keys, strict=True):
            inside = slice(part.begin, part.end)
            near = None if edges is None else edges[:, inside]
            grid.add_finite(total[inside], gradient[inside], steps[part.blocks], pages, part.place, self._tasks, near)

    def value(self, total: Tensor, steps: Tensor, begin: int = 0, end: int | None = None) -> Tensor:
        """[end - begin] fp32: a sum, or elements `begin` to `end` (exclusive) of it, in its own unit; NaN throughout if
        a gradient in it was not finite."""
        end = self.element_count if end is None else end
        if grid.is_spoilt(total):
            return torch.full((end - begin,), torch.nan, device=total.device)
        found = []
        for part in self._parts:
            first, last = max(part.begin, begin), min(part.end, end)
            if first < last:
                before = (first - part.begin) % GRID_BLOCK  # of the block that `first` lies in
                blocks = steps[part.block + (first - part.begin) // GRID_BLOCK : part.blocks.stop]
                found.append(grid.from_grid(total[first - before : last], blocks)[before:])
        return found[0] if len(found) == 1 else torch.cat(found)


def _joined(parts: Sequence[_Part]) -> Iterator[_Part]:
    """Those that follow each other in the model and end where a grid block does, as one: the same arithmetic in fewer
    operations."""
    run: _Part | None = None
    for part in parts:
        if run is not None:
            length = run.end - run.begin
            if length % GRID_BLOCK == 0 and (part.begin, part.place) == (run.end, run.place + length):
                run = replace(run, end=part.end)
                continue
            yield run
        run = part
    if run is not None:
        yield run


def _places(config: RunConfig, vocabulary: int) -> list[int]:
    """The model's number of the first parameter of each sub-layer block; last, how many parameters there are."""
    return list(_sums(config, vocabulary))


def _sums(config: RunConfig, vocabulary: int) -> Iterator[int]:
    total = 0
    for block in range(config.block_count):
        yield total
        total += sum(math.prod(shape) for _, shape, _ in block_weights(config.model, vocabulary, block))
    yield total
