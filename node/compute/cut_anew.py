"""A shard's state out of a checkpoint that was cut otherwise: other stages, other chunks, another number of shards.

A checkpoint's parts hold ranges of stages' vectors, and these lie block after block. Counted by sub-layer block of the
model, what every part has is the same in every cut: weights, both moments and the weights of the version before go over
element by element, and the averages of the gradient's grid by whole grid blocks, since those begin anew with every
sub-layer block and no shard is cut inside one. So nothing is computed, and the numbers stay what they are to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.compute.checkpoint import CheckpointError, Manifest, PartEntry, read_ranges
from node.compute.layout import StageLayout
from protocol.base.forms import GRID_BLOCK

STATE = ("params", "m", "v")
"""What every part has."""
UNITS: Mapping[str, int] = {
    "params": 1, "m": 1, "v": 1, "previous": 1, "averages": GRID_BLOCK, "previous_averages": GRID_BLOCK,
}  # fmt: skip
"""How many weights one number of a part's tensor is about."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights `first` to `end` (exclusive) of a sub-layer block, the next ones of a shard's vector."""

    block: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Range:
    """Weights `first` to `end` (exclusive) of a shard's vector, in a part of the checkpoint."""

    part: PartEntry
    first: int
    end: int
    grid_first: int
    """The same in grid blocks of the shard."""
    grid_end: int

    def of(self, name: str) -> tuple[int, int]:
        """Which numbers of the part's tensor of that name these are."""
        return (self.first, self.end) if UNITS[name] == 1 else (self.grid_first, self.grid_end)


def layouts_of(manifest: Manifest) -> list[StageLayout]:
    """The layout of each stage of a checkpoint. Raises `CheckpointError` for a partition that its run cannot have."""
    try:
        return [
            StageLayout(manifest.config, manifest.vocabulary, first, end, list(zip(more[::2], more[1::2], strict=True)))
            for first, end, _, *more in manifest.partition
        ]
    except ValueError as error:
        raise CheckpointError(f"checkpoint {manifest.step} has a partition that cannot be: {error}") from error


def about_part(
    config_hash: str, layout: StageLayout, stage: int, shard: int, shard_count: int, version: int
) -> dict[str, Any]:
    """What a shard's file says of itself; one that says otherwise is refused."""
    begin, end = layout.shard_range(shard, shard_count)
    return {
        "config_hash": config_hash,
        "stage": stage,
        "blocks": "+".join(f"{first}-{last}" for first, last in layout.chunks),
        "elements": f"{begin}-{end}",
        "version": version,
    }


def pieces_of(layout: StageLayout, shard: int, shard_count: int) -> Iterator[Piece]:
    """What a shard holds, in the order of its vector."""
    begin, end = layout.shard_range(shard, shard_count)
    for block, first, last in layout.block_ranges():
        if first < end and begin < last:
            yield Piece(block, max(first, begin) - first, min(last, end) - first)


class Recut:
    """How one shard of another cut is put together from a checkpoint's parts.

    Args:
        layout, shard, shard_count: the new shard.

    Raises:
        CheckpointError: the checkpoint does not have all of it.
    """

    def __init__(self, manifest: Manifest, layout: StageLayout, shard: int, shard_count: int) -> None:
        self._manifest = manifest
        self._layouts = layouts_of(manifest)
        self._ranges = list(self._find(list(pieces_of(layout, shard, shard_count))))
        self.parts: tuple[PartEntry, ...] = tuple(dict.fromkeys(found.part for found in self._ranges))
        """Those that hold something of the shard."""

    def _held(self) -> dict[int, list[tuple[Piece, _Range]]]:
        """By sub-layer block: which part has what of it, and where."""
        held: dict[int, list[tuple[Piece, _Range]]] = {}
        for part in self._manifest.parts:
            if not 0 <= part.stage < len(self._layouts):
                raise CheckpointError(f"checkpoint {self._manifest.step} has a part of stage {part.stage}")
            at = grid_at = 0
            try:
                there = list(pieces_of(self._layouts[part.stage], part.shard, self._manifest.partition[part.stage][2]))
            except ValueError as error:
                raise CheckpointError(f"checkpoint {self._manifest.step}: {part.file}: {error}") from error
            for piece in there:
                count = piece.end - piece.first
                grid_count = -(-count // GRID_BLOCK)
                where = _Range(part, at, at + count, grid_at, grid_at + grid_count)
                held.setdefault(piece.block, []).append((piece, where))
                at, grid_at = at + count, grid_at + grid_count
        return held

    def _find(self, wanted: Sequence[Piece]) -> Iterator[_Range]:
        held = self._held()
        for piece in wanted:
            reached = piece.first
            for there, where in sorted(held.get(piece.block, ()), key=lambda one: one[0].first):
                first, end = max(piece.first, there.first), min(piece.end, there.end)
                if first >= end:
                    continue
                if first != reached:
                    break
                # Shards are cut where grid blocks begin, in every cut, so these are whole grid blocks.
                skipped, taken = (first - there.first) // GRID_BLOCK, -(-(end - first) // GRID_BLOCK)
                begin, grid_begin = where.first + first - there.first, where.grid_first + skipped
                yield _Range(where.part, begin, begin + end - first, grid_begin, grid_begin + taken)
                reached = end
            if reached != piece.end:
                raise CheckpointError(f"checkpoint {self._manifest.step} has not all of block {piece.block}")

    def read(self, home: Path) -> dict[str, Tensor]:
        """The shard's state, as `ShardWorker.load` takes it: no more of each file is read than belongs to it.

        Raises:
            CheckpointError: a part is missing, damaged or of something else, or parts hold unlike tensors.
        """
        pieces: dict[str, list[Tensor]] = {}
        for part in self.parts:
            layout, shard_count = self._layouts[part.stage], self._manifest.partition[part.stage][2]
            mine = [found for found in self._ranges if found.part == part]
            about = about_part(
                self._manifest.config_hash, layout, part.stage, part.shard, shard_count, self._manifest.version
            )
            wanted = {name: [one.of(name) for one in mine] for name in UNITS}
            found = read_ranges(home / part.file, about, wanted, self._manifest.config)
            if not set(STATE) <= set(found) or (pieces and set(found) != set(pieces)):
                raise CheckpointError(f"{home / part.file}: holds {sorted(found)}, not what the other parts hold")
            for name, tensors in found.items():
                pieces.setdefault(name, []).extend(tensors)
        order = [place for part in self.parts for place, one in enumerate(self._ranges) if one.part == part]
        ordered = sorted(range(len(order)), key=order.__getitem__)
        return {name: torch.cat([tensors[place] for place in ordered]) for name, tensors in pieces.items()}
