"""A model out of a checkpoint: the shards of all stages put together, as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from node.compute.checkpoint import CheckpointError, Manifest, read_checkpoint, read_manifest, step_folder
from node.compute.cut_anew import layouts_of
from node.compute.export import check_whole, export_model, join_shards
from node.compute.layout import StageLayout
from node.compute.places import Place
from node.compute.seals import Vouched, verify
from node.data.dataset import Dataset
from node.data.tokenizer import BYTES, TextTokenizer, make_tokenizer
from protocol.base.errors import BadInputError


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


def stages_of(
    manifest: Manifest, shards: Mapping[tuple[int, int], Mapping[str, Tensor]]
) -> list[tuple[StageLayout, Tensor]]:
    """The layout and the weights of each stage.

    Raises:
        CheckpointError: they are not the model that the manifest speaks of. Anybody can write a manifest whose sum is
            right, so what it says is no more to be believed than what lies beside it.
    """
    wrong = f"checkpoint {manifest.step} is none that its run can have written"
    try:
        manifest.config.validate()
        layouts = layouts_of(manifest)
        check_whole(layouts)
    except ValueError as error:
        raise CheckpointError(f"{wrong}: {error}") from error
    stages = []
    for stage, layout in enumerate(layouts):
        count = manifest.partition[stage][2]
        parts = [shards.get((stage, shard), {}).get("params") for shard in range(min(count, len(shards) + 1))]
        found = [part for part in parts if part is not None and part.dim() == 1 and part.dtype == torch.float32]
        if not found or len(found) != count or sum(map(len, found)) != layout.parameter_count:
            raise CheckpointError(f"{wrong}: the weights of stage {stage} are not the {layout.parameter_count} it has")
        stages.append((layout, join_shards(found)))
    return stages


def export_checkpoint(folder: Place, step: int, out: Path) -> None:
    """Writes the model of a checkpoint to `out`.

    Args:
        folder: the run's folder of checkpoints (`checkpoint.run_folder`).
    Raises:
        CheckpointError: the checkpoint is not complete, or is none that a run can have written.
        BadInputError: as `tokenizer_of`; said before the weights are read, which takes minutes.
    """
    tokenizer = tokenizer_of(read_manifest(step_folder(folder, step)))
    manifest, shards = read_checkpoint(folder, step)
    export_model(out, stages_of(manifest, shards), tokenizer)
