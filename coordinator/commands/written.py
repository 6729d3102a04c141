"""What a command writes for its caller: a file that cannot be written is said in a sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from protocol.base.errors import BadInputError
from protocol.drive.folders import check_writable


def check_file(option: str, path: Path) -> None:
    """Whether `write_file` could write here, asked before long work is done for it. Raises what that would raise."""
    if path.is_dir():
        raise BadInputError(f"{option}: {path} cannot be written: {os.strerror(errno.EISDIR)}")
    if not path.parent.exists():
        raise BadInputError(f"{option}: {path} cannot be written: {os.strerror(errno.ENOENT)}")
    check_writable(option, path, path.parent)


def write_file(option: str, path: Path, text: str, *, makes_folder: bool = False) -> None:
    """Raises `BadInputError` that names the option. `makes_folder`: the one that it lies in need not be there."""
    try:
        if makes_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{option}: {path} cannot be written: {error.strerror}") from error
