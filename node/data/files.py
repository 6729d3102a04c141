"""Files of text, read as streams: .txt, .md and .jsonl, plain or as .gz or .zst, and .parquet and .arrow tables.

Tables and .zst need pyarrow (`pip install 'barnraise[data]'`).
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from node.data.pieces import PIECE_CHARACTERS, Piece, blocks_of, pieces_of
from protocol.base.errors import BadInputError

_PLAIN = (".txt", ".md", ".jsonl")
_PACKED = (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
_KINDS = ", ".join((*_PLAIN, *_TABLES))
LINE_CHARACTERS_MAX = 16 << 20
"""Of a jsonl line; at 4 bytes a character and with its copy as a text, 128 MB."""
_ROWS_AT_ONCE = 64
_BUFFER_BYTES = 1 << 20


def at_home(field: str, path: str) -> Path:
    """The path, with `~` or `~USER` at its beginning put in full. Raises `BadInputError` where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadInputError(f"{field}: {path!r} begins with the home of somebody who has none here") from error


def find_files(source: str) -> list[Path]:
    """A file, every file of a known kind below a folder, or what a pattern matches; sorted by path.

    Raises `BadInputError`.
    """
    path = at_home("data.source", source)
    try:
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = sorted(each for each in path.rglob("*") if each.is_file() and kind_of(each))
        else:
            found = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    except (OSError, ValueError) as error:  # not ours to look into, too long for a name, or with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadInputError(f"data.source: {source!r} cannot be looked at: {reason}") from error
    if not found:
        raise BadInputError(f"data.source: no {_KINDS} file at {source!r}")
    for each in found:
        if not kind_of(each):
            raise BadInputError(f"data.source: {each} is not a {_KINDS} file ({' or '.join(_PACKED)} may follow)")
    return found


def kind_of(path: Path) -> str:
    """The suffix that says what it holds, without that of the packing; empty where it is of no known kind."""
    if path.suffix in _TABLES:
        return path.suffix
    suffix = Path(path.stem).suffix if path.suffix in _PACKED else path.suffix
    return suffix if suffix in _PLAIN else ""


def file_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    """The documents of a file: the whole text, or each line of a jsonl file, or each row of a table.

    Raises:
        BadInputError: it cannot be read, or has no such field; the sentence names the file.
    """
    kind = kind_of(path)
    try:
        if kind in _TABLES:
            for text in _table_texts(path, text_field):
                yield from pieces_of(blocks_of(text))
        else:
            with _open(path) as file:
                if kind == ".jsonl":
                    for text in _json_texts(path, file, text_field):
                        yield from pieces_of(blocks_of(text))
                else:
                    yield from pieces_of(iter(lambda: file.read(PIECE_CHARACTERS), ""))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise BadInputError(f"data.source: {path} cannot be read as UTF-8 text: {error}") from error


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    with contextlib.ExitStack() as stack:
        raw: IO[bytes]
        if path.suffix == ".gz":
            raw = cast(IO[bytes], stack.enter_context(gzip.open(path, "rb")))
        elif path.suffix == ".zst":
            raw = stack.enter_context(_arrow("pyarrow", path).input_stream(str(path), compression="zstd"))
        else:
            raw = stack.enter_context(path.open("rb"))
        # The stack, not the wrapper, closes `raw`; a wrapper that nobody closes would say so.
        yield stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8"))


def _json_texts(path: Path, file: IO[str], text_field: str) -> Iterator[str]:
    number = 0
    while line := file.readline(LINE_CHARACTERS_MAX + 1):
        number += 1
        if len(line) > LINE_CHARACTERS_MAX:
            raise BadInputError(f"data.source: {path}:{number} is longer than {LINE_CHARACTERS_MAX} characters")
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInputError(f"data.source: {path}:{number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or not isinstance(entry.get(text_field), str):
            raise BadInputError(f"data.text_field: {path}:{number} has no text in the field {text_field!r}")
        yield entry[text_field]


def _table_texts(path: Path, text_field: str) -> Iterator[str]:
    """Rows without a text are none."""
    arrow = _arrow("pyarrow", path)
    try:
        with contextlib.ExitStack() as stack:
            if path.suffix == ".parquet":
                table = stack.enter_context(
                    _arrow("pyarrow.parquet", path).ParquetFile(path, buffer_size=_BUFFER_BYTES)
                )
                _check_column(path, table.schema_arrow, text_field, arrow)
                batches = table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[text_field], use_threads=False)
            else:
                stream = stack.enter_context(arrow.OSFile(str(path), "rb"))
                batches = stack.enter_context(_arrow("pyarrow.ipc", path).open_stream(stream))
                _check_column(path, batches.schema, text_field, arrow)
            for batch in batches:
                column = batch.column(batch.schema.get_field_index(text_field))
                column.validate(full=True)  # a text that lies outside of a damaged file would be this process's memory
                for value in column:
                    text = value.as_py()
                    if text is not None:
                        yield text
    except arrow.ArrowException as error:
        raise BadInputError(f"data.source: {path} cannot be read as a table: {error}") from error


def _check_column(path: Path, schema: Any, text_field: str, arrow: Any) -> None:
    names = list(schema.names)
    if names.count(text_field) != 1:
        listed = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        raise BadInputError(f"data.text_field: {path} has no column {text_field!r}; it has {listed}")
    kind = schema.field(text_field).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise BadInputError(f"data.text_field: the column {text_field!r} of {path} holds {kind}, not text")


def _arrow(module: str, path: Path) -> Any:
    try:
        return cast(Any, importlib.import_module(module))
    except ImportError as error:
        raise BadInputError(
            f"data.source: {path} needs pyarrow, which is not installed here: pip install 'barnraise[data]'"
        ) from error
