"""A checkpoint is read in another cut than it was written in: to the bit, and only where all of it is there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from node.compute import checkpoint
from node.compute.checkpoint import CheckpointError, Manifest
from node.compute.cut_anew import Recut, about_part, layouts_of
from node.compute.layout import StageLayout
from node.compute.stage_grid import StageGrid
from protocol.run.course import course_of
from protocol.run.run import ModelSection, RoutesSection, RunConfig, StagesSection, WireSection
from tests.node.compute.small import VOCABULARY, small_run

VERSION = 7
Partition = tuple[tuple[int, ...], ...]


def run_of(tied: bool = False, gradients: str = "gi", **stages: Any) -> tuple[RunConfig, Partition]:
    """A run and the partition of its checkpoints, with `shards` servers a stage."""
    shards = stages.pop("shards", 2)
    model = ModelSection(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=48, context=16, tied_embeddings=tied)
    config = small_run(
        model=model,
        stages=StagesSection(**stages),
        routes=RoutesSection(),
        wire=WireSection(gradients=gradients),  # type: ignore[arg-type]
    )
    config.validate()
    course, rows = course_of(config), []
    for stage in range(config.stages.count):
        chunks = [course.chunks[number] for number in course.chunks_of(stage)]
        first, *more = [(chunk.first_block, chunk.end_block) for chunk in chunks]
        rows.append((*first, shards, *(block for chunk in more for block in chunk)))
    return config, tuple(rows)


def whole_state(config: RunConfig, delay: int = 1) -> dict[str, Tensor]:
    """A state of the whole model as one shard of one stage would hold it, every number another one."""
    layout = StageLayout.whole(config, VOCABULARY)
    names = ["params", "m", "v", *(["previous"] if delay else [])]
    state = {name: torch.randn(layout.parameter_count) for name in names}
    if config.wire.gradients == "gi":
        blocks = StageGrid.of(layout).block_count
        state["averages"] = torch.rand(blocks, dtype=torch.float64)
        if delay:
            state["previous_averages"] = torch.rand(blocks, dtype=torch.float64)
    return state


def write(folder: Path, config: RunConfig, partition: Partition, state: dict[str, Tensor]) -> Path:
    """A checkpoint in this cut. What each part holds is found here anew, number by number of the model."""
    home = checkpoint.step_folder(folder, VERSION)
    whole = StageLayout.whole(config, VOCABULARY)
    begins = {block: begin for block, begin, _ in whole.block_ranges()}
    grid_begins, count = {}, 0
    for block, begin, end in whole.block_ranges():
        grid_begins[block], count = count, count + -(-(end - begin) // 256)
    numbers = Manifest(
        run=config.name, config_hash="h", config=config, step=VERSION, version=VERSION, data_cursor=0, data_hash="d",
        vocabulary=VOCABULARY, partition=partition, parts=(),
    )  # fmt: skip
    parts = []
    for stage, layout in enumerate(layouts_of(numbers)):
        elements = torch.cat([torch.arange(e - b) + begins[block] for block, b, e in layout.block_ranges()])
        first_of = {b: block for block, b, _ in layout.block_ranges()}
        for shard in range(partition[stage][2]):
            begin, end = layout.shard_range(shard, partition[stage][2])
            grids: list[int] = []
            for b, block in first_of.items():
                last = next(e for k, s, e in layout.block_ranges() if k == block)
                grids += [grid_begins[block] + (at - b) // 256 for at in range(b, last, 256) if begin <= at < end]
            mine = {
                name: (tensor[grids] if "averages" in name else tensor[elements[begin:end]]).clone()
                for name, tensor in state.items()
            }
            about = about_part("h", layout, stage, shard, partition[stage][2], VERSION)
            parts.append(checkpoint.write_checkpoint_part(home, stage, shard, mine, about))
    checkpoint.write_manifest(folder, msgspec.structs.replace(numbers, parts=tuple(parts)), shared=True)
    return home


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"count": 1, "shards": 1},
    {"count": 2},
    {"count": 3, "shards": 1},
    {"count": 2, "cut": "6", "shards": 3},
    {"count": 7, "shards": 1},
    {"count": 2, "chunks": 2, "placement": "interleaved"},
    {"count": 3, "chunks": 2, "placement": "v", "shards": 3},
)
"""Of a model of eight sub-layer blocks."""


@pytest.mark.parametrize("tied", [False, True])
def test_every_cut_is_read_in_every_other_one_and_comes_back_the_same(tmp_path: Path, tied: bool) -> None:
    """Weights, moments, the version before and the averages of the grid: what a shard of the new cut reads is what the
    new cut's own checkpoint of the same state holds, byte by byte in the same file."""
    seed = random.randrange(10**6)
    print("seed", seed)
    torch.manual_seed(seed)
    runs = [run_of(tied, **layout) for layout in LAYOUTS]
    state = whole_state(runs[0][0])
    homes = [write(tmp_path / str(number), *run, state) for number, run in enumerate(runs)]
    for home in homes:
        manifest = checkpoint.read_manifest(home)
        for (config, partition), own in zip(runs, homes, strict=True):
            layouts = layouts_of(msgspec.structs.replace(manifest, config=config, partition=partition))
            for part in checkpoint.read_manifest(own).parts:
                count = partition[part.stage][2]
                found = Recut(manifest, layouts[part.stage], part.shard, count).read(home)
                about = about_part("h", layouts[part.stage], part.stage, part.shard, count, VERSION)
                expected = checkpoint.read_part(own / part.file, about)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected), (manifest.partition, part)


def test_a_shard_reads_only_the_parts_that_hold_something_of_it(tmp_path: Path) -> None:
    """Of eight stages, a half of the model needs four; without a grid or a delay there are three tensors."""
    config, partition = run_of(gradients="fp64", count=8, shards=1)
    home = write(tmp_path, config, partition, whole_state(config, delay=0))
    layout = StageLayout(config, VOCABULARY, 0, 4)
    recut = Recut(checkpoint.read_manifest(home), layout, 0, 1)
    assert [part.stage for part in recut.parts] == [0, 1, 2, 3]
    assert set(recut.read(home)) == {"params", "m", "v"}


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    """A manifest that leaves a part out, one with a stage or shard that there cannot be, a file of another place."""
    config, partition = run_of(count=2)
    home = write(tmp_path, config, partition, whole_state(config))
    manifest = checkpoint.read_manifest(home)
    whole = StageLayout.whole(config, VOCABULARY)
    replace = msgspec.structs.replace
    with pytest.raises(CheckpointError, match="has not all of block 0"):
        Recut(replace(manifest, parts=manifest.parts[1:]), whole, 0, 1)
    with pytest.raises(CheckpointError, match="a part of stage 9"):
        Recut(replace(manifest, parts=(replace_place(manifest.parts[0], 9, 0),)), whole, 0, 1)
    with pytest.raises(CheckpointError, match="shard 5 of 2"):
        Recut(replace(manifest, parts=(replace_place(manifest.parts[0], 0, 5),)), whole, 0, 1)
    with pytest.raises(CheckpointError, match="a partition that cannot be"):
        layouts_of(replace(manifest, partition=((0, 99, 1),)))
    recut = Recut(manifest, whole, 0, 1)
    first, second = (home / part.file for part in manifest.parts[:2])
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="elements is "):
        recut.read(home)
    second.unlink()
    with pytest.raises(CheckpointError, match=second.name):
        recut.read(home)


def replace_place(part: checkpoint.PartEntry, stage: int, shard: int) -> checkpoint.PartEntry:
    return checkpoint.PartEntry(stage, shard, part.file, part.byte_count, part.digest)
