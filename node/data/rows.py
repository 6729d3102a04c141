"""Rows of tokens: numbered from 0, whether they stand in memory or in files."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import numpy.typing as npt

from protocol.base.errors import BadInputError

Tokens = npt.NDArray[np.int32]


class Row(Protocol):
    """Tokens one after the other."""

    def __len__(self) -> int: ...

    def cut(self, begin: int, end: int) -> Tokens:
        """Tokens `begin` to `end` (exclusive), both within the row."""
        ...


class MemoryRow:
    """A row that stands in memory, in the smallest whole numbers that hold it."""

    def __init__(self, tokens: npt.NDArray[np.integer]) -> None:
        self._tokens = tokens
        tokens.setflags(write=False)

    def __len__(self) -> int:
        return len(self._tokens)

    def cut(self, begin: int, end: int) -> Tokens:
        return self._tokens[begin:end].astype(np.int32)


class FileRow:
    """A row that lies in files of little-endian whole numbers, one after the other.

    A cut is read when it is asked for. A memory map would say the same in fewer lines, but what it has touched counts
    as the process's own memory, and a file that somebody shortens would end the process without a word.

    Args:
        files: each with the number of its tokens, at least 1.
        width: bytes a token, 2 or 4.
        vocabulary: every token must be below it.
        still_there: called before a cut is read; raises `BadInputError` where the files are others by now.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        width: int,
        vocabulary: int,
        still_there: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = [path for path, _ in files]
        self._width = width
        self._vocabulary = vocabulary
        self._still_there = still_there
        self._edges = [0, *itertools.accumulate(count for _, count in files)]

    def __len__(self) -> int:
        return self._edges[-1]

    def cut(self, begin: int, end: int) -> Tokens:
        """Raises `BadInputError` where the files are not what was written."""
        self._still_there()
        parts: list[Tokens] = []
        number = bisect.bisect_right(self._edges, begin) - 1
        while begin < end:
            stop = min(end, self._edges[number + 1])
            parts.append(self._read(self._files[number], begin - self._edges[number], stop - begin))
            begin, number = stop, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, path: Path, first: int, count: int) -> Tokens:
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(first * self._width)
                content = _read_all(file, count * self._width)
        except OSError as error:
            raise BadInputError(f"data.source: {path} cannot be read: {error.strerror}") from error
        tokens = np.frombuffer(content, dtype=f"<u{self._width}") if len(content) == count * self._width else None
        if tokens is None or int(tokens.max()) >= self._vocabulary:
            raise BadInputError(f"data.source: {path} is damaged; `barnraise data show --check` says where")
        return tokens.astype(np.int32)


def _read_all(file: IO[bytes], size: int) -> bytes:
    """So many bytes, or those up to the end: file systems of networks may hand out fewer at a time."""
    pieces, left = [], size
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


class JoinedRow:
    """Several rows as one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if len(row)]
        self._edges = [0, *itertools.accumulate(map(len, self._rows))]

    def __len__(self) -> int:
        return self._edges[-1]

    def cut(self, begin: int, end: int) -> Tokens:
        parts: list[Tokens] = []
        number = bisect.bisect_right(self._edges, begin) - 1
        while begin < end:
            edge = self._edges[number]
            stop = min(end, self._edges[number + 1])
            parts.append(self._rows[number].cut(begin - edge, stop - edge))
            begin, number = stop, number + 1
        return np.concatenate(parts)
