"""Key files: made once and whole, readable by their owner only, and damage is told in a sentence (S12)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from protocol.base.errors import BadInputError
from protocol.drive.keyfile import load_identity, load_or_create_identity


def test_made_once(tmp_path: Path) -> None:
    """The first start makes a key with mode 0600 and nothing beside it; later starts read the same one."""
    path = tmp_path / "state" / "key"
    first = load_or_create_identity(path)
    assert load_or_create_identity(path).node == first.node
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["key"]


def test_two_keys_differ(tmp_path: Path) -> None:
    """Every key file holds a key of its own."""
    assert load_or_create_identity(tmp_path / "a").node != load_or_create_identity(tmp_path / "b").node


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o777])
def test_others_may_not_read_it(tmp_path: Path, mode: int) -> None:
    """A key that others can read is refused, with the command that repairs it."""
    path = tmp_path / "key"
    load_or_create_identity(path)
    path.chmod(mode)
    with pytest.raises(BadInputError, match="chmod 600"):
        load_identity(path)


@pytest.mark.parametrize("refused", ["link", "fsync"])
def test_where_none_can_be_made_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """A full disk, or a file system that has no links; no draft is left."""

    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, refused, refuses)
    with pytest.raises(BadInputError, match=r"key file .*key: cannot be made: No space left"):
        load_or_create_identity(tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_damage(tmp_path: Path) -> None:
    """A damaged, missing or linked file is refused, and no part of the key is shown."""
    path = tmp_path / "key"
    load_or_create_identity(path)
    content = path.read_text()
    for damaged in ("", content[:-5], content + "x", content.upper(), "barnraise-key-1:", "\xff" * 10):
        path.write_text(damaged)
        with pytest.raises(BadInputError) as caught:
            load_identity(path)
        assert content.partition(":")[2][:12] not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
    path.unlink()
    with pytest.raises(BadInputError, match="cannot be read"):
        load_identity(path)
    (tmp_path / "real").write_text(content)
    os.chmod(tmp_path / "real", 0o600)
    path.symlink_to(tmp_path / "real")
    with pytest.raises(BadInputError):
        load_identity(path)
    with pytest.raises(BadInputError):
        load_identity(tmp_path)


def test_a_racing_start_wins_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process makes the key between our look and our write, its key is the one that counts."""
    path = tmp_path / "key"
    winner = load_or_create_identity(path).node
    looked = iter([False])
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: next(looked, exists(self)))
    assert load_or_create_identity(path).node == winner
    assert [file.name for file in tmp_path.iterdir()] == ["key"]
