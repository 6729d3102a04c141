"""`barnraise checkpoints verify`: what is whole, what is not and why, and an exit code for scripts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from node.commands.checkpoints import checkpoints
from node.commands.members import server
from protocol.base.errors import BadInputError
from tests.node.commands.test_export import scattered, shared
from tests.node.commands.test_members import link

__all__ = ["shared"]


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(checkpoints, ["verify", *map(str, arguments)])


def test_whole_checkpoints_are_named_with_their_size(shared: Path) -> None:
    """Newest first; the last line says what a restart would take."""
    result = verify(shared)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["4", "2"] and "2 parts" in lines[0]
    assert lines[-1] == "all whole; a restart would go on from step 4"


def test_one_changed_byte_is_found_and_its_file_named(shared: Path) -> None:
    """Exit code 1, and which checkpoint is still good."""
    (part,) = shared.glob("*/step-00000004/stage-0-shard-1-*.safetensors")
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    result = verify(shared)
    assert result.exit_code == 1
    assert part.name in result.output and "damaged" in result.output
    assert "the newest whole checkpoint is of step 2; not whole: 1" in result.output
    assert verify(shared, "--step", 2).exit_code == 0
    assert verify(shared, "--step", 4).exit_code == 1


def test_what_has_no_manifest_is_named_and_is_no_damage(shared: Path) -> None:
    """A server that was killed while it deleted one, or writes one just now, leaves that: the others are still whole.
    Asked for by its step, or alone, it is none to begin from."""
    (manifest,) = shared.glob("*/step-00000002/manifest.json")
    manifest.unlink()
    result = verify(shared)
    assert result.exit_code == 0 and "no checkpoint: without a manifest" in result.output
    assert result.output.splitlines()[-1] == "all whole; a restart would go on from step 4"
    assert verify(shared, "--step", 2).exit_code == 1
    next(shared.glob("*/step-00000004/manifest.json")).unlink()
    assert "no checkpoint is whole" in verify(shared).output


def test_parts_that_servers_kept_to_themselves_are_read_together(shared: Path, tmp_path: Path) -> None:
    """All folders: whole. One alone: it is said which part is missing. Nothing is left behind."""
    folders = scattered(shared, tmp_path / "apart")
    before = sorted((tmp_path / "apart").rglob("*"))
    assert verify(*folders).exit_code == 0
    alone = verify(folders[0])
    assert alone.exit_code == 1 and "stage-0-shard-1" in alone.output and "no checkpoint is whole" in alone.output
    assert sorted((tmp_path / "apart").rglob("*")) == before


def test_a_step_or_folder_that_is_not_there_is_said(shared: Path, tmp_path: Path) -> None:
    """A step without a checkpoint is named with those there are; a folder without any is no folder of checkpoints."""
    assert "no checkpoint has step 3; there are those of steps 2, 4" in str(verify(shared, "--step", 3).exception)
    nothing = verify(tmp_path / "nothing")
    assert nothing.exit_code != 0 and "FOLDER" in str(nothing.exception)


def test_a_store_is_verified_by_its_url(shared: Path) -> None:
    """As the folder is; what cannot be read, or is no place, is one sentence and exit code 2."""
    url = f"file://{shared}"
    assert verify(url).output == verify(shared).output
    (part,) = shared.glob("*/step-00000004/stage-0-shard-1-*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    result = verify(url)
    assert result.exit_code == 1 and "NOT WHOLE" in result.output and f"{url}/" in result.output
    assert "there is no checkpoint in" in str(verify(f"{url}/nowhere").exception)
    assert "name a URL alone" in str(verify(url, shared).exception)
    result = verify("s3://KEY:planted@bucket/x")
    assert result.exit_code == 2 and "planted" not in result.output


def test_without_the_extra_one_sentence_says_what_to_install(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder needs nothing."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    result = verify("s3://bucket/x")
    assert isinstance(result.exception, BadInputError)
    assert str(result.exception).endswith("one more package: pip install 'barnraise[objects]'")
    assert verify(shared).exit_code == 0
    refused = CliRunner().invoke(server, ["--checkpoints", "s3://bucket/x", link("server")])
    assert str(refused.exception) == f"--checkpoints: {str(result.exception).partition(': ')[2]}"
