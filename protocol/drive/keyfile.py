"""Keeps an identity's seed in a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from protocol.base.errors import BadInputError
from protocol.drive.file_lock import sync_folder
from protocol.trust.identity import SEED_BYTES, Identity, base32, unbase32

_PREFIX = "barnraise-key-1:"


def load_or_create_identity(path: Path) -> Identity:
    """The identity of the key file; a missing one is made, with mode 0600, whole or not at all.

    Two processes that start at once end with the same key. Raises `BadInputError` when the file is damaged, when others
    than its owner may read it, or when none can be made there.
    """
    if not path.exists():
        try:
            _create(path)
        except OSError as error:  # a full disk, a folder of somebody else's, a file system without links
            raise BadInputError(f"key file {path}: cannot be made: {error.strerror or error}") from error
    return load_identity(path)


def load_identity(path: Path) -> Identity:
    """The identity of an existing key file. Raises `BadInputError`."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        )
    except OSError as error:
        raise BadInputError(f"key file {path}: cannot be read: {error.strerror}") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise BadInputError(f"key file {path.name}: not a regular file")
        if os.name == "posix" and mode & 0o077:  # elsewhere the mode says nothing: the user's profile is private
            raise BadInputError(f"key file {path.name}: mode {mode & 0o777:04o} lets others read it; run chmod 600")
        content = os.read(descriptor, 256)
    finally:
        os.close(descriptor)
    try:
        text = content.decode("ascii").removesuffix("\n")
        if not text.startswith(_PREFIX):
            raise ValueError
        seed = unbase32(text.removeprefix(_PREFIX))
        if len(seed) != SEED_BYTES:
            raise ValueError
    except ValueError:
        # Not chained: the error's text would show part of the key.
        raise BadInputError(f"key file {path.name}: damaged; restore it, or remove it for a new identity") from None
    return Identity(seed)


def _create(path: Path) -> None:
    """Write to a name of our own, then link: the first of two starters wins, and nobody sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"{_PREFIX}{base32(secrets.token_bytes(SEED_BYTES))}\n".encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
    sync_folder(path.parent)
