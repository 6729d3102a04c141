"""A lock on a file that ends with the process, however it ends: the same on every system."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":  # pragma: no cover - unverified: nobody has run this on Windows yet
    import msvcrt

    def try_lock(handle: int) -> bool:
        """Takes the exclusive lock of an open file; False when another process has it.

        Windows locks bytes and forbids others to read them: the locked byte lies far behind what the file holds.
        """
        os.lseek(handle, 1 << 30, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            os.lseek(handle, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def try_lock(handle: int) -> bool:
        """Takes the exclusive lock of an open file; False when another process has it."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


OPEN_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
"""For opening a lock file: not inherited by children, and no link to somewhere else, where the system knows these."""


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Makes names in a folder durable. Windows has no such call, and needs none (NTFS journals its names)."""
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
