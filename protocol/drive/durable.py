"""A small file is replaced by a name that comes into place at once, and only when its bytes are on the disk.

A rename without a sync may outlive the bytes: after a power cut the file is there and empty, on several file systems,
and an empty file of limits or consents says something that nobody has said.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from protocol.drive.file_lock import sync_folder

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The disk or its owner's part of it is full: that passes, and nobody named the folder wrongly."""
DISK_TROUBLE = NO_ROOM | {errno.EIO}
"""What a disk may say of itself at any time, whatever was asked for on the command line."""


def replace_durably(path: Path, data: bytes, mode: int = 0o666) -> None:
    """The file holds `data` after a power cut too, or what it held before; a file that could not be written leaves no
    draft. Each writer has a draft of its own, so two at once do not mix their words.

    Args:
        mode: who may read the file, before the umask; 0o600: its owner alone, from the first moment on.
    Raises:
        OSError: it was not written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(draft, flags, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    with suppress(OSError):  # a file system that cannot sync a folder; the file is in place
        sync_folder(path.parent)
