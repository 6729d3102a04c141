"""Prepared folders: text tokenized once into files of tokens, with a hash, for as many runs as want it.

    data.json                what is in it (`Prepared`)
    tokenizer.json           the tokenizer
    tokens-PART-FILE.bin     tokens, little-endian, 2 or 4 bytes each; at most `FILE_TOKENS` a file
    documents-PART.bin       for each document the place in its part's row at which it ends, 8 bytes little-endian

The names of the files follow from the numbers in `data.json`; it holds no path, so nothing outside the folder is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from node.data.pieces import Piece
from node.data.rows import FileRow, Tokens
from node.data.sources import BUILTIN_GRAMMAR, read_pieces, training_texts
from node.data.tokenizer import TextTokenizer, make_tokenizer, read_tokenizer
from protocol.base.errors import BadInputError
from protocol.drive.file_lock import OPEN_FLAGS, sync_folder, try_lock
from protocol.run.mixture import PARTS_MAX, is_part_name
from protocol.run.run import DataSection

INDEX = "data.json"
TOKENIZER = "tokenizer.json"
FILE_TOKENS = 1 << 27
"""256 or 512 MiB: few files, each of which any file system and any copying program takes."""
_INDEX_BYTES_MAX = 1 << 20
_TOKENS_MAX = 1 << 48
_OURS = re.compile(r"data\.json|tokenizer\.json|tokens-\d+-\d+\.bin|documents-\d+\.bin")
_SHORT = 1 << 16
"""Vocabularies up to this size have tokens of 2 bytes."""
_READ_TOKENS = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=1, le=_TOKENS_MAX)]


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One source's tokens."""

    name: str
    tokens: _Count
    documents: _Count


class Prepared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data.json`."""

    format: Literal[1] = 1
    tokenizer: str
    """What was asked for: `bytes`, `bpe:SIZE` or a path."""
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=1 << 31)]
    token_bytes: Literal[2, 4]
    parts: Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=PARTS_MAX)]
    data_hash: str
    """Hexadecimal BLAKE2b-256 over tokenizer, tokens and parts: that of the same text when a run reads it itself."""

    @property
    def tokens(self) -> int:
        """Of all parts."""
        return sum(part.tokens for part in self.parts)


class DataHash:
    """BLAKE2b-256 over a tokenizer and all tokens, as they come."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._state = hashlib.blake2b(digest_size=32, person=b"br-data")
        self._state.update(hashlib.blake2b(tokenizer.to_json().encode()).digest())

    def tokens(self, tokens: Tokens) -> None:
        """Takes the next ones."""
        self._state.update(np.ascontiguousarray(tokens, dtype="<i4").data)

    def text(self, text: str) -> None:
        """Takes what stands for a source that is no row of tokens."""
        self._state.update(text.encode())

    def parts(self, parts: Sequence[Part]) -> None:
        """Where parts lie matters as soon as there are several: a mixture draws from each."""
        if len(parts) > 1:
            self.text("".join(f"{part.name} {part.tokens}\n" for part in parts))

    def hexdigest(self) -> str:
        return self._state.hexdigest()


# ---- writing ---------------------------------------------------------------------------------------------------


def prepare(
    sources: Sequence[tuple[str, str]],
    text_field: str,
    tokenizer: str,
    out: Path,
    progress: Callable[[str, int], None] = lambda _name, _tokens: None,
) -> Prepared:
    """Tokenizes the sources, each a (name, source as in RUN.toml), into the new folder `out`.

    A few megabytes of text stand in memory at a time, and what a tokenizer's training keeps of 64 MiB of it. Half a
    folder is never taken for a whole one: it gets its name when all of it is on the disk.

    Args:
        progress: gets a part's name and how many tokens it has so far, some times a second.
    Raises:
        BadInputError: a source, the tokenizer or the folder cannot be used; a sentence.
    """
    _check_names(sources)
    if out.name in ("", ".."):
        raise BadInputError(
            f"--out: {out} has no name of its own, under which half of it could wait; name a new folder"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInputError(f"--out: {out} is there already; name a new folder")
    sections = [(name, DataSection(source=source, text_field=text_field)) for name, source in sources]
    trained = make_tokenizer(tokenizer, (text for _, section in sections for text in training_texts(section)))
    try:
        with _partial(out) as partial:
            found = _write(partial, sections, tokenizer, trained, progress)
            sync_folder(partial)
            if out.exists():
                out.rmdir()
            partial.rename(out)
            sync_folder(out.parent)
    except OSError as error:
        raise BadInputError(f"--out: {error.filename or out} cannot be written: {error.strerror}") from error
    return found


@contextlib.contextmanager
def _partial(out: Path) -> Iterator[Path]:
    """A new folder beside `out` for what is not whole yet, which goes when the context ends; no other process has it.

    What one that was killed has left there goes, too, and nothing else: the name is no one's but by custom.
    """
    partial, lock = (out.with_name(f"{out.name}{end}") for end in (".partial", ".lock"))
    out.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(lock, OPEN_FLAGS, 0o600)
    try:
        if not try_lock(handle):
            raise BadInputError(f"--out: another process prepares {out}")
        try:
            if partial.exists():
                if any(_OURS.fullmatch(path.name) is None for path in partial.iterdir()):
                    raise BadInputError(f"--out: {partial} is there and holds other files; move it away")
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                yield partial
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            with contextlib.suppress(OSError):  # a system may forbid it while the file is open
                lock.unlink()
    finally:
        os.close(handle)


def _check_names(sources: Sequence[tuple[str, str]]) -> None:
    names = [name for name, _ in sources]
    for name, source in sources:
        if not is_part_name(name):
            raise BadInputError(
                f"SOURCE: {name!r} is no name (lower-case letters, digits, - and _); say NAME={source} to give one"
            )
        if names.count(name) > 1:
            raise BadInputError(f"SOURCE: two sources are called {name}; say NAME={source} to give another name")
        if source == BUILTIN_GRAMMAR:
            raise BadInputError(f"SOURCE: {source} has no end, so it cannot be prepared")
    if len(sources) > PARTS_MAX:
        raise BadInputError(f"SOURCE: more than {PARTS_MAX} sources")


def _write(
    folder: Path,
    sections: Sequence[tuple[str, DataSection]],
    choice: str,
    tokenizer: TextTokenizer,
    progress: Callable[[str, int], None],
) -> Prepared:
    width: Literal[2, 4] = 2 if tokenizer.vocabulary <= _SHORT else 4
    digest = DataHash(tokenizer)
    parts = []
    for number, (name, section) in enumerate(sections):
        pieces = read_pieces(section)
        part = _write_part(folder, number, name, pieces, tokenizer, width, digest, progress)
        if part is None:
            raise BadInputError(f"SOURCE: {section.source} holds no text")
        parts.append(part)
    digest.parts(parts)
    _write_file(folder / TOKENIZER, tokenizer.to_json().encode())
    found = Prepared(
        tokenizer=choice,
        vocabulary=tokenizer.vocabulary,
        token_bytes=width,
        parts=tuple(parts),
        data_hash=digest.hexdigest(),
    )
    _write_file(folder / INDEX, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return found


def _write_part(
    folder: Path,
    number: int,
    name: str,
    pieces: Iterator[Piece],
    tokenizer: TextTokenizer,
    width: int,
    digest: DataHash,
    progress: Callable[[str, int], None],
) -> Part | None:
    """None where the source holds no text."""
    count = documents = 0
    with _TokenFiles(folder, number, width) as files, _documents(folder, number).open("wb") as places:
        for tokens, ends in tokenizer.encode_pieces(pieces):
            digest.tokens(tokens)
            files.write(tokens)
            places.write((np.array(ends, dtype="<u8") + np.uint64(count)).astype("<u8").tobytes())
            count, documents = count + len(tokens), documents + len(ends)
            progress(name, count)
        places.flush()
        _settle(places.fileno())
    return Part(name=name, tokens=count, documents=documents) if count else None


class _TokenFiles:
    """Writes a row into files of `FILE_TOKENS`."""

    def __init__(self, folder: Path, part: int, width: int) -> None:
        self._folder = folder
        self._part = part
        self._width = width
        self._written = 0
        self._file = _tokens(folder, part, 0).open("wb")

    def __enter__(self) -> _TokenFiles:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self._finish()
        self._file.close()

    def write(self, tokens: Tokens) -> None:
        content = tokens.astype(f"<u{self._width}")
        while len(content):
            room = FILE_TOKENS - self._written % FILE_TOKENS
            self._file.write(content[:room].tobytes())
            self._written += min(room, len(content))
            content = content[room:]
            if self._written % FILE_TOKENS == 0:
                self._finish()
                self._file.close()
                self._file = _tokens(self._folder, self._part, self._written // FILE_TOKENS).open("wb")

    def _finish(self) -> None:
        self._file.flush()
        _settle(self._file.fileno())


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        _settle(file.fileno())


def _settle(handle: int) -> None:
    os.fsync(handle)


def _tokens(folder: Path, part: int, file: int) -> Path:
    return folder / f"tokens-{part:02d}-{file:05d}.bin"


def _documents(folder: Path, part: int) -> Path:
    return folder / f"documents-{part:02d}.bin"


# ---- reading ---------------------------------------------------------------------------------------------------


def is_prepared(source: str) -> bool:
    """Whether a run's source names a prepared folder."""
    try:
        return not source.startswith("builtin:") and source != "" and (Path(source).expanduser() / INDEX).is_file()
    except (OSError, RuntimeError, ValueError):
        return False


_Stamp = tuple[int, int, int]
"""What changes when a file is written or replaced: its number in the file system, its size and its time."""


def _stamp(found: os.stat_result) -> _Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_index(folder: Path) -> tuple[Prepared, _Stamp]:
    """Raises `BadInputError`."""
    try:
        with (folder / INDEX).open("rb") as file:
            stamp, content = _stamp(os.fstat(file.fileno())), file.read(_INDEX_BYTES_MAX)
        return msgspec.json.decode(content, type=Prepared), stamp
    except OSError as error:
        raise BadInputError(f"data.source: {folder / INDEX} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"data.source: {folder / INDEX} is not what `data prepare` writes: {error}") from error


class _Same:
    """A folder is what it was when it was opened.

    Its files are opened anew for every cut, and a run takes weeks: whoever prepares the text again under the same name
    meanwhile would have the rest of the run, or of an epoch, drawn from another one. The hash is compared when a run
    begins to read, so a restart would notice; this does so before.
    """

    def __init__(self, folder: Path, data_hash: str, stamp: _Stamp) -> None:
        self._folder = folder
        self._data_hash = data_hash
        self._stamp = stamp

    def look(self) -> None:
        """Raises `BadInputError`. One look at the file's entry, unless that has changed."""
        with contextlib.suppress(OSError):  # gone: `_read_index` says it
            if _stamp((self._folder / INDEX).stat()) == self._stamp:
                return
        about, stamp = _read_index(self._folder)
        if about.data_hash != self._data_hash:
            raise BadInputError(
                f"data.source: {self._folder} holds other data than it did when this process began to read it: hash"
                f" {about.data_hash[:16]}, not {self._data_hash[:16]}"
            )
        self._stamp = stamp


@dataclass(frozen=True)
class PreparedFolder:
    """A prepared folder that is whole as far as sizes tell."""

    about: Prepared
    tokenizer: TextTokenizer
    rows: tuple[FileRow, ...]
    """One a part."""
    folder: Path

    @classmethod
    def open(cls, source: str) -> PreparedFolder:
        """Raises `BadInputError`: the folder cannot be read, or is not what was written."""
        folder = Path(source).expanduser()
        about, stamp = _read_index(folder)
        tokenizer = read_tokenizer(folder / TOKENIZER)
        if tokenizer.vocabulary != about.vocabulary:
            raise BadInputError(f"data.source: {folder / TOKENIZER} is not the tokenizer of {folder / INDEX}")
        same = _Same(folder, about.data_hash, stamp)
        rows = tuple(cls._row(folder, number, about, same.look) for number in range(len(about.parts)))
        return cls(about, tokenizer, rows, folder)

    @staticmethod
    def _row(folder: Path, number: int, about: Prepared, still_there: Callable[[], None]) -> FileRow:
        part = about.parts[number]
        files = []
        for file, begin in enumerate(range(0, part.tokens, FILE_TOKENS)):
            files.append((_tokens(folder, number, file), min(FILE_TOKENS, part.tokens - begin)))
        sizes = [(path, count * about.token_bytes) for path, count in files]
        for path, expected in [*sizes, (_documents(folder, number), 8 * part.documents)]:
            try:
                size = path.stat().st_size
            except OSError as error:
                raise BadInputError(f"data.source: {path} cannot be read: {error.strerror}") from error
            if size < expected:
                raise BadInputError(f"data.source: {path} has {size} bytes of {expected}: copy the folder again")
        return FileRow(files, about.token_bytes, about.vocabulary, still_there)

    def check(self) -> None:
        """Reads all of it. Raises `BadInputError`: it is not what was written."""
        digest = DataHash(self.tokenizer)
        for row in self.rows:
            for begin in range(0, len(row), _READ_TOKENS):
                digest.tokens(row.cut(begin, min(begin + _READ_TOKENS, len(row))))
        digest.parts(self.about.parts)
        if digest.hexdigest() != self.about.data_hash:
            raise BadInputError(f"data.source: {self.folder} is damaged: its hash is not that of {INDEX}")

    def document(self, part: int, number: int, most: int = _TOKENS_MAX) -> Tokens:
        """The tokens of a document, its end mark included, or the first ones: a file of text is one document, and may
        be larger than any memory. `number` counts from 0 within the part."""
        if not 0 <= number < self.about.parts[part].documents:
            raise BadInputError(f"--document: {self.about.parts[part].name} has {self.about.parts[part].documents}")
        try:
            with _documents(self.folder, part).open("rb") as file:
                file.seek(8 * max(0, number - 1))
                content = file.read(16)
        except OSError as error:
            raise BadInputError(f"{self.folder}: cannot be read: {error.strerror}") from error
        places = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8").tolist()
        begin, end = (0, places[0]) if number == 0 else places
        if not 0 <= begin <= end <= len(self.rows[part]):
            raise BadInputError(f"data.source: {self.folder} is damaged: document {number} ends before it begins")
        end = min(end, begin + most)
        return self.rows[part].cut(begin, end) if begin < end else np.zeros(0, dtype=np.int32)
