"""Folders that a command is going to write to: whether it can is found out before hours of work, not after."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path

from protocol.base.errors import BadInputError


def check_writable(option: str, given: Path, folder: Path) -> None:
    """Tries whether a file can be written in `folder`, which need not be there yet; leaves nothing behind.

    Raises `BadInputError`, naming the option and its path as it was given.
    """
    missing: list[Path] = []
    try:
        missing += itertools.takewhile(lambda each: not each.exists(), (folder, *folder.parents))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        finally:
            with contextlib.suppress(OSError):  # not made, or somebody has put something there meanwhile
                for made in missing:
                    made.rmdir()
    except OSError as error:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise BadInputError(f"{option}: {given} cannot be written: {reason}") from error
