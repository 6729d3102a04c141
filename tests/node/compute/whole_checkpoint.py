"""All that a checkpoint holds, for tests that compare it."""

from __future__ import annotations

from torch import Tensor

from node.compute.checkpoint import Manifest, read_manifest, read_verified, step_folder
from node.compute.places import Place


def read_checkpoint(folder: Place, step: int) -> tuple[Manifest, dict[tuple[int, int], dict[str, Tensor]]]:
    """A checkpoint, verified: its manifest, and each (stage, shard)'s state."""
    home = step_folder(folder, step)
    manifest = read_manifest(home)
    return manifest, {(part.stage, part.shard): read_verified(home, manifest, part) for part in manifest.parts}
