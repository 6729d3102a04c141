"""A model out of a checkpoint: the shards of all stages put together, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from node.compute.checkpoint import (
    CheckpointError,
    Manifest,
    check_there,
    read_manifest,
    read_verified,
    step_folder,
)
from node.compute.cut_anew import layouts_of
from node.compute.export import check_whole, export_stages
from node.compute.layout import StageLayout
from node.compute.places import Place, on
from node.compute.seals import Vouched, verify
from node.data.dataset import Dataset
from node.data.tokenizer import BYTES, TextTokenizer, make_tokenizer
from protocol.base.errors import BadInputError

_WEIGHT_BYTES = 4


def who_vouches(folder: Place, step: int) -> Vouched:
    """Who has signed a checkpoint, all of which is read back. Raises `CheckpointError`: it is not what was signed."""
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    return verify(home, manifest, manifest.parts)


def tokenizer_of(manifest: Manifest) -> TextTokenizer:
    """The tokenizer that a checkpoint's model has learned.

    All but `bytes` come from what the run names as its data, and what lies there may be another text by now: a byte-
    pair encoding trained on that has the same size, and its numbers mean other letters. The data's hash covers both.

    Raises:
        BadInputError: the data is not here, or is not what the run was trained on.
    """
    if manifest.config.data.tokenizer == BYTES:
        return make_tokenizer(BYTES, [])
    data = Dataset(manifest.config)
    found = data.describe()
    if (found.data_hash, found.vocabulary) != (manifest.data_hash, manifest.vocabulary):
        raise BadInputError(
            f"data.source: {found.source} is not here what the run was trained on (its hash is {found.data_hash[:16]},"
            f" not {manifest.data_hash[:16]}), so its tokenizer may be another one; the same files and Python are"
            " needed"
        )
    return data.tokenizer


def layouts_held(home: Place, manifest: Manifest) -> list[StageLayout]:
    """The layout of each stage of a checkpoint whose parts are there and large enough for its weights. No part is read:
    afterwards nobody makes room for more weights than lie there.

    Raises:
        CheckpointError: they are not the model that the manifest speaks of. Anybody can write a manifest whose sum is
            right, so what it says is no more to be believed than what lies beside it.
    """
    try:
        manifest.config.validate()
        layouts = layouts_of(manifest)
        check_whole(layouts)
    except ValueError as error:
        raise CheckpointError(f"{_wrong(manifest)}: {error}") from error
    check_there(home, manifest.parts, on(home).sizes())
    for stage, layout in enumerate(layouts):
        parts = [part for part in manifest.parts if part.stage == stage]
        shards = {part.shard for part in parts}
        whole = parts and len(parts) == manifest.partition[stage][2] and shards == set(range(len(parts)))
        if not whole or sum(part.byte_count for part in parts) < layout.parameter_count * _WEIGHT_BYTES:
            raise _not_the_weights(manifest, stage, layout)
    return layouts


def stage_weights(home: Place, manifest: Manifest, layouts: Sequence[StageLayout], stage: int) -> Tensor:
    """[parameter_count] fp32 of a stage: one part after the other is verified and put into it, the weights alone.

    Args:
        layouts: what `layouts_held` gave.
    Raises:
        CheckpointError: a part is damaged, or they are not the stage's weights.
    """
    layout = layouts[stage]
    flat, end = torch.empty(layout.parameter_count), 0
    for part in sorted((part for part in manifest.parts if part.stage == stage), key=lambda part: part.shard):
        params = read_verified(home, manifest, part, ("params",)).get("params")
        begin = end
        if params is None or params.dim() != 1 or params.dtype != flat.dtype or len(params) > len(flat) - begin:
            raise _not_the_weights(manifest, stage, layout)
        end += len(params)
        flat[begin:end] = params
        del params  # before the next is there
    if end != len(flat):
        raise _not_the_weights(manifest, stage, layout)
    return flat


def _wrong(manifest: Manifest) -> str:
    return f"checkpoint {manifest.step} is none that its run can have written"


def _not_the_weights(manifest: Manifest, stage: int, layout: StageLayout) -> CheckpointError:
    return CheckpointError(
        f"{_wrong(manifest)}: the weights of stage {stage} are not the {layout.parameter_count} it has"
    )


def export_checkpoint(folder: Place, step: int, out: Path) -> None:
    """Writes the model of a checkpoint to `out`, stage by stage: in memory are the weights of one stage and of one of
    its parts, 4 bytes each (8 B parameters in four stages of four servers: 10 GB). No moment is read into it.

    Args:
        folder: the run's folder of checkpoints (`checkpoint.run_folder`).
    Raises:
        CheckpointError: the checkpoint is not complete, or is none that a run can have written.
        BadInputError: as `tokenizer_of`; said before the weights are read, which takes minutes.
    """
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    tokenizer = tokenizer_of(manifest)
    layouts = layouts_held(home, manifest)
    export_stages(out, layouts, partial(stage_weights, home, manifest, layouts), tokenizer)
