"""A model out of a checkpoint: the shards of all stages put together, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from node.compute.checkpoint import Manifest, read_checkpoint, read_manifest, step_folder
from node.compute.cut_anew import layouts_of
from node.compute.export import export_model, join_shards
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


def export_checkpoint(folder: Place, step: int, out: Path) -> None:
    """Writes the model of a checkpoint to `out`.

    Args:
        folder: the run's folder of checkpoints (`checkpoint.run_folder`).
    Raises:
        CheckpointError: the checkpoint is not complete.
        BadInputError: as `tokenizer_of`; said before the weights are read, which takes minutes.
    """
    tokenizer = tokenizer_of(read_manifest(step_folder(folder, step)))
    manifest, shards = read_checkpoint(folder, step)
    stages = []
    for stage, layout in enumerate(layouts_of(manifest)):
        count = manifest.partition[stage][2]
        stages.append((layout, join_shards([shards[stage, shard]["params"] for shard in range(count)])))
    export_model(out, stages, tokenizer)
