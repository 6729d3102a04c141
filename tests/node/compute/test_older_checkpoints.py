"""Checkpoints that older builds wrote (`tests/golden/older_checkpoints`) are found, verified and read.

One is of the last build of version 1.1, the other of a build that hashed keys which that one had not."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from node.compute.checkpoint import (
    CheckpointError,
    check_run,
    read_manifest,
    read_part,
    run_folder,
    scan_checkpoints,
    step_folder,
)
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig
from tests.node.compute.whole_checkpoint import read_checkpoint

GOLDEN = Path(__file__).parents[2] / "golden" / "older_checkpoints"
CONFIG = RunConfig()
NAMES = sorted(home.name for home in GOLDEN.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_an_older_build_is_found_verified_and_read(tmp_path: Path, name: str) -> None:
    """In the folder that the older build named, which stays in use; of another run it is refused as before."""
    shutil.copytree(GOLDEN / name, tmp_path / name)
    folder = run_folder(tmp_path, CONFIG)
    assert folder == tmp_path / name
    assert scan_checkpoints(folder)[0] == (10,)
    manifest, parts = read_checkpoint(folder, 10)
    assert parts[0, 0]["params"].tolist() == [0.0, 1.0, 2.0, 3.0]
    check_run(manifest, CONFIG)
    part = step_folder(folder, 10) / manifest.parts[0].file
    about = {"config_hash": CONFIG.config_hash().hex(), "version": 10}
    assert read_part(part, about, CONFIG)["params"].tolist() == [0.0, 1.0, 2.0, 3.0]
    other = RunConfig(seed=2)
    assert run_folder(tmp_path, other) != folder
    with pytest.raises(BadInputError, match="of another configuration"):
        check_run(manifest, other)
    with pytest.raises(CheckpointError, match="config_hash is"):
        read_part(part, {**about, "config_hash": other.config_hash().hex()}, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_of_an_older_build_that_was_changed_is_refused(tmp_path: Path, name: str) -> None:
    """Its sum is over what stands there, known keys or not."""
    home = shutil.copytree(GOLDEN / name / "step-00000010", tmp_path / "step-00000010")
    path = home / "manifest.json"
    assert read_manifest(home).step == 10
    for found, put in ((b'"seed": 1', b'"seed": 2'), (b'"data_cursor": 160', b'"data_cursor": 161')):
        path.write_bytes((GOLDEN / name / "step-00000010" / "manifest.json").read_bytes().replace(found, put))
        with pytest.raises(CheckpointError, match="its sum does not fit"):
            read_manifest(home)


def test_a_new_run_gets_the_folder_of_this_build(tmp_path: Path) -> None:
    """Only a folder that is there is taken for an older one's."""
    assert run_folder(tmp_path, CONFIG).name == f"demo-{CONFIG.config_hash().hex()[:16]}"
    assert msgspec.structs.replace(CONFIG, name="other").config_hash() != CONFIG.config_hash()
