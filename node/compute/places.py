"""A place for checkpoints: a folder of this computer, or a prefix of an object store. One interface serves both.

A `Place` has a name, `place / NAME` is below it, and `str(place)` is how sentences call it; `on(place)` has what can be
done there. Every error is an `OSError`: `FileNotFoundError` where there is nothing, and whatever else went wrong.

What a place promises: a file is there whole or not at all, also when its writer is killed; what was written is durable
when the call returns; and of two who `add` one name only one succeeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.compute.object_store import QUICK, StoreFiles, StorePlace, TooLargeError, open_store
from protocol.base.errors import BadInputError
from protocol.run.places import check_url, is_url
from protocol.run.run import RunConfig

Place = Path | StorePlace
READ_BYTES = 1 << 20
_FETCHED = ".barnraise-fetched-"


class Files(Protocol):
    """What can be done at a place. Names are those of files directly there."""

    reads_back: bool
    """Whether who makes a checkpoint complete reads all parts back. In a store each was read back by who brought it,
    and is the same for everybody; there it looks whether they are there."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file; empty where nothing is."""

    def below(self) -> list[str]:
        """Names of the places directly below, sorted."""

    def exists(self) -> bool: ...

    def read(self, name: str, bytes_max: int) -> bytes:
        """A small file. Raises `TooLargeError` for one that is not."""

    def digest(self, name: str) -> tuple[int, bytes]:
        """(bytes, BLAKE2b-256) of a file, read in pieces."""

    def fetch(self, name: str, to: Path) -> None:
        """Copies a file to this computer."""

    def keep(self, temporary: Path, name: str) -> None:
        """Gives a finished file of this computer, which may vanish, its name here."""

    def put(self, name: str, data: bytes) -> None:
        """Writes a small file, or writes it anew."""

    def add(self, name: str, data: bytes) -> bool:
        """Writes a small file unless one of that name is there; returns whether it did."""

    def swap(self, name: str, data: bytes, seen: bytes) -> bool:
        """Writes a small file anew if it still holds `seen`; returns whether it did. A folder cannot look and write at
        once, nor can the local store."""

    def rename(self, name: str, other: str) -> None:
        """Raises `FileNotFoundError`."""

    def remove(self, names: Iterable[str]) -> None:
        """What is not there is no error."""

    def remove_all(self) -> None:
        """All that lies here; a folder goes, too. What cannot be removed stays."""

    def try_writing(self) -> None:
        """Writes a byte durably, and takes it away: where writing hangs, so does this."""


def on(place: Place) -> Files:
    """What can be done there."""
    return Folder(place) if isinstance(place, Path) else place.files


def open_place(text: str | Path, field: str = "") -> Place:
    """The place that a text names: a path, or a URL.

    Raises:
        BadInputError: it is a URL that names no place, or the extra for object stores is not installed; begins with
            `field`.
    """
    if isinstance(text, Path) or not is_url(text):
        return Path(text)
    check_url(field, text)
    try:
        return open_store(text.rstrip("/") if not text.endswith("://") else text)
    except BadInputError as error:
        raise BadInputError(f"{field}: {error}") from error


def place_of(state: Path, config: RunConfig) -> Place:
    """Where a run's servers keep its checkpoints, below which each run has its own place. Raises `BadInputError`."""
    folder = config.checkpoint.folder
    return open_place(folder, "checkpoint.folder") if is_url(folder) else state / folder


def soon(place: Place) -> Place:
    """The same for a look that somebody waits for: a store that does not answer soon does not answer."""
    return place if isinstance(place, Path) else place.with_patience(QUICK)


@contextlib.contextmanager
def nearby(
    place: Place, names: Iterable[str], scratch: Path | None = None, progress: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """A folder of this computer with those of these files that a place has: itself, or copies until the context ends.

    Args:
        scratch: where there is room for them; made if need be. It is this process's alone, which fetches one after the
            other: what lies there was left by one that was killed, for want of memory while it loaded its shard, say,
            and would be joined by as much at every start.
        progress: called with every piece that has come.
    """
    if isinstance(place, Path):
        yield place
        return
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        for left in scratch.glob(f"{_FETCHED}*"):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_FETCHED, dir=scratch) as folder:
        files = StoreFiles(place, progress)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                files.fetch(name, Path(folder) / name)
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of this computer, which others may share. Files appear by write to a temporary name, fsync, rename,
    fsync of the folder."""

    path: Path
    reads_back = True

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for path in self._children():
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    found[path.name] = path.stat().st_size
        return found

    def below(self) -> list[str]:
        return sorted(path.name for path in self._children() if path.is_dir())

    def _children(self) -> list[Path]:
        try:
            return list(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return []

    def exists(self) -> bool:
        return self.path.is_dir()

    def read(self, name: str, bytes_max: int) -> bytes:
        with (self.path / name).open("rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise TooLargeError(bytes_max)
        return data

    def digest(self, name: str) -> tuple[int, bytes]:
        return file_digest(self.path / name)

    def fetch(self, name: str, to: Path) -> None:
        shutil.copyfile(self.path / name, to)

    def keep(self, temporary: Path, name: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        publish(temporary, self.path / name)

    def put(self, name: str, data: bytes) -> None:
        with self._written(name, data) as temporary:
            publish(temporary, self.path / name)

    def add(self, name: str, data: bytes) -> bool:
        path = self.path / name
        with self._written(name, data) as temporary:
            sync(temporary)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                if path.exists():
                    return False
                temporary.rename(path)
            sync(self.path)
        return True

    def swap(self, name: str, data: bytes, seen: bytes) -> bool:
        self.put(name, data)
        return True

    @contextlib.contextmanager
    def _written(self, name: str, data: bytes) -> Iterator[Path]:
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.path / f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            temporary.write_bytes(data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def rename(self, name: str, other: str) -> None:
        (self.path / name).rename(self.path / other)
        sync(self.path)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def try_writing(self) -> None:
        """A folder that is full, read-only or not there yet is no reason to say nothing."""
        path = self.path / f".try.{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(OSError):
            try:
                path.write_bytes(b"?")
                sync(path)
            finally:
                path.unlink(missing_ok=True)


def file_digest(path: Path) -> tuple[int, bytes]:
    """(bytes, BLAKE2b-256) of a file, read from the disk in pieces."""
    state = hashlib.blake2b(digest_size=32)
    byte_count = 0
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            state.update(piece)
            byte_count += len(piece)
    return byte_count, state.digest()


def publish(temporary: Path, path: Path) -> None:
    """Gives a finished file its name, durably."""
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
