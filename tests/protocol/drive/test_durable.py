"""A small file is replaced whole and on the disk, or stays what it was."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from protocol.drive.durable import replace_durably


def test_the_bytes_are_on_the_disk_before_the_name_leads_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round a power cut in between leaves an empty file under a name that is trusted."""
    told: list[str] = []
    synced, replaced = os.fsync, os.replace

    def sync(handle: int) -> None:
        told.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        synced(handle)

    def replace(draft: Path, path: Path) -> None:
        told.append(f"{draft.read_text()} is {path.name}")
        replaced(draft, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    replace_durably(tmp_path / "limits.toml", b"new")
    assert told == ["file", "new is limits.toml", "folder"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_stays_what_it_was_and_leaves_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A server that begins again every ten seconds on a full disk would fill the folder with its tries."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "links.json").write_text("old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        replace_durably(tmp_path / "links.json", b"new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("links.json", "old")]


@pytest.mark.skipif(os.name != "posix", reason="modes say nothing here")
def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    """Links and addresses open doors; what stood there before may have been open to all."""
    (tmp_path / "links.json").write_text("old")
    (tmp_path / "links.json").chmod(0o644)
    replace_durably(tmp_path / "links.json", b"new", 0o600)
    assert (tmp_path / "links.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.name != "posix", reason="folders are not synced here")
def test_a_folder_that_cannot_be_synced_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no such call: the file is in place all the same."""
    synced = os.fsync

    def sync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced(handle)

    monkeypatch.setattr(os, "fsync", sync)
    replace_durably(tmp_path / "limits.toml", b"new")
    assert (tmp_path / "limits.toml").read_bytes() == b"new"
