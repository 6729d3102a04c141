"""Checkpoints in an object store: S3, Google Cloud Storage, Azure, or obstore's local and in-memory ones.

    s3://BUCKET/PREFIX/RUN-CONFIGHASH/step-00000100/stage-0-shard-1-93b0…e1.safetensors … manifest.json

The stores' own protocols, signatures and retries are obstore's; here is what Barnraise asks of them. A part's name
follows from its bytes, so that two who write it write the same; a manifest is put only where none is (PutMode
"create"), or in the place of exactly what was seen there. Large files go up and come down in pieces, each within a
time of its own, so what is slow ends and what hangs is an error.

Who may do what is the store's business, by keys that the operator of each server has in the environment of its process
(AWS_…, AZURE_…, GOOGLE_…). No sentence of ours shows one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from protocol.base.errors import BadInputError
from protocol.run.places import MEMORY, local_folder

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
EXTRA = "pip install 'barnraise[objects]'"
PIECE_BYTES = 8 << 20
"""What one request carries up or down."""
PIECES_MAX = 9000
"""S3 takes 10,000 pieces of one object; larger files go up in larger pieces."""
PIECES_AT_ONCE = 2
LISTED_MAX = 50_000
"""Names in one place: 64 stages of 128 servers have 16,384 parts and seals."""
SENTENCE_MAX = 300
_SECRET = re.compile(r"(AWS|AZURE|GOOGLE|GCP)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL)")
"""Names of variables whose values no sentence repeats, should a store have echoed them."""
_SECRET_LENGTH = 6
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
"""The only word of a store's own answer that is repeated."""


class StoreError(OSError):
    """A store did not do what it was asked; the text is a sentence without anything secret. `strerror` has it without
    the place."""

    def __init__(self, sentence: str, place: str = "") -> None:
        super().__init__(errno.EIO, sentence)
        self.place = place

    def __str__(self) -> str:
        return f"{self.place}: {self.strerror}" if self.place else str(self.strerror)


class TooLargeError(StoreError):
    """A file is larger than anything that belongs there; nothing of it was read."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"larger than {bytes_max} bytes")


@dataclass(frozen=True, slots=True)
class Patience:
    """For how long to wait for a store, in seconds."""

    connect_s: float = 5.0
    request_s: float = 120.0
    """For one request, with its piece: two of 8 MiB at once need 1.1 Mbit/s."""
    again_s: float = 60.0
    """After its beginning no request is made anew."""


USUAL = Patience()
QUICK = Patience(3.0, 10.0, 10.0)
"""For a look, which somebody waits for."""


def open_store(url: str, patience: Patience = USUAL) -> StorePlace:
    """The place that a checked URL names.

    Raises:
        BadInputError: obstore is not installed, or the URL is none that it can open in this environment.
    """
    try:
        import obstore as _  # noqa: F401 - whether it is there, before anybody needs it
    except ImportError as error:
        raise BadInputError(f"{url}: checkpoints in an object store need one more package: {EXTRA}") from error
    return StorePlace(_Root(url, patience), "")


@cache
def _memory(url: str) -> ObjectStore:
    """One for each URL, as long as the process lives."""
    from obstore.store import MemoryStore

    return MemoryStore()


@dataclass(frozen=True, slots=True)
class _Root:
    url: str
    patience: Patience

    def open(self, make: bool) -> ObjectStore:
        """Raises `FileNotFoundError` for a folder that is not there, unless it is to be made."""
        from obstore.store import LocalStore, from_url

        if self.url.startswith(f"{MEMORY}:"):
            return _memory(self.url)
        if (folder := local_folder(self.url)) is not None:
            if not make and not folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return LocalStore(folder, mkdir=make)
        store: ObjectStore = _remote(self.url, self.patience, from_url)
        return store

    @property
    def again_s(self) -> float:
        """A disk answers the second time what it answered the first."""
        return self.patience.again_s if local_folder(self.url) is None else 0.0


@cache
def _remote(url: str, patience: Patience, from_url: Callable[..., Any]) -> Any:
    """One client for each place, with its connections; the environment is read when it is opened."""
    options: dict[str, Any] = {
        "timeout": timedelta(seconds=patience.request_s),
        "connect_timeout": timedelta(seconds=patience.connect_s),
    }
    if os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://"):
        options["allow_http"] = True  # the operator's own store, by the operator's word
    backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=8), "base": 2}
    retries = {"max_retries": 8, "retry_timeout": timedelta(seconds=patience.again_s), "backoff": backoff}
    return from_url(url, client_options=options, retry_config=retries)


@dataclass(frozen=True, slots=True)
class StorePlace:
    """A prefix of a store."""

    root: _Root
    path: str
    """Below the URL; empty: the URL itself."""

    def __truediv__(self, name: str) -> StorePlace:
        return StorePlace(self.root, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return f"{self.root.url}/{self.path}" if self.path else self.root.url

    @property
    def name(self) -> str:
        return str(self).rpartition("/")[2]

    def with_patience(self, patience: Patience) -> StorePlace:
        """The same, for somebody who waits longer or less long."""
        return StorePlace(_Root(self.root.url, patience), self.path)

    @property
    def files(self) -> StoreFiles:
        return StoreFiles(self)


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """What `node.compute.places.Files` says, in a store."""

    place: StorePlace
    progress: Callable[[], None] = field(default=lambda: None)
    """Called with every piece that has come or gone."""
    reads_back = False

    # ---- looking -------------------------------------------------------------------------------------------------

    def sizes(self) -> dict[str, int]:
        import obstore

        def listed(store: ObjectStore) -> dict[str, int]:
            found = obstore.list_with_delimiter(store, self.place.path or None)["objects"]
            return {str(one["path"]).rpartition("/")[2]: int(one["size"]) for one in found}

        return self._bounded(listed)

    def below(self) -> list[str]:
        import obstore

        def listed(store: ObjectStore) -> dict[str, int]:
            found = obstore.list_with_delimiter(store, self.place.path or None)["common_prefixes"]
            return {str(one).rstrip("/").rpartition("/")[2]: 0 for one in found}

        return sorted(self._bounded(listed))

    def _bounded(self, look: Callable[[ObjectStore], dict[str, int]]) -> dict[str, int]:
        try:
            found = self._do("cannot be listed", look)
        except FileNotFoundError:
            return {}
        if len(found) > LISTED_MAX:
            raise StoreError(f"holds more than {LISTED_MAX} names", str(self.place))
        return found

    def exists(self) -> bool:
        """Whether anything is below it: a store has no empty folders."""
        import obstore

        def first(store: ObjectStore) -> bool:
            return any(len(chunk) for chunk in obstore.list(store, self.place.path or None, chunk_size=1))

        try:
            return self._do("cannot be listed", first)
        except FileNotFoundError:
            return False

    def read(self, name: str, bytes_max: int) -> bytes:
        if self._size(name) > bytes_max:
            raise TooLargeError(bytes_max)
        return b"".join(self._pieces(name))

    def _size(self, name: str) -> int:
        import obstore

        return int(self._do("cannot be read", lambda store: obstore.head(store, self._at(name)))["size"])

    def _pieces(self, name: str) -> Iterator[bytes]:
        """The file in ranges, each asked for anew where it fails: a line that breaks loses one piece."""
        import obstore

        size, start, path = self._size(name), 0, self._at(name)
        while start < size:
            length = min(PIECE_BYTES, size - start)

            def one(store: ObjectStore, start: int = start, length: int = length) -> bytes:
                return bytes(obstore.get_range(store, path, start=start, length=length))

            piece = self._do("cannot be read", one)
            if len(piece) != length:
                raise StoreError(f"{name} has changed while it was read")
            self.progress()
            yield piece
            start += length

    def digest(self, name: str) -> tuple[int, bytes]:
        state, byte_count = hashlib.blake2b(digest_size=32), 0
        for piece in self._pieces(name):
            state.update(piece)
            byte_count += len(piece)
        return byte_count, state.digest()

    def fetch(self, name: str, to: Path) -> None:
        with to.open("wb") as file:
            for piece in self._pieces(name):
                file.write(piece)

    # ---- writing -------------------------------------------------------------------------------------------------

    def keep(self, temporary: Path, name: str) -> None:
        import obstore

        size = temporary.stat().st_size
        piece = max(PIECE_BYTES, -(-size // PIECES_MAX))
        path = self._at(name)

        def up(store: ObjectStore) -> object:
            return obstore.put(store, path, temporary, chunk_size=piece, max_concurrency=PIECES_AT_ONCE)

        self._do("cannot be written", up, make=True)
        self._sync(name)

    def put(self, name: str, data: bytes) -> None:
        import obstore

        self._do("cannot be written", lambda store: obstore.put(store, self._at(name), data), make=True)
        self._sync(name)

    def add(self, name: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        def create(store: ObjectStore) -> bool:
            try:
                obstore.put(store, self._at(name), data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            return True

        if not self._do("cannot be written", create, make=True):
            # An answer may have been lost on its way, and the same asked again: what is there may be ours.
            with contextlib.suppress(FileNotFoundError):
                return self.read(name, len(data)) == data if self._size(name) == len(data) else False
            return False
        self._sync(name)
        return True

    def swap(self, name: str, data: bytes, seen: bytes) -> bool:
        import obstore
        from obstore.exceptions import PreconditionError

        def update(store: ObjectStore) -> bool | None:
            try:
                found = obstore.get(store, self._at(name))
            except FileNotFoundError:
                return None
            if found.meta["size"] != len(seen) or bytes(found.bytes()) != seen:
                return False
            tags: Any = {tag: found.meta[tag] for tag in ("e_tag", "version") if found.meta[tag] is not None}
            try:
                obstore.put(store, self._at(name), data, mode=tags)
            except PreconditionError:
                return False
            except NotImplementedError:  # the local store
                return None
            return True

        if (done := self._do("cannot be written", update, make=True)) is None:
            self.remove([name])
            return self.add(name, data)
        return done

    def rename(self, name: str, other: str) -> None:
        import obstore

        self._do("cannot be copied", lambda store: obstore.copy(store, self._at(name), self._at(other)))
        self._sync(other)
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        import obstore

        for path in map(self._at, names):

            def away(store: ObjectStore, path: str = path) -> None:
                obstore.delete(store, path)

            with contextlib.suppress(FileNotFoundError):
                self._do("cannot be removed", away)

    def remove_all(self) -> None:
        with contextlib.suppress(OSError):
            self.remove(self.sizes())
            if (folder := local_folder(self.place.root.url)) is not None:
                (folder / self.place.path).rmdir()  # a store has no empty folders, and the local one leaves them

    def try_writing(self) -> None:
        name = f".try.{secrets.token_hex(8)}"
        self.put(name, b"?")
        self.remove([name])

    # ---- asking --------------------------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self.place.path}/{name}" if self.place.path else name

    def _sync(self, name: str) -> None:
        """The local store leaves that to the system, which may lose it with the power."""
        folder = local_folder(self.place.root.url)
        if folder is not None:
            path = folder / self._at(name)
            for one in (path, path.parent):
                handle = os.open(one, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)

    def _do(self, failed: str, call: Callable[[ObjectStore], T], make: bool = False) -> T:
        """Asks the store, and asks again while it may help and its time is not over.

        Raises:
            FileNotFoundError: there is nothing.
            StoreError: the store does not do it; what had failed is `failed`.
        """
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        begun, pause_s = time.monotonic(), 0.25
        while True:
            try:
                return call(self.place.root.open(make))
            except FileNotFoundError:
                if make:
                    raise StoreError(f"{failed}: there is no such bucket", str(self.place)) from None
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise StoreError(
                    f"{failed}: the store refuses access{_code(error)}; may the keys in this process's environment do"
                    " that?",
                    str(self.place),
                ) from None
            except BaseException as error:
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                if time.monotonic() - begun + pause_s > self.place.root.again_s:
                    raise StoreError(f"{failed}: {sentence(error)}", str(self.place)) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 8.0)


def sentence(error: BaseException) -> str:
    """What a store's error says, in one line: nothing secret, and nothing that the store itself has written but the
    code of its error."""
    first, *_ = str(error).strip().splitlines() or [type(error).__name__]
    if "169.254." in first or "metadata.google" in first:  # where a machine in a cloud would be given keys
        return "there are no keys for it in this process's environment"
    text = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", re.split("[<{]", first, maxsplit=1)[0].strip())
    for name, value in os.environ.items():
        if _SECRET.match(name) and len(value) >= _SECRET_LENGTH:
            text = text.replace(value, "…")
    text += _code(error)
    return text if len(text) <= SENTENCE_MAX else f"{text[:SENTENCE_MAX]}…"


def _code(error: BaseException) -> str:
    found = _CODE.search(str(error))
    return f" ({found[1]})" if found else ""
