"""Where documents come from: the installed Python's own prose, and files."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from node.data.files import file_pieces, find_files
from node.data.goes_on import watched
from node.data.pieces import Piece, blocks_of, normalise, pieces_of
from protocol.base.errors import BadInputError
from protocol.run.run import DataSection

BUILTIN_PYTHON = "builtin:python"
BUILTIN_GRAMMAR = "builtin:grammar"

_SHORTEST_DOCSTRING = 120
"""Characters; shorter docstrings are signatures and remarks rather than prose."""
_NOT_PROSE = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled"})
"""Folders of the standard library that hold no documentation of it, or code that is not part of it."""
TRAINING_CHARACTERS = 64 << 20
"""Text from which a byte-pair encoding is trained; of several files each gives its share, from its beginning, and at
least a piece."""
TRAINING_CHARACTERS_MAX = 256 << 20
"""Where that comes to more, since there are more than a thousand files, the last of them give nothing. It is as much as
a run reads by itself (`dataset.TEXT_CHARACTERS_MAX`), so no run's tokenizer depends on it."""


def read_pieces(section: DataSection) -> Iterator[Piece]:
    """All documents of `section.source` (not of the grammar, which has no end), in an order that never varies.

    Raises:
        BadInputError: nothing is there, or it cannot be read; the sentence names the field.
    """
    for stream in _streams(section):
        yield from stream


def training_texts(section: DataSection) -> Iterator[str]:
    """What a tokenizer for the source is trained on: all of it up to `TRAINING_CHARACTERS`, or somewhat more where that
    is many files. Raises as `read_pieces`."""
    return _begin_of(_streams(section))  # opened here: a trainer takes the texts in a thread of its own


def _begin_of(streams: list[Iterator[Piece]]) -> Iterator[str]:
    share, left_of_all = TRAINING_CHARACTERS // len(streams), TRAINING_CHARACTERS_MAX
    for stream in streams:
        left = share
        for piece in stream:
            yield piece.text
            left -= len(piece.text)
            left_of_all -= len(piece.text)
            if left_of_all <= 0:
                return
            if left <= 0:
                break


def _streams(section: DataSection) -> list[Iterator[Piece]]:
    source = section.source
    if source == BUILTIN_PYTHON:
        return [watched(itertools.chain.from_iterable(pieces_of(blocks_of(text)) for text in python_documents()))]
    if source.startswith("builtin:"):
        raise BadInputError(f"data.source: there is no {source!r}; use {BUILTIN_PYTHON}, {BUILTIN_GRAMMAR} or a path")
    return [watched(file_pieces(path, section.text_field)) for path in find_files(source)]


# ---- the installed Python -------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def python_documents() -> tuple[str, ...]:
    """The language reference that `help()` shows, then the standard library's docstrings; each text once.

    About 1.9 MB of English; a few seconds. Builds of Python differ, so the hash of the tokens belongs to the run.
    """
    documents = dict.fromkeys(normalise(text) for text in (*_topics(), *_docstrings()))
    return tuple(text for text in documents if text)


def _topics() -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise BadInputError(
            f"data.source: {BUILTIN_PYTHON} needs this Python's help texts (pydoc_data), which it lacks; "
            f"use {BUILTIN_GRAMMAR} or a path"
        ) from error
    for name in sorted(topics):
        yield topics[name]


def _docstrings() -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in _library_files(Path(sysconfig.get_path("stdlib"))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library are not our reader's concern
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue  # templates and data with the suffix .py
        for node in ast.walk(tree):
            if isinstance(node, documented):
                text = ast.get_docstring(node)
                if text is not None and len(text) >= _SHORTEST_DOCSTRING:
                    yield text


def _library_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _NOT_PROSE and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
