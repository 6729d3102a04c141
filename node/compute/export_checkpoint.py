"""A model out of a checkpoint: the shards of all stages put together, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from node.compute.checkpoint import read_checkpoint, read_manifest, step_folder
from node.compute.cut_anew import layouts_of
from node.compute.export import export_model, join_shards
from node.compute.places import Place
from node.compute.seals import Vouched, verify
from node.data.dataset import Dataset


def who_vouches(folder: Place, step: int) -> Vouched:
    """Who has signed a checkpoint, all of which is read back. Raises `CheckpointError`: it is not what was signed."""
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    return verify(home, manifest, manifest.parts)


def export_checkpoint(folder: Place, step: int, out: Path) -> None:
    """Writes the model of a checkpoint to `out`.

    Args:
        folder: the run's folder of checkpoints (`checkpoint.run_folder`).
    Raises:
        CheckpointError: the checkpoint is not complete.
    """
    manifest, shards = read_checkpoint(folder, step)
    stages = []
    for stage, layout in enumerate(layouts_of(manifest)):
        count = manifest.partition[stage][2]
        stages.append((layout, join_shards([shards[stage, shard]["params"] for shard in range(count)])))
    export_model(out, stages, Dataset(manifest.config).tokenizer)
